package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/model"
)

// looksAtAll has another program change a real server of many virtual servers, of which some come and go all the time.
func looksAtAll(t *testing.T, d, _ *client) {
	t.Helper()
	const many = maxVerified + 100
	backend := ipvs.Destination{Addr: netip.MustParseAddrPort("127.0.0.1:80"), Weight: 1}
	var requests, undo []ipvs.Request
	for n := 1; n <= many; n++ {
		requests = append(requests, ipvs.NewServer(port(n), "rr", nil), ipvs.NewRequest(ipvs.NewDestination, port(n), backend, nil))
		undo = append(undo, ipvs.DeleteServer(port(n), nil))
	}
	do := func(requests ...ipvs.Request) {
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
	s := &servers{client: d}
	if err := s.load(func(ipvs.Key) bool { return true }); err != nil {
		t.Fatal(err)
	}
	do(ipvs.NewRequest(ipvs.SetDestination, port(77), ipvs.Destination{Addr: backend.Addr, Weight: 5}, nil))
	var drifts []dataplane.Drift
	for range many {
		do(ipvs.NewServer(port(many+1), "rr", nil))
		found, err := s.verify()
		if err != nil {
			t.Fatal(err)
		}
		drifts = append(drifts, found...)
		do(ipvs.DeleteServer(port(many+1), nil))
		if len(s.turns.keys) == 0 {
			break
		}
	}
	want := "virtual server 10.96.0.1:77/tcp: is real server 127.0.0.1:80 weight 5, should be real server 127.0.0.1:80 weight 1"
	if len(drifts) != 1 || fmt.Sprint(drifts[0]) != want {
		t.Errorf("have %v\nwant [%s]", drifts, want)
	}
}

// madeBackwards has another program delete all virtual servers. They are made again from the last one listed to the
// first.
func madeBackwards(t *testing.T, d, other *client) {
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
	plane := &Plane{client: d}
	made := func() (order []ipvs.Key, all plan) {
		k, todo := plane.newKernel(), &work{}
		if err := k.servers.load(func(ipvs.Key) bool { return true }); err != nil {
			t.Fatal(err)
		}
		w, err := k.take(state, state.Whole())
		if err != nil {
			t.Fatal(err)
		}
		k.planServers(w, todo)
		for _, r := range todo.servers.first {
			if len(order) == 0 || order[len(order)-1] != r.Server { // it is made, and gets a real server
				order = append(order, r.Server)
			}
		}
		return order, todo.servers
	}
	first, requests := made()
	if want := slices.SortedFunc(slices.Values(first), ipvs.Key.Compare); !slices.Equal(first, want) {
		t.Errorf("who has listed nothing makes %v", first)
	}
	if refused, err := d.perform(requests.first); err != nil || len(refused) > 0 {
		t.Fatal(err, lines(refused))
	}
	want := listing(t, d)
	if _, err := other.perform(deletions(want)); err != nil { // as ipvsadm -C does
		t.Fatal(err)
	}
	listing(t, d)
	slices.Reverse(want)
	if have, _ := made(); !slices.Equal(have, want) {
		t.Errorf("made again in the order %v, want %v", have, want)
	}
}

// listing is the order in which the kernel lists virtual servers.
func listing(t *testing.T, d *client) []ipvs.Key {
	t.Helper()
	all, err := d.Servers()
	if err != nil {
		t.Fatal(err)
	}
	return slices.SortedFunc(maps.Keys(all), func(a, b ipvs.Key) int { return d.Compare(b, a) })
}
