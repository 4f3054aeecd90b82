package ipvs

import (
	"errors"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// TestClient is about many virtual servers, of which a Plane shows only what follows from them.
func TestClient(t *testing.T) {
	if _, err := New(Options{})(dataplane.Config{}); errors.Is(err, dataplane.ErrUnsupported) {
		vm.Replay(t, "IPVS")
		return
	}
	for name, test := range map[string]func(t *testing.T, d, other *client){
		"looks at all":   looksAtAll,
		"made backwards": madeBackwards,
	} {
		t.Run(name, func(t *testing.T) {
			d, other, err := newNamespace()
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			defer other.Close()
			test(t, d, other)
		})
	}
}

// newNamespace opens two directors of a network namespace that goes with it.
func newNamespace() (d, other *client, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			err = exec.Command("ip", "link", "set", "lo", "up").Run()
		}
		if err == nil {
			d, err = openClient(func(string) error { return nil })
		}
		if err == nil {
			other, err = openClient(d.fault)
		}
	}()
	<-done
	return d, other, err
}

func port(n int) ipvs.Key {
	return addressKey(model.Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: uint16(n), Protocol: model.TCP})
}

func lines(errs []error) string {
	var all []string
	for _, err := range errs {
		all = append(all, err.Error())
	}
	return strings.Join(all, "\n")
}
