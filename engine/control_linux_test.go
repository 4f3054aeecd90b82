package engine

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

const inUse = syscall.EADDRINUSE

// checkPrivate demands that only its owner can use a socket.
func checkPrivate(t *testing.T, socket string) {
	t.Helper()
	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Error(info.Mode(), err)
	}
}

// The engine serves although another process has the control socket, and tries to open it again.
func TestControl_anotherProcess(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "control")
	r, next := newRig(t), newRig(t)
	for i, r := range []*rig{r, next} {
		r.start(func(o *Options) { o.ControlSocket = socket })
		r.send(web(i+1, "10.244.1.7"))
		r.programmed()
	}
	r.stop()
	for got := ""; got != next.state.String(); {
		next.programmed()
		text, _ := Ask(t.Context(), socket, "/dump")
		got = string(text)
	}
	next.stop()
	if got := next.log.String(); strings.Count(got, "another process listens") != 1 {
		t.Error(got)
	}
}

func TestControl_staleSocket(t *testing.T) {
	noGoroutineLeft(t)
	socket := filepath.Join(t.TempDir(), "control")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false) // as kill -9 does
	l.Close()
	r := newRig(t)
	r.start(func(o *Options) { o.ControlSocket = socket })
	r.send(web(1, "10.244.1.2"))
	if err := r.engine.Do(t.Context(), func(context.Context, View) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if got, err := Ask(t.Context(), socket, "/dump"); err != nil || string(got) != r.state.String() {
		t.Fatal(string(got), err)
	}
	r.stop()
}
