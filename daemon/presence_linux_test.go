package daemon

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/lack"
)

// asOther makes the test binary another process, with a socket that looks like a Fairlead's.
const asOther = "FAIRLEAD_TEST_PRESENCE"

// other listens until its standard input ends.
func other() int {
	if _, err := net.Listen("unix", presence+rand.Text()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("listening")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// besides runs another process of that user while f runs.
func besides(t *testing.T, attributes *syscall.SysProcAttr, f func()) {
	t.Helper()
	c := exec.Command("/proc/self/exe") // which may be where another user has no way to
	c.Env, c.Stderr, c.SysProcAttr = []string{asOther + "=1"}, os.Stderr, attributes
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Errorf("%q %v", line, err)
	}
	f()
	if err := errors.Join(in.Close(), c.Wait()); err != nil {
		t.Error(err)
	}
}

func TestAlone(t *testing.T) {
	t.Parallel()
	runtime.LockOSThread() // for good: thread and namespace end with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	expect := func(when string, running bool) {
		t.Helper()
		if err := Alone(); errors.Is(err, ErrRunning) != running || !running && err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	begin := func() net.Listener {
		t.Helper()
		l, err := announce()
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	expect("nobody", false)
	first, second := begin(), begin()
	expect("two", true)
	first.Close()
	expect("the second one", true)
	second.Close()
	expect("both have ended", false)
	besides(t, nil, func() { expect("root, in another process", true) })

	lack.Need(t, lack.Root)
	const nobody = 65534
	user := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	besides(t, user, func() {
		expect("somebody who cannot be one", false)
		l := begin()
		expect("one beside him", true)
		l.Close()
	})
	user.AmbientCaps = []uintptr{unix.CAP_NET_ADMIN}
	besides(t, user, func() { expect("one without root", true) })
}

// TestClaim_atOnce has many claim a network namespace at once, each for a moment. At no time two of them have it.
func TestClaim_atOnce(t *testing.T) {
	t.Parallel()
	runtime.LockOSThread() // for good: thread and namespace end with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	var all sync.WaitGroup
	var now, sum atomic.Int32
	for range 8 {
		all.Go(func() {
			runtime.LockOSThread() // as above
			if err := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); err != nil {
				t.Error(err)
				return
			}
			l, err := claim(t.Context(), slog.New(slog.DiscardHandler))
			if err != nil { // the others have taken all of its grace
				t.Log(err)
				return
			}
			sum.Add(1)
			if n := now.Add(1); n > 1 {
				t.Errorf("%d have it", n)
			}
			for range 20 {
				_, _ = findRival("") // time passes
			}
			now.Add(-1)
			_ = l.Close()
		})
	}
	all.Wait()
	if t.Logf("%d had it", sum.Load()); sum.Load() == 0 {
		t.Error("none had it")
	}
}
