package conformance_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// successor is a plane that may follow others, as the daemon runs it.
type successor struct {
	name string
	open dataplane.New
}

func successors(t *testing.T) []successor {
	wrap := func(new dataplane.New) dataplane.New { return localhost.Wrap(conntrack.Wrap(new)) }
	byProcess := userspace.Driver(userspace.Options{}, nil, nil)
	return []successor{
		{"nftables", wrap(nftables.New)},
		{"iptables", wrap(iptables.New(iptables.Options{Backend: iptables.NFTables}))},
		{"userspace", conntrack.WrapUntranslated(byProcess.Open, byProcess.Carries)},
		{"ebpf", ebpfSessions(t)},
	}
}

// TestAffinity_carried has planes follow one another in all orders. A client of the first plane keeps its backend.
func TestAffinity_handedOver(t *testing.T) {
	t.Parallel()
	all := successors(t)
	var tour []successor
	for i, from := range all {
		tour = append(tour, from)
		for _, to := range all[i+1:] {
			tour = append(tour, to, from)
		}
	}
	testHandedOver(t, nil, tour)
}

func TestAffinity_handedOverIPVS(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	ipvs := successor{"ipvs", ipvsPlane(ipvs.Options{})}
	tour := []successor{ipvs}
	for _, other := range successors(t) {
		tour = append(tour, other, ipvs)
	}
	testHandedOver(t, nil, tour)
}

// affinityServices is a Service with affinity, by TCP and UDP in both families, of which two backends are on each node.
type affinityServices struct {
	*testing.T
	bed     conformance.Network
	s       *model.State
	clients []testbed.Place
}

// newSticky has it on a bed; with a Network in place of nil, on that, which has its pods.
func newAffinityServices(t *testing.T, bed conformance.Network) affinityServices {
	var pods []testbed.PodSpec
	var rows strings.Builder
	for _, p := range []struct {
		name, addr string
		node       testbed.Place
	}{
		{"client", "10.244.1.20", testbed.Node},
		{"pod-a", "10.244.1.11", testbed.Node}, {"pod-b", "10.244.1.12", testbed.Node},
		{"pod-c", "10.244.2.13", testbed.NodeB}, {"pod-d", "10.244.2.14", testbed.NodeB},
	} {
		v4 := netip.MustParseAddr(p.addr)
		v6 := testbed.EmbedV6(v4)
		pods = append(pods, testbed.PodSpec{
			Name: p.name, Node: p.node, Addrs: []netip.Addr{v4, v6},
			Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}, {Protocol: model.UDP, Port: 5353}},
		})
		local := ""
		if p.node == testbed.Node {
			local = " local"
		}
		if p.name != "client" {
			fmt.Fprintf(&rows, "backend default/tcp cluster %s:8080%s\nbackend default/udp cluster %s:5353%s\n", v4, local, v4, local)
			fmt.Fprintf(&rows, "backend default/tcp cluster6 [%s]:8080%s\nbackend default/udp cluster6 [%s]:5353%s\n", v6, local, v6, local)
		}
	}
	if bed == nil {
		bed = testbed.Need(t, testbed.Spec{Cgroup: true, Pods: pods})
	}
	for _, to := range affinityKeys() {
		pool := "default/" + to.Protocol.String() + " cluster"
		if to.Addr.Is6() {
			pool += "6"
		}
		fmt.Fprintf(&rows, "frontend %s forward %s snat offcluster\npool %s affinity 3h0m0s\n", to, pool, pool)
	}
	s, err := model.ParseState(rows.String() + "pods 10.244.0.0/16\npods fd00::af4:0/112\n")
	must(t, err)
	return affinityServices{t, bed, s, []testbed.Place{"client", testbed.Node, testbed.Outside}}
}

