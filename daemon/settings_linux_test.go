package daemon

import (
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/internal/thread"
	"fairlead.dev/fairlead/lab/lack"
)

// TestNodeName: a machine that gets another name, as from DHCP, stays the same node.
func TestNodeName(t *testing.T) {
	lack.Need(t, lack.Root)
	done := make(chan struct{})
	thread.Run(func() { // which ends with its namespace
		defer close(done)
		if err := unix.Unshare(unix.CLONE_NEWUTS); err != nil {
			t.Error(err)
			return
		}
		before, err := nodeName(&config.Config{})
		if err == nil {
			err = unix.Sethostname([]byte("another-name"))
		}
		after, err2 := nodeName(&config.Config{})
		if err != nil || err2 != nil || before != after {
			t.Errorf("%v: the node was %q and is %q: %v", err, before, after, err2)
		}
	})
	<-done
}
