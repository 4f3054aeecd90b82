package iptables

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// testAddress is one of many, by what stands in its place and its number.
func testAddress(v6 bool, what byte, i int) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0xfd, what, 14: byte(i >> 8), 15: byte(i)})
	}
	return netip.AddrFrom4([4]byte{10, what, byte(i >> 8), byte(i)})
}

// This is a pool with affinity, of the backends from one number up to another.
func affine(v6 bool, from, to int) model.Pool {
	p := model.Pool{Affinity: 10 * time.Minute}
	for i := from; i < to; i++ {
		a := netip.AddrPortFrom(testAddress(v6, 1, i), 8080)
		p.Backends = append(p.Backends, model.Backend{Addr: a.Addr(), Port: a.Port(), Weight: 1})
	}
	return p
}

// TestChooser_known counts the rules that a first packet may meet in the chains of a pool, at most. It does so for a
// client that no set knows, and for one that a backend remembers.
func TestChooser_known(t *testing.T) {
	var lines []string
	for _, n := range []int{1, 12, 13, 100, 1000, 10000} {
		pool := affine(false, 0, n)
		chains := map[string][]rule{}
		c := newChooser(hashed("pool"), pool, n)
		c.protocol, c.edit = model.TCP, func(chain string, rules []rule) { chains[chain] = rules }
		chains[""] = c.choice(pool.Backends)
		unknown, _ := longest(chains, "", nil)
		remembered := 0
		for _, b := range pool.Backends {
			rules, to := longest(chains, "", rememberedIn(chains[c.affinityName(b)]))
			if to != b.AddrPort() {
				t.Fatalf("of %d backends, %s has clients that come to %s", n, b.AddrPort(), to)
			}
			remembered = max(remembered, rules)
		}
		lines = append(lines, fmt.Sprintf("of %d: %d unknown, %d remembered", n, unknown, remembered))
	}
	const want = `
of 1: 4 unknown, 3 remembered
of 12: 26 unknown, 14 remembered
of 13: 18 unknown, 12 remembered
of 100: 40 unknown, 29 remembered
of 1000: 50 unknown, 42 remembered
of 10000: 74 unknown, 55 remembered
`
	if got := "\n" + strings.Join(lines, "\n") + "\n"; got != want {
		t.Errorf("rules that a client meets: got%swant%s", got, want)
	}
}

// rememberedIn are the sets into which rules put a client.
func rememberedIn(rules []rule) (sets []string) {
	for _, r := range rules {
		if r.do.verb == remember {
			sets = append(sets, r.do.name)
		}
	}
	return sets
}

// longest is how many rules the longest way has of a client in such sets, and where it ends.
func longest(chains map[string][]rule, chain string, in []string) (rules int, to netip.AddrPort) {
	tried, most := 0, 0
	for _, r := range chains[chain] {
		tried++
		switch {
		case r.do.verb == dnat && r.chance == 0:
			return max(most, tried), r.do.to
		case r.do.verb == dnat:
			most = max(most, tried)
			continue
		case r.do.verb == remember, r.set != "" && !slices.Contains(in, r.set):
			continue
		}
		below, end := longest(chains, r.do.name, in)
		most = max(most, tried+below)
		if r.chance == 0 && end.IsValid() {
			return most, end
		}
		if r.chance == 0 { // it came back
			tried += below
		}
	}
	return max(most, tried), netip.AddrPort{}
}

// TestPlane_known has a pool grow and shrink, beyond what a level of groups takes. The process runs on and starts over
// by turns. Each client keeps its backend for as long as there is one, and is forgotten with it.
func TestPlane_known(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("v6=%t", v6), func(t *testing.T) {
			onBoth(t, func(t *testing.T, b Backend) {
				v := visitors{v6: v6, server: listenEverywhere(t, v6), known: map[netip.Addr]netip.AddrPort{}}
				v.of(t, b)
			})
		})
	}
}

// visitors are clients of a Service.
type visitors struct {
	v6     bool
	server *net.TCPListener
	known  map[netip.Addr]netip.AddrPort // where they came to
}

