package takeover

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
)

// namespace is a network namespace; the sockets and files of its calls belong to it.
type namespace struct{ handle netns.NsHandle }

func newNamespace() (namespace, error) {
	handle, err := netns.Get()
	return namespace{handle}, err
}

// do runs f on the calling goroutine, in the namespace. A thread that is there already needs no right
// to enter it.
func (n namespace) do(f func() error) (err error) {
	runtime.LockOSThread()
	own, err := netns.Get()
	if err != nil {
		return err
	}
	defer own.Close()
	if own.Equal(n.handle) {
		defer runtime.UnlockOSThread()
		return f()
	}
	if err := netns.Set(n.handle); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace: %w", err)
	}
	defer func() {
		if back := netns.Set(own); back == nil { // otherwise the thread must not serve others
			runtime.UnlockOSThread()
		}
	}()
	return f()
}

func (n namespace) close() error { return n.handle.Close() }
