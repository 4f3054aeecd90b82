package conformance_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// countedRows have Services with several frontends each, one with affinity, and rows that refuse.
const countedRows = `
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster 10.244.2.13:8080
backend default/web:http cluster 10.244.2.14:8080
backend default/web:http cluster6 [fd00::af4:10b]:8080 local
backend default/web:http cluster6 [fd00::af4:20d]:8080
backend default/dns cluster 10.244.1.12:5353 local
backend default/dns cluster 10.244.2.13:5353
backend default/dns cluster6 [fd00::af4:10c]:5353 local
backend default/dns cluster6 [fd00::af4:20d]:5353
backend default/kept cluster 10.244.1.11:8081 local
backend default/kept cluster 10.244.2.13:8081
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat always
frontend [fd00:96::10]:80/tcp any forward default/web:http cluster6 snat offcluster
frontend 10.96.0.11:53/udp any forward default/dns cluster snat offcluster
frontend [fd00:96::11]:53/udp any forward default/dns cluster6 snat offcluster
frontend 10.96.0.12:80/tcp any forward default/kept cluster snat offcluster
frontend 10.96.0.20:80/tcp any reject default/none:http
frontend 10.96.0.21:53/udp any drop default/far:dns
frontend 10.96.0.22:53/udp any forward default/dns cluster snat offcluster allow 198.51.100.0/24
guard 10.96.0.0/24 reject
pods 10.244.0.0/16
pods fd00::af4:0/112
pool default/kept cluster affinity 3h0m0s
`

// otherRows give another Service an endpoint, and one more to one that is there.
const otherRows = `
backend default/web:http cluster 10.244.1.12:8080 local
backend default/kept cluster 10.244.1.12:8081 local
backend default/other cluster 10.244.2.14:8081
frontend 10.96.0.30:80/tcp any forward default/other cluster snat offcluster
`

// counted is a node on which clients ask, and what a plane should have counted of them.
type counted struct {
	memories
	plane     dataplane.Dataplane
	served    map[string]uint64
	refused   map[string]uint64
	inProcess bool // its sums end with the process
	affinity  bool // it tells those of a pool with affinity by backend
	detail    dataplane.Detail
	byReason  bool // it tells refusals by their reason alone
	payload   bool // it counts bytes without headers
}

// TestCounters compares what each plane counts with what the backends have answered, and clients were refused.
func TestCounters(t *testing.T) {
	t.Parallel()
	planes := append(successors(t), successor{"ipvs", ipvsPlane(ipvs.Options{})},
		successor{"iptables-legacy", iptablesPlane(iptables.Legacy)})
	t.Run("nftables, services", func(t *testing.T) {
		t.Parallel()
		testCounters(t, planes[slices.IndexFunc(planes, func(s successor) bool { return s.name == "nftables" })], dataplane.PerPool)
	})
	for _, p := range planes {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			if p.name == "ipvs" && !hasIPVS(t) {
				vm.Replay(t, "IPVS")
				return
			}
			testCounters(t, p, dataplane.PerBackend)
		})
	}
}

func testCounters(t *testing.T, p successor, d dataplane.Detail) {
	s, err := model.ParseState(countedRows)
	must(t, err)
	c := &counted{
		memories: memories{t, countedBed(t), p.open, s}, served: map[string]uint64{}, refused: map[string]uint64{},
		inProcess: p.name == "ebpf" || p.name == "userspace", affinity: p.name != "ipvs",
		detail: d, byReason: p.name == "userspace" || strings.HasPrefix(p.name, "iptables"),
		payload: p.name == "userspace",
	}
	if !c.inProcess {
		must(t, c.bed.Do(testbed.Node, func() error {
			return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_acct", []byte("1"), 0)
		}))
	}
	c.start()
	seen := newCapture(t, c.bed, countedPods())
	c.ask()
	c.check("at first")
	c.checkCapture(seen)

	with, err := model.ParseState(countedRows + otherRows)
	must(t, err)
	must(t, c.plane.Apply(t.Context(), with, model.Diff(c.s, with)))
	c.s = with
	c.check("after a change")
	c.ask()
	c.check("after a change, with more connections")
	c.checkCapture(seen)

	report, err := c.plane.Audit(t.Context(), c.s, dataplane.Full)
	must(t, err)
	if len(report.Drifts) > 0 {
		t.Errorf("audit: %v", report.Drifts)
	}
	must(t, errors.Join(c.plane.Repair(t.Context(), c.s, report), c.plane.Sync(t.Context(), c.s)))
	c.ask()
	c.check("after a repair")

	must(t, c.plane.Close())
	c.start()
	c.check("after a restart")
	c.ask()
	c.check("after a restart, with more connections")
	must(t, errors.Join(c.plane.Remove(t.Context()), c.plane.Close()))
}

// checkCapture compares what was counted with what has arrived at the backends.
func (c *counted) checkCapture(seen *capture) {
	c.Helper()
	captured := map[string]uint64{}
	arrived := seen.connections()
	for id, p := range c.s.Pools {
		for _, b := range p.Backends {
			if n := arrived[b.AddrPort()]; n > 0 {
				captured[c.of(id, b.AddrPort())] += n
			}
		}
	}
	if !maps.Equal(captured, c.served) {
		c.Errorf("captured\n%v, counted\n%v", captured, c.served)
	}
	if c.detail != dataplane.PerBackend {
		return
	}
	arriving := seen.traffic
	if c.payload {
		arriving = seen.payload
	}
	eventually.Nil(c.T, "packets and bytes", func() error {
		have, err := c.plane.Counters(c.Context())
		if err != nil {
			return err
		}
		counted, captured := map[string]traffic{}, map[string]traffic{}
		for _, s := range have.Served {
			add(counted, c.of(s.Pool, s.Backend), traffic{s.ToBackend, s.ToClient})
		}
		seen.take() // the last packets of a connection come after its end for the client
		for id, p := range c.s.Pools {
			for _, b := range p.Backends {
				add(captured, c.of(id, b.AddrPort()), arriving[b.AddrPort()])
			}
		}
		if !maps.Equal(counted, captured) {
			return fmt.Errorf("captured\n%v, counted\n%v", captured, counted)
		}
		return nil
	})
}

