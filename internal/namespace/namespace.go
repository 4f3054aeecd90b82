// Package namespace runs what depends on the network namespace of a thread in the one in which a plane was made,
// whichever goroutine asks.
//
//	New, on a thread of the node ──► Here ─┐
//	Sync, on any thread ──► Do(f) ─────────┴─► f, on a thread of the node
package namespace

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/thread"
)

// Namespace is a network namespace. A socket that is made in it stays there, whichever thread uses it.
type Namespace struct {
	file *os.File // nil: the one in which all goroutines run that are not locked to a thread
}

const threadNamespace = "/proc/thread-self/ns/net"

// Here is the namespace of the calling thread. If it is not the usual one, its goroutine is locked to it.
func Here() (Namespace, error) {
	own, err := os.Readlink(threadNamespace)
	if err != nil {
		return Namespace{}, err
	}
	usual := make(chan string)
	go func() {
		name, _ := os.Readlink(threadNamespace) // what cannot be told is taken to be another
		usual <- name
	}()
	if own == <-usual {
		return Namespace{}, nil
	}
	file, err := os.Open(threadNamespace)
	return Namespace{file}, err
}

// Do runs f in the namespace. After Close it fails.
func (n Namespace) Do(f func() error) error {
	if n.file == nil {
		return f()
	}
	done := make(chan error)
	thread.Run(func() {
		err := n.enter()
		if err == nil {
			err = f()
		}
		done <- err
	})
	return <-done
}

func (n Namespace) enter() (err error) {
	raw, err := n.file.SyscallConn()
	if err != nil {
		return err
	}
	failed := raw.Control(func(fd uintptr) { err = unix.Setns(int(fd), unix.CLONE_NEWNET) })
	return errors.Join(failed, err)
}

// Close forgets the namespace.
func (n Namespace) Close() error {
	if n.file == nil {
		return nil
	}
	return n.file.Close()
}
