package localhost

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// namespace is the network namespace in which sockets are made. A socket stays where it was made,
// whoever uses it.
type namespace struct {
	file *os.File // nil: the one in which all goroutines run that are not locked to a thread
}

const threadNamespace = "/proc/thread-self/ns/net"

// here is the namespace of the calling thread. If it is not the usual one, its goroutine is locked to it.
func here() (namespace, error) {
	own, err := os.Readlink(threadNamespace)
	if err != nil {
		return namespace{}, err
	}
	usual := make(chan string)
	go func() {
		name, _ := os.Readlink(threadNamespace) // what cannot be told is taken to be another
		usual <- name
	}()
	if own == <-usual {
		return namespace{}, nil
	}
	file, err := os.Open(threadNamespace)
	return namespace{file}, err
}

// do runs f in the namespace.
func (n namespace) do(f func() error) error {
	if n.file == nil {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // this thread cannot end, and /proc/self shows its namespace
			defer runtime.UnlockOSThread()
			done <- n.do(f)
			return
		}
		err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		done <- err // never unlocked, the thread ends with its goroutine
	}()
	return <-done
}

func (n namespace) close() error {
	if n.file == nil {
		return nil
	}
	return n.file.Close()
}
