package engine

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
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

// TestChecks_free: some clouds ask at the load balancer's address, which no interface has.
func TestChecks_free(t *testing.T) {
	noGoroutineLeft(t)
	at := netip.MustParseAddrPort("203.0.113.1:32123")
	for name, bind := range map[string]func(netip.AddrPort) (net.Listener, error){"alone": listenFree, "shared": listenShared} {
		e := New(Options{})
		e.checks.bind = bind
		e.checks.follow(map[netip.AddrPort]model.Health{at: {Service: "shop/web", Local: 1}}, slog.New(slog.DiscardHandler))
		if news := e.checks.takeNews(); len(news) > 0 || e.checks.servers[at] == nil {
			t.Errorf("%s: %v", name, news)
		}
		e.checks.close()
	}
	e := New(Options{HealthAddress: at})
	if err := e.checks.openHealthz(slog.New(slog.DiscardHandler)); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("/healthz where no client can ask: %v", err)
	}
}
