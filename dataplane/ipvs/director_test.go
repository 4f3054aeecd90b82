package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// TestDirector is about the answers of the kernel, of which a Plane shows only what follows from them.
func TestDirector(t *testing.T) {
	if _, err := New(Options{})(dataplane.Config{}); errors.Is(err, dataplane.ErrUnsupported) {
		vm.Replay(t, "IPVS")
		return
	}
	for name, test := range map[string]func(*testing.T, *director){
		"refused alone": refusedAlone,
		"lost answers": func(t *testing.T, d *director) {
			lostAnswers(t, d)
			refusedAlone(t, d)
		},
		"accounts":       accounts,
		"looks at all":   looksAtAll,
		"made backwards": madeBackwards,
	} {
		t.Run(name, func(t *testing.T) {
			d, err := newNamespace()
			if err != nil {
				t.Fatal(err)
			}
			defer d.close()
			test(t, d)
		})
	}
}

// newNamespace opens the director of a network namespace that goes with it.
func newNamespace() (d *director, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			err = exec.Command("ip", "link", "set", "lo", "up").Run()
		}
		if err == nil {
			d, err = openDirector(func(string) error { return nil })
		}
	}()
	<-done
	return d, err
}

func port(n int) serverKey {
	return addressKey(model.Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: uint16(n), Protocol: model.TCP})
}

// refusedAlone has the kernel refuse some requests in several batches, first and last ones among them.
func refusedAlone(t *testing.T, d *director) {
	t.Helper()
	var have, want []string
	var requests, undo []request
	for n := 1; n <= 2*batchSize; n++ {
		done := func() { have = append(have, fmt.Sprint("done ", n)) }
		if n%batchSize <= 1 || n%7 == 0 {
			requests = append(requests, deleteServer(port(n), done))
			want = append(want, fmt.Sprintf("IPVS refuses virtual server 10.96.0.1:%d/tcp: no such process", n))
			continue
		}
		requests = append(requests, newServer(port(n), "rr", done))
		undo = append(undo, deleteServer(port(n), func() {}))
	}
	refused, err := d.perform(requests)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(requests) - len(want); len(have) != n {
		t.Errorf("%d requests have been done, not %d", len(have), n)
	}
	if have, want := lines(refused), strings.Join(want, "\n"); have != want {
		t.Errorf("have\n%s\nwant\n%s", have, want)
	}
	if refused, err := d.perform(undo); err != nil || len(refused) > 0 {
		t.Error(err, lines(refused))
	}
}

func lines(errs []error) string {
	var all []string
	for _, err := range errs {
		all = append(all, err.Error())
	}
	return strings.Join(all, "\n")
}

// lostAnswers has more errors than the socket holds. Each time that is an error, and nothing counts as done.
func lostAnswers(t *testing.T, d *director) {
	t.Helper()
	size, err := d.conn.ReadBuffer()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.conn.SetReadBuffer(1); err != nil {
		t.Fatal(err)
	}
	var requests []request
	for n := 1; n <= batchSize; n++ {
		requests = append(requests, deleteServer(port(n), func() { t.Error("done:", n) }))
	}
	for range 3 {
		refused, err := d.perform(requests)
		if !errors.Is(err, errUnanswered) || !errors.Is(err, unix.ENOBUFS) || len(refused) > 0 {
			t.Error(err, lines(refused))
		}
	}
	if err := d.conn.SetReadBuffer(size / 2); err != nil { // the kernel doubles it
		t.Fatal(err)
	}
}
