package ipvs

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// accounts has the director know how many virtual servers there are by its doing.
func accounts(t *testing.T, d *director) {
	t.Helper()
	before := d.made
	v6 := addressKey(model.Key{Addr: netip.MustParseAddr("fd00::1"), Port: 1, Protocol: model.TCP})
	for _, step := range []struct {
		request request
		there   int
	}{
		{newServer(port(1), "rr", func() {}), 1},
		{newServer(port(2), "rr", func() {}), 2},
		{newServer(port(2), "rr", func() {}), 2}, // refused
		{setServer(port(2), "wrr", func() {}), 2},
		{newServer(v6, "rr", func() {}), 2}, // which the kernel's number is not about
		{newServer(serverKey{mark: markBits | 2}, "rr", func() {}), 3},
		{newServer(serverKey{mark: markBits | 2, v6: true}, "rr", func() {}), 3},
		{deleteServer(serverKey{mark: markBits | 2, v6: true}, func() {}), 3},
		{deleteServer(serverKey{mark: markBits | 2}, func() {}), 2},
		{deleteServer(v6, func() {}), 2},
		{deleteServer(port(1), func() {}), 1},
		{deleteServer(port(2), func() {}), 0},
	} {
		if _, err := d.perform([]request{step.request}); err != nil {
			t.Fatal(err)
		}
		n, err := d.count()
		if err != nil || n != step.there || d.made-before != n {
			t.Errorf("%s: the kernel counts %d (%v), the director %d, want %d",
				step.request.what, n, err, d.made-before, step.there)
		}
	}
}

// looksAtAll has somebody change a real server of many virtual servers, of which some come and go all the time.
func looksAtAll(t *testing.T, d *director) {
	t.Helper()
	const many = maxVerified + 100
	backend := real{addr: netip.MustParseAddrPort("127.0.0.1:80"), weight: 1}
	var requests, undo []request
	for n := 1; n <= many; n++ {
		requests = append(requests, newServer(port(n), "rr", func() {}), realRequest(cmdNewDest, port(n), backend, func() {}))
		undo = append(undo, deleteServer(port(n), func() {}))
	}
	do := func(requests ...request) {
		t.Helper()
		if refused, err := d.perform(requests); err != nil || len(refused) > 0 {
			t.Fatal(err, lines(refused))
		}
	}
	do(requests...)
	defer do(undo...)
	if n := len(listing(t, d)); n != many { // the table grows meanwhile
		t.Errorf("%d of %d virtual servers are listed", n, many)
	}
	s := &servers{director: d}
	if err := s.load(func(serverKey) bool { return true }); err != nil {
		t.Fatal(err)
	}
	do(realRequest(cmdSetDest, port(77), real{addr: backend.addr, weight: 5}, func() {}))
	var drifts []dataplane.Drift
	for range many {
		do(newServer(port(many+1), "rr", func() {}))
		found, err := s.verify()
		if err != nil {
			t.Fatal(err)
		}
		drifts = append(drifts, found...)
		do(deleteServer(port(many+1), func() {}))
		if len(s.turns.keys) == 0 {
			break
		}
	}
	want := "virtual server 10.96.0.1:77/tcp: is real server 127.0.0.1:80 weight 5, should be real server 127.0.0.1:80 weight 1"
	if len(drifts) != 1 || fmt.Sprint(drifts[0]) != want {
		t.Errorf("have %v\nwant [%s]", drifts, want)
	}
}

// madeBackwards has somebody delete all virtual servers: they are made again from the last one listed to the first.
func madeBackwards(t *testing.T, d *director) {
	t.Helper()
	var rows strings.Builder
	for n := 1; n <= 9; n++ {
		fmt.Fprintf(&rows, "frontend 10.96.0.1:%d/tcp any forward default/web:http cluster snat never\n", n)
	}
	rows.WriteString("pool default/web:http cluster\nbackend default/web:http cluster 127.0.0.1:80\n")
	state, err := model.ParseState(rows.String())
	if err != nil {
		t.Fatal(err)
	}
	plane := &Plane{director: d}
	made := func() (order []serverKey, all plan) {
		k, todo := plane.newKernel(), &work{}
		if err := k.servers.load(func(serverKey) bool { return true }); err != nil {
			t.Fatal(err)
		}
		w, err := k.take(state, everything(state))
		if err != nil {
			t.Fatal(err)
		}
		k.planServers(w, todo)
		for _, r := range todo.servers.first {
			if r.command == cmdNewService {
				order = append(order, r.server)
			}
		}
		return order, todo.servers
	}
	first, requests := made()
	if want := slices.SortedFunc(slices.Values(first), serverKey.compare); !slices.Equal(first, want) {
		t.Errorf("who has listed nothing makes %v", first)
	}
	if refused, err := d.perform(requests.first); err != nil || len(refused) > 0 {
		t.Fatal(err, lines(refused))
	}
	want := listing(t, d)
	const flush = 17 // IPVS_CMD_FLUSH, as ipvsadm -C
	all := request{command: flush, encode: func(*netlink.AttributeEncoder) {}, done: func() {}}
	if _, err := d.perform([]request{all}); err != nil {
		t.Fatal(err)
	}
	listing(t, d)
	slices.Reverse(want)
	if have, _ := made(); !slices.Equal(have, want) {
		t.Errorf("made again in the order %v, want %v", have, want)
	}
}

// listing is the order in which the kernel lists virtual servers.
func listing(t *testing.T, d *director) []serverKey {
	t.Helper()
	all, err := d.servers()
	if err != nil {
		t.Fatal(err)
	}
	return slices.SortedFunc(maps.Keys(all), func(a, b serverKey) int { return cmp.Compare(d.places[a], d.places[b]) })
}