func countedBed(t *testing.T) conformance.Network {
	return testbed.Need(t, testbed.Spec{Cgroup: true, Pods: countedPods()})
}

func countedPods() (pods []testbed.PodSpec) {
	for _, m := range conformance.Cast() {
		v4 := netip.MustParseAddr(m.Addr)
		if m.HostNetwork {
			continue
		}
		pods = append(pods, testbed.PodSpec{
			Name: m.Name, Node: m.Node, Addrs: []netip.Addr{v4, testbed.EmbedV6(v4)}, Ports: []testbed.PodPort{
				{Protocol: model.TCP, Port: 8080}, {Protocol: model.TCP, Port: 8081}, {Protocol: model.UDP, Port: 5353},
			},
		})
	}
	return pods
}

// start opens a plane and has it serve.
func (c *counted) start() {
	c.Helper()
	if c.inProcess {
		clear(c.served)
	}
	p := c.memories.plane(dataplane.Config{Counters: c.detail})
	must(c.T, p.Sync(c.Context(), c.s))
	c.plane = p
}

// ask has clients everywhere ask each frontend some times.
func (c *counted) ask() {
	c.Helper()
	const times = 7
	for _, key := range slices.SortedFunc(maps.Keys(c.s.Frontends), model.Key.Compare) {
		f := c.s.Frontends[key]
		n, timeout := times, 10*time.Second
		if f.Verdict == model.Drop || f.Allow != nil { // to see no answer takes long
			n, timeout = 3, 300*time.Millisecond
		}
		for i := range n {
			from := []testbed.Place{"client", testbed.Node, testbed.Outside}[i%3]
			o, err := c.bed.Probe(c.Context(), testbed.Probe{
				From: from, To: key.AddrPort(), Protocol: key.Protocol, Timeout: timeout,
			})
			must(c.T, err)
			if f.Verdict == model.Forward && f.Allow == nil && o.Result != testbed.Answered {
				c.Errorf("%s from %s: %s", key, from, o)
				continue
			}
			c.note(key, f, o)
		}
	}
	for range times {
		key := model.Key{Addr: netip.MustParseAddr("10.96.0.99"), Port: 1, Protocol: model.TCP}
		o, err := c.bed.Probe(c.Context(), testbed.Probe{From: "client", To: key.AddrPort(), Timeout: 10 * time.Second})
		must(c.T, err)
		if o.Result != testbed.Refused {
			c.Errorf("%s: %s", key, o)
		}
		c.refused["guards"]++
	}
}

// note expects that what a client has seen was counted.
func (c *counted) note(key model.Key, f model.Frontend, o testbed.Outcome) {
	c.Helper()
	switch {
	case o.Result == testbed.Answered:
		at := slices.IndexFunc(conformance.Cast(), func(m conformance.Member) bool { return m.Name == o.Backend })
		addr := netip.MustParseAddr(conformance.Cast()[at].Addr)
		if key.Addr.Is6() {
			addr = testbed.EmbedV6(addr)
		}
		backends := c.s.Pools[f.Pool].Backends
		i := slices.IndexFunc(backends, func(b model.Backend) bool { return b.Addr == addr })
		c.served[c.of(f.Pool, backends[i].AddrPort())]++
	case f.Allow != nil:
		c.refused["source-ranges"]++
	case c.byReason:
		c.refused[f.Verdict.String()]++
	default:
		c.refused[key.String()]++
	}
}

// of names what is counted together.
func (c *counted) of(pool model.PoolID, backend netip.AddrPort) string {
	if c.detail == dataplane.PerPool || c.s.Pools[pool].Affinity > 0 && !c.affinity {
		return pool.String()
	}
	return fmt.Sprint(pool, " ", backend)
}

// check waits, as IPVS adds up what it has counted every two seconds.
func (c *counted) check(when string) {
	c.Helper()
	var err error
	_ = eventually.Poll(c.Context(), func() error {
		err = c.compare()
		return err
	})
	if err != nil {
		c.Errorf("%s: %v", when, err)
	}
}

func (c *counted) compare() error {
	have, err := c.plane.Counters(c.Context())
	if err != nil {
		return err
	}
	served, refused := map[string]uint64{}, map[string]uint64{}
	for _, s := range have.Served {
		if s.Connections > 0 { // else it got packets of a connection that an earlier process has counted
			served[c.of(s.Pool, s.Backend)] += s.Connections
		}
	}
	for _, r := range have.Refused {
		key := model.Key{Addr: r.Addr, Port: r.Port, Protocol: r.Protocol}
		switch {
		case r.Reason == dataplane.SourceNotAllowed, c.s.Frontends[key].Allow != nil: // some planes count by row
			refused["source-ranges"] += r.Connections
		case c.byReason && r.Reason != dataplane.NoServicePort:
			refused[r.Verdict.String()] += r.Connections
		case !r.Addr.IsValid():
			refused["guards"] += r.Connections
		default:
			refused[key.String()] += r.Connections
		}
	}
	for what, of := range map[string][2]map[string]uint64{"served": {served, c.served}, "refused": {refused, c.refused}} {
		if !maps.Equal(of[0], of[1]) {
			return fmt.Errorf("%s\n%v, not\n%v\n%s", what, of[0], of[1], have)
		}
	}
	return nil
}