// of has the visitors visit the Service in all that becomes of it.
func (v *visitors) of(t *testing.T, b Backend) {
	t.Helper()
	ctx := context.Background()
	p, s := newPlane(t, Options{Backend: b}, dataplane.Config{}), v.state(0, 0)
	check(t, p.Sync(ctx, s))
	for i, of := range [][2]int{
		{0, 12}, {0, 13}, {0, 250}, {50, 250}, {0, 250}, {0, 40}, {0, 12}, {0, 300}, {30, 42}, {0, 100},
	} {
		next := v.state(of[0], of[1])
		if i%2 == 0 {
			check(t, p.Apply(ctx, next, model.Diff(s, next)))
		} else {
			check(t, p.Close())
			p = newPlane(t, Options{Backend: b}, dataplane.Config{})
			check(t, p.Sync(ctx, next))
		}
		s = next
		v.visit(t, p, s)
		if drifts := audit(t, b, s); len(drifts) > 0 {
			t.Errorf("drifts: %v", drifts)
		}
	}
	check(t, p.Remove(ctx))
	left, err := p.ipsets.list()
	check(t, errors.Join(err, p.Close()))
	if len(left) > 0 {
		t.Errorf("ipsets are left: %v", left)
	}
}

func (v *visitors) service() netip.AddrPort { return netip.AddrPortFrom(testAddress(v.v6, 96, 1), 80) }

func (v *visitors) pool() model.PoolID { return model.PoolID{Service: "default/many:http", V6: v.v6} }

// state has the Service with the backends from one number up to another.
func (v *visitors) state(from, to int) *model.State {
	s := model.NewState()
	f := model.Frontend{Service: v.pool().Service, Verdict: model.Forward, Pool: v.pool(), SNAT: model.Never}
	s.Frontends[model.Key{Addr: v.service().Addr(), Port: v.service().Port(), Protocol: model.TCP}] = f
	s.Pools[v.pool()] = affine(v.v6, from, to)
	return s
}

// visit has all visitors come again, and some for the first time.
func (v *visitors) visit(t *testing.T, p *Plane, s *model.State) {
	t.Helper()
	for i := range len(v.known) + 20 {
		client := testAddress(v.v6, 2, i)
		want := v.known[client]
		if !slices.ContainsFunc(s.Pools[v.pool()].Backends, func(b model.Backend) bool { return b.AddrPort() == want }) {
			want = netip.AddrPort{}
		}
		session := dataplane.Session{Pool: v.pool(), Client: client}
		if ok, err := session.Find(context.Background(), p, s); ok != want.IsValid() || ok && session.Backend != want || err != nil {
			t.Errorf("of %d: %s is remembered at %s (%v), want %s", len(s.Pools[v.pool()].Backends), client, session.Backend, err, want)
		}
		got := v.connect(t, client)
		if want.IsValid() && got != want {
			t.Errorf("of %d: %s comes to %s, want %s", len(s.Pools[v.pool()].Backends), client, got, want)
		}
		v.known[client] = got
	}
}

// connect returns whom a client reaches.
func (v *visitors) connect(t *testing.T, client netip.Addr) netip.AddrPort {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(client, 0))}
	c, err := d.Dial("tcp", v.service().String())
	check(t, err)
	defer func() { _ = c.Close() }()
	a, err := v.server.Accept()
	check(t, err)
	defer func() { _ = a.Close() }()
	reached := a.LocalAddr().(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(reached.Addr().Unmap(), reached.Port())
}

// listenEverywhere serves port 8080 of all addresses, which all are the namespace's own.
func listenEverywhere(t *testing.T, v6 bool) *net.TCPListener {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	check(t, netlink.LinkSetUp(lo))
	all := &net.IPNet{IP: testAddress(v6, 0, 0).AsSlice(), Mask: net.CIDRMask(8, testAddress(v6, 0, 0).BitLen())}
	check(t, netlink.RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: all, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST,
	}))
	if v6 {
		check(t, os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0))
	}
	l, err := net.ListenTCP("tcp", &net.TCPAddr{Port: 8080})
	check(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}
