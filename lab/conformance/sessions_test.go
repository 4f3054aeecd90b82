package conformance_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// memorable are pools with affinity, a small one and one so large that the iptables plane has groups of its backends.
func memorable(t *testing.T) *model.State {
	t.Helper()
	const small = `
backend default/web cluster 10.244.1.11:8080 local
backend default/web cluster 10.244.2.13:8080
backend default/web cluster 10.244.2.14:8080
backend default/web cluster6 [fd00::1]:8080
backend default/web cluster6 [fd00::2]:8080
backend default/dns cluster 10.244.1.11:53
backend default/dns cluster 10.244.2.13:53
frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster
frontend 10.96.0.11:80/tcp any forward default/large cluster snat offcluster
frontend 10.96.0.12:53/udp any forward default/dns cluster snat offcluster
frontend [fd00:96::10]:80/tcp any forward default/web cluster6 snat offcluster
pods 10.244.0.0/16
pool default/dns cluster affinity 1h0m0s
pool default/large cluster affinity 1h0m0s
pool default/web cluster affinity 3h0m0s
pool default/web cluster6 affinity 3h0m0s
`
	var large strings.Builder
	for i := range 40 {
		fmt.Fprintf(&large, "backend default/large cluster 10.245.0.%d:8080\n", i+1)
	}
	s, err := model.ParseState(large.String() + small)
	must(t, err)
	return s
}

// remembered are n sessions of clients of all pools, with all backends.
func remembered(s *model.State, n int) (all []dataplane.Session) {
	pools := slices.SortedFunc(func(yield func(model.PoolID) bool) {
		for id := range s.Pools {
			if !yield(id) {
				return
			}
		}
	}, model.PoolID.Compare)
	now := time.Now()
	for i := range n {
		id := pools[i%len(pools)]
		pool := s.Pools[id]
		client := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, 100<<24|uint32(i))))
		if id.V6 {
			client = testbed.EmbedV6(client)
		}
		all = append(all, dataplane.Session{
			Pool: id, Client: client, Backend: pool.Backends[i/len(pools)%len(pool.Backends)].AddrPort(),
			Until: now.Add(10*time.Minute + time.Duration(i%2500)*time.Second),
		})
	}
	return all
}

func told(all []dataplane.Session) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		for _, m := range all {
			if !yield(m, nil) {
				return
			}
		}
	}
}

// TestSessions has each plane take in ten thousand, and tell them, from where it has them and, to a new process, from the
// kernel.
func TestSessions(t *testing.T) {
	t.Parallel()
	planes := map[string]func(t *testing.T) dataplane.New{
		"nftables":        func(*testing.T) dataplane.New { return nftables.New },
		"iptables legacy": func(*testing.T) dataplane.New { return iptables.New(iptables.Options{Backend: iptables.Legacy}) },
		"iptables nft":    func(*testing.T) dataplane.New { return iptables.New(iptables.Options{Backend: iptables.NFTables}) },
		"ipvs":            func(*testing.T) dataplane.New { return ipvs.New(ipvs.Options{}) },
		"userspace":       func(*testing.T) dataplane.New { return userspace.New(userspace.Options{}) },
		"ebpf":            ebpfSessions,
	}
	for name, open := range planes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "ipvs" && !hasIPVS(t) {
				vm.Replay(t, "IPVS")
				return
			}
			testSessions(t, testbed.Need(t, testbed.Spec{Cgroup: true}), open(t))
		})
	}
}

func ebpfSessions(t *testing.T) dataplane.New {
	pins := testbed.NeedBPFFS(t)
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		cgroup, err := threadCgroup()
		if err != nil {
			return nil, err
		}
		return ebpf.New(ebpf.Options{
			Cgroup: cgroup, Pins: filepath.Join(pins, "fairlead"), Serve: ebpf.TC, Probed: &probed,
			Sizes: ebpf.Sizes{Translations: 1 << 14},
		})(c)
	}
}

// memories is a node on which planes follow one another.
type memories struct {
	*testing.T
	bed  conformance.Network
	open dataplane.New
	s    *model.State
}

// plane opens one, whose kernel may know something already.
func (m memories) plane(c dataplane.Config) (p dataplane.Dataplane) {
	m.Helper()
	must(m.T, m.bed.Do(testbed.Node, func() (err error) {
		p, err = m.open(c)
		return err
	}))
	return p
}

