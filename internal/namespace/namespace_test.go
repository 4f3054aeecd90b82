package namespace

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNamespace_usual(t *testing.T) {
	n, err := Here()
	if err != nil || n.file != nil {
		t.Errorf("%v, %v: needs no entering", n, err)
	}
}

func TestNamespace_ofThread(t *testing.T) {
	own, there := make(chan string, 1), make(chan Namespace, 1)
	go func() {
		defer close(there)
		defer close(own)
		runtime.LockOSThread() // for good
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			t.Log("on the first thread, whose namespace must stay")
			return
		}
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		own <- link(t)
		n, err := Here()
		if err != nil {
			t.Error(err)
		}
		there <- n
	}()
	want, n := <-own, <-there
	defer n.Close()
	for range 20 {
		err := n.Do(func() error {
			if got := link(t); n.file != nil && got != want {
				t.Errorf("%s, want %s", got, want)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if n.file != nil && link(t) == want {
			t.Error("an ordinary goroutine got there")
		}
	}
}

func link(t *testing.T) string {
	s, err := os.Readlink(threadNamespace)
	if err != nil {
		t.Error(err)
	}
	return s
}