// stickyServices are its addresses.
func affinityKeys() (all []model.Key) {
	for i, protocol := range []model.Protocol{model.TCP, model.UDP} {
		v4 := netip.AddrFrom4([4]byte{10, 96, 0, byte(10 + i)})
		all = append(all, model.Key{Addr: v4, Port: 80, Protocol: protocol},
			model.Key{Addr: testbed.EmbedV6(v4), Port: 80, Protocol: protocol})
	}
	return all
}

// ask returns the backend that answers each client.
func (s affinityServices) ask(when string) map[string]string {
	s.Helper()
	answers := map[string]string{}
	for _, from := range s.clients {
		for _, to := range affinityKeys() {
			o, err := s.bed.Probe(s.Context(), testbed.Probe{
				From: from, To: to.AddrPort(), Protocol: to.Protocol, Timeout: 10 * time.Second,
			})
			must(s.T, err)
			if o.Result != testbed.Answered {
				s.Fatalf("%s: %s to %s: %s", when, from, to, o)
			}
			answers[fmt.Sprintf("%s to %s", from, to)] = o.Backend
		}
	}
	return answers
}

// keep asks several times, and compares.
func (s affinityServices) keep(when string, want map[string]string) {
	s.Helper()
	for range 4 {
		for who, backend := range s.ask(when) {
			if backend != want[who] {
				s.Errorf("%s: %s is answered by %s, not by %s any more", when, who, backend, want[who])
			}
		}
	}
}

func testHandedOver(t *testing.T, bed conformance.Network, tour []successor) {
	s := newAffinityServices(t, bed)
	m := memories{T: t, bed: s.bed, open: tour[0].open, s: s.s}
	now := m.plane(dataplane.Config{})
	defer func() { must(t, errors.Join(now.Remove(context.Background()), now.Close())) }()
	must(t, now.Sync(t.Context(), s.s))
	want := s.ask("first")
	s.keep("with "+tour[0].name, want)

	silent := dataplane.Session{
		Pool: model.PoolID{Service: "default/tcp"}, Client: netip.MustParseAddr("198.19.255.7"), // no other test gives it to a namespace
		Backend: netip.MustParseAddrPort("10.244.2.13:8080"), Until: time.Now().Add(3*time.Hour - min(uptime(t), 10_000*time.Second)),
	}
	_, err := now.Learn(t.Context(), s.s, told([]dataplane.Session{silent}))
	must(t, err)
	for i, next := range tour[1:] {
		when := "from " + tour[i].name + " to " + next.name
		before := now
		m.open = next.open
		now = m.plane(dataplane.Config{})
		_, err := now.Learn(t.Context(), s.s, before.Sessions(t.Context(), s.s))
		must(t, err)
		must(t, now.Sync(t.Context(), s.s))
		s.keep(when+", both in force", want)
		_, err = now.Learn(t.Context(), s.s, before.Sessions(t.Context(), s.s))
		must(t, err)
		s.keep(when+", before the former is gone", want) // what now learns is not replaced any more
		must(t, errors.Join(before.Remove(t.Context()), before.Close()))
		s.keep(when, want)
		s.checkTime(when, now, silent)
	}
}

// uptime bounds how long ago a client can have been here.
func uptime(t *testing.T) time.Duration {
	t.Helper()
	var now unix.Timespec
	must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	return time.Duration(now.Nano())
}

// checkTime has a plane know how much time is left of a client that never came back.
func (s affinityServices) checkTime(when string, p dataplane.Handover, want dataplane.Session) {
	s.Helper()
	for m, err := range p.Sessions(s.Context(), s.s) {
		must(s.T, err)
		if m.Client == want.Client {
			if away := m.Until.Sub(want.Until).Abs(); m.Backend != want.Backend || away > 20*time.Second {
				s.Errorf("%s: a client that had %s at %s has %s at %s", when, time.Until(want.Until), want.Backend,
					time.Until(m.Until), m.Backend)
			}
			return
		}
	}
	s.Errorf("%s: a client that had %s left is forgotten", when, time.Until(want.Until))
}
