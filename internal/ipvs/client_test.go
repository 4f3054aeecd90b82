package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) {
	vm.Guest()
	os.Exit(m.Run())
}

// TestClient is about the answers of the kernel.
func TestClient(t *testing.T) {
	if c, err := Open(); errors.Is(err, unix.ENOENT) {
		vm.Replay(t, "IPVS")
		return
	} else if err == nil {
		_ = c.Close()
	}
	for name, test := range map[string]func(*testing.T, *Client){
		"refused alone": refusedAlone,
		"lost answers": func(t *testing.T, c *Client) {
			lostAnswers(t, c)
			refusedAlone(t, c)
		},
		"accounts": accounts,
		"says all": saysAll,
	} {
		t.Run(name, func(t *testing.T) {
			c, err := newNamespace()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			test(t, c)
		})
	}
}

// newNamespace opens a client for a network namespace that goes with it.
func newNamespace() (d *Client, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			err = exec.Command("ip", "link", "set", "lo", "up").Run()
		}
		if err == nil {
			d, err = Open()
		}
	}()
	<-done
	return d, err
}

func port(n int) Key {
	return Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: uint16(n), Protocol: model.TCP}
}

// refusedAlone has the kernel refuse some requests in several batches, first and last ones among them.
func refusedAlone(t *testing.T, d *Client) {
	t.Helper()
	var have, want []string
	var requests, undo []Request
	for n := 1; n <= 2*batchSize; n++ {
		done := func() { have = append(have, fmt.Sprint("done ", n)) }
		if n%batchSize <= 1 || n%7 == 0 {
			requests = append(requests, DeleteServer(port(n), done))
			want = append(want, fmt.Sprintf("IPVS refuses virtual server 10.96.0.1:%d/tcp: no such process", n))
			continue
		}
		requests = append(requests, NewServer(port(n), "rr", done))
		undo = append(undo, DeleteServer(port(n), func() {}))
	}
	refused, err := d.Perform(requests)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(requests) - len(want); len(have) != n {
		t.Errorf("%d requests have been done, not %d", len(have), n)
	}
	if have, want := lines(refused), strings.Join(want, "\n"); have != want {
		t.Errorf("have\n%s\nwant\n%s", have, want)
	}
	if refused, err := d.Perform(undo); err != nil || len(refused) > 0 {
		t.Error(err, lines(refused))
	}
}

func lines(errs []*Refusal) string {
	var all []string
	for _, err := range errs {
		all = append(all, err.Error())
	}
	return strings.Join(all, "\n")
}

// lostAnswers has more errors than the socket holds. Each time that is an error, and nothing counts as done.
func lostAnswers(t *testing.T, d *Client) {
	t.Helper()
	size, err := d.conn.ReadBuffer()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.conn.SetReadBuffer(1); err != nil {
		t.Fatal(err)
	}
	var requests []Request
	for n := 1; n <= batchSize; n++ {
		requests = append(requests, DeleteServer(port(n), func() { t.Error("done:", n) }))
	}
	for range 3 {
		refused, err := d.Perform(requests)
		if !errors.Is(err, errUnanswered) || !errors.Is(err, unix.ENOBUFS) || len(refused) > 0 {
			t.Error(err, lines(refused))
		}
	}
	if err := d.conn.SetReadBuffer(size / 2); err != nil { // the kernel doubles it
		t.Fatal(err)
	}
}

// accounts has the client know how many virtual servers there are by its doing.
func accounts(t *testing.T, d *Client) {
	t.Helper()
	before := d.made
	v6 := Key{Addr: netip.MustParseAddr("fd00::1"), Port: 1, Protocol: model.TCP, V6: true}
	for _, step := range []struct {
		request Request
		there   int
	}{
		{NewServer(port(1), "rr", nil), 1},
		{NewServer(port(2), "rr", nil), 2},
		{NewServer(port(2), "rr", nil), 2}, // refused
		{SetServer(port(2), "wrr", nil), 2},
		{NewServer(v6, "rr", nil), 2}, // which the kernel's number is not about
		{NewServer(Key{Mark: 2}, "rr", nil), 3},
		{NewServer(Key{Mark: 2, V6: true}, "rr", nil), 3},
		{DeleteServer(Key{Mark: 2, V6: true}, nil), 3},
		{DeleteServer(Key{Mark: 2}, nil), 2},
		{DeleteServer(v6, nil), 2},
		{DeleteServer(port(1), nil), 1},
		{DeleteServer(port(2), nil), 0},
	} {
		if _, err := d.Perform([]Request{step.request}); err != nil {
			t.Fatal(err)
		}
		n, err := d.Count()
		if err != nil || n != step.there || d.made-before != n {
			t.Errorf("%s: the kernel counts %d (%v), the client %d, want %d",
				step.request.what, n, err, d.made-before, step.there)
		}
	}
}

// saysAll changes the weight of a destination alone: all else is sent back as it is listed.
func saysAll(t *testing.T, c *Client) {
	t.Helper()
	want := Destination{Addr: netip.MustParseAddrPort("10.244.1.2:80"), Weight: 3, Method: 3, Upper: 20, Lower: 10}
	perform := func(r ...Request) {
		if refused, err := c.Perform(r); err != nil || len(refused) > 0 {
			t.Fatal(err, lines(refused))
		}
	}
	perform(NewServer(port(80), "rr", nil), NewRequest(NewDestination, port(80), want, nil))
	for range 2 {
		have, err := c.Destinations(port(80))
		if err != nil || !slices.Equal(have, []Destination{want}) {
			t.Errorf("have %v (%v), want %v", have, err, want)
		}
		want.Weight = 0
		perform(NewRequest(SetDestination, port(80), want, nil))
	}
	perform(DeleteServer(port(80), nil))
	if have, err := c.Destinations(port(80)); err != nil || len(have) > 0 {
		t.Errorf("of a server that is gone: %v (%v)", have, err)
	}
}

// Virtual servers are made from the last one listed to the first; the rest after another program deleted most of them
// is no list to go by.
func TestPlaces(t *testing.T) {
	t.Parallel()
	var c Client
	c.places.note([]Key{port(7), port(3), port(9), port(5)})
	c.places.note([]Key{port(5)})
	got, want := []Key{port(3), port(5), port(7), port(9)}, []Key{port(5), port(9), port(3), port(7)}
	if slices.SortFunc(got, c.Compare); !slices.Equal(got, want) {
		t.Errorf("made in the order %v, want %v", got, want)
	}
	c.places.note([]Key{port(5), port(3)})
	if c.Compare(port(3), port(5)) >= 0 {
		t.Error("the list of most is not what it goes by")
	}
}