// check compares what a plane tells with what it should know.
func (m memories) check(what string, p dataplane.Handover, want []dataplane.Session) {
	m.Helper()
	type client struct {
		pool model.PoolID
		addr netip.Addr
	}
	got := map[client]dataplane.Session{}
	for one, err := range p.Sessions(m.Context(), m.s) {
		must(m.T, err)
		got[client{one.Pool, one.Client}] = one
	}
	if len(got) != len(want) {
		m.Errorf("%s: %d clients are remembered, not %d", what, len(got), len(want))
	}
	wrong := 0
	for _, one := range want {
		is := got[client{one.Pool, one.Client}]
		if away := is.Until.Sub(one.Until).Abs(); is.Backend != one.Backend || away > 3*time.Second {
			if wrong++; wrong <= 5 {
				m.Errorf("%s: %s of %s is at %s for %s more, not at %s for %s", what, one.Client, one.Pool,
					is.Backend, time.Until(is.Until), one.Backend, time.Until(one.Until))
			}
		}
	}
	if wrong > 0 {
		m.Errorf("%s: %d are wrong", what, wrong)
	}
}

func testSessions(t *testing.T, bed conformance.Network, open dataplane.New) {
	m := memories{t, bed, open, memorable(t)}
	all := remembered(m.s, 10_000)

	first := m.plane(dataplane.Config{})
	_, err := first.Learn(t.Context(), m.s, told(all[:9000]))
	must(t, err)
	must(t, first.Sync(t.Context(), m.s))
	m.check("inherited", first, all[:9000])

	began := time.Now()
	n, err := first.Learn(t.Context(), m.s, told(all))
	t.Logf("%d were compared and %d taken in within %s", len(all), n, time.Since(began))
	if err != nil || n != 1000 {
		t.Fatalf("took in %d: %v", n, err)
	}
	m.check("remembered", first, all)
	first.Save(t.Context())
	beside := m.plane(dataplane.Config{})
	m.check("saved", beside, all)
	_, err = first.Audit(t.Context(), m.s, dataplane.Quick)
	must(t, errors.Join(err, beside.Close(), first.Close()))

	second := m.plane(dataplane.Config{})
	t.Cleanup(func() { must(t, errors.Join(second.Remove(context.Background()), second.Close())) })
	m.check("left in the kernel", second, all)
	must(t, second.Sync(t.Context(), m.s))
	m.check("adopted", second, all)

	// A session of another plane that expires later replaces the plane's own.
	var others []dataplane.Session
	later := 0
	for i, one := range all {
		backends := m.s.Pools[one.Pool].Backends
		at := slices.IndexFunc(backends, func(b model.Backend) bool { return b.AddrPort() == one.Backend })
		one.Backend = backends[(at+1)%len(backends)].AddrPort()
		if i%2 == 0 {
			one.Until = one.Until.Add(time.Minute)
			all[i] = one
			later++
		} else {
			one.Until = one.Until.Add(-time.Minute)
		}
		others = append(others, one)
	}
	if n, err := second.Learn(t.Context(), m.s, told(others)); err != nil || n != later {
		t.Fatalf("took in %d: %v", n, err)
	}
	m.check("corrected", second, all)
	broken := errors.New("broken")
	_, err = second.Learn(t.Context(), m.s, func(yield func(dataplane.Session, error) bool) { yield(dataplane.Session{}, broken) })
	if !errors.Is(err, broken) {
		t.Errorf("what others cannot tell became %v", err)
	}
}

// TestSessions_left has the ebpf plane learn sessions before its first Sync and after it. The plane behind has to know
// those of the rows that are left to it.
func TestSessions_left(t *testing.T) {
	t.Parallel()
	var behind dataplane.Dataplane
	open := ebpfPlane(t, ebpf.TC, func(c dataplane.Config) (p dataplane.Dataplane, err error) {
		behind, err = nftables.New(c)
		return behind, err
	})
	s, err := model.ParseState(`
backend default/stream cluster 10.244.1.11:8080 local
backend default/stream cluster 10.244.2.13:8080
backend default/web cluster 10.244.1.11:8080 local
backend default/web cluster 10.244.2.13:8080
frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster
frontend 10.96.0.10:80/sctp any forward default/stream cluster snat offcluster
pool default/stream cluster affinity 1h0m0s
pool default/web cluster affinity 1h0m0s
`)
	must(t, err)
	m := memories{t, testbed.Need(t, testbed.Spec{Cgroup: true}), open, s}
	all := remembered(s, 1000)
	left := slices.DeleteFunc(slices.Clone(all), func(one dataplane.Session) bool {
		return one.Pool.Service != "default/stream"
	})

	p := m.plane(dataplane.Config{})
	t.Cleanup(func() { must(t, errors.Join(p.Remove(context.Background()), p.Close())) })
	_, err = p.Learn(t.Context(), s, told(all[:900]))
	must(t, err)
	must(t, p.Sync(t.Context(), s))
	m.check("learned before the first Sync", behind, left[:450])
	_, err = p.Learn(t.Context(), s, told(all))
	must(t, err)
	m.check("learned after it", behind, left)
}
