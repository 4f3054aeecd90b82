package ebpf_test

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// large is a State of n Services with 10 backends each.
func large(n int) *model.State {
	s := model.NewState()
	for i := range n {
		id := model.PoolID{Service: fmt.Sprintf("default/s%d:http", i)}
		pool := model.Pool{}
		for j := range 10 {
			a := netip.AddrFrom4([4]byte{10, byte(128 + i/(1<<16)), byte(i >> 8), byte(i)})
			pool.Backends = append(pool.Backends, model.Backend{Addr: a, Port: uint16(8000 + j), Weight: 1})
		}
		s.Pools[id] = pool
		a := netip.AddrFrom4([4]byte{10, byte(64 + i/(1<<16)), byte(i >> 8), byte(i)})
		s.Frontends[model.Key{Addr: a, Port: 80, Protocol: model.TCP}] = model.Frontend{
			Service: id.Service, Verdict: model.Forward, Pool: id,
		}
	}
	return s
}

// benchPlane serves no socket: its cgroup is empty.
func benchPlane(b *testing.B) dataplane.Dataplane {
	b.Helper()
	bed, pins := testbed.Need(b, testbed.Spec{Cgroup: true}), testbed.NeedBPFFS(b)
	var p dataplane.Dataplane
	err := bed.Do(testbed.Node, func() (err error) {
		p, err = ebpf.New(ebpf.Options{Cgroup: bed.Cgroup(), Pins: filepath.Join(pins, "fairlead")})(dataplane.Config{})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { p.Close() })
	return p
}

func BenchmarkSync(b *testing.B) {
	for _, n := range []int{10, 10_000, 100_000} {
		s := large(n)
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			p := benchPlane(b)
			b.ReportAllocs()
			for b.Loop() {
				if err := p.Sync(b.Context(), s); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds(), "services/s")
			counters, err := p.Counters(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			var bytes uint64
			for _, table := range counters.Tables {
				bytes += table.Bytes
			}
			b.ReportMetric(float64(bytes)/1e6, "MB-of-maps")
		})
	}
}

// One of ten backends is replaced.
func BenchmarkApply(b *testing.B) {
	for _, n := range []int{10, 10_000, 100_000} {
		s := large(n)
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			p := benchPlane(b)
			if err := p.Sync(b.Context(), s); err != nil {
				b.Fatal(err)
			}
			id := model.PoolID{Service: "default/s7:http"}
			one := s.Pools[id]
			other := model.Pool{Backends: append([]model.Backend(nil), one.Backends...)}
			other.Backends[9].Port = 9000
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				s.Pools[id] = []model.Pool{one, other}[i%2]
				c := model.Change{Pools: model.Delta[model.PoolID, model.Pool]{Set: model.Rows[model.PoolID, model.Pool]{{Key: id, Value: s.Pools[id]}}}}
				if err := p.Apply(b.Context(), s, c); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
