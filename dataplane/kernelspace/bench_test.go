package kernelspace_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/kernelspace"
	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/hnssim"
	"fairlead.dev/fairlead/model"
)

// large is a State of Services with so many backends each, which are pods elsewhere.
func large(services, backends, pods int) *model.State {
	s := model.NewState()
	for i := range services {
		id := model.PoolID{Service: fmt.Sprintf("ns/s%d:p", i)}
		var pool model.Pool
		for j := range backends {
			n := (i*backends + j) % pods
			pool.Backends = append(pool.Backends, model.Backend{
				Addr: netip.AddrFrom4([4]byte{10, 245, byte(n >> 8), byte(n)}), Port: 8080, Weight: 1,
			})
		}
		pool.Backends = sorted(pool.Backends)
		s.Pools[id] = pool
		s.Frontends[model.Key{Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80, Protocol: model.TCP}] =
			model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id}
	}
	return s
}

// BenchmarkKernelspace starts with 5,000 Services of 10 backends each, on the simulator, and changes one.
func BenchmarkKernelspace(b *testing.B) {
	s := large(5000, 10, 50_000)
	sim := hnssim.New(newest)
	if _, err := sim.Do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Networks, Document: document(hns.Network{
		Name: "cni", Type: "L2Bridge",
	})}); err != nil {
		b.Fatal(err)
	}
	open := func(b *testing.B) dataplane.Dataplane {
		p, err := kernelspace.Driver(kernelspace.Options{
			Network: "cni", Records: b.TempDir(), HNS: hnssim.Client{Service: sim},
		}).Open(dataplane.Config{Log: testLog(b)})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { p.Close() })
		return p
	}
	b.Run("start", func(b *testing.B) {
		for b.Loop() {
			p := open(b)
			if err := p.Sync(b.Context(), s); err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			if err := p.Remove(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	})
	p := open(b)
	if err := p.Sync(b.Context(), s); err != nil {
		b.Fatal(err)
	}
	b.Run("restart", func(b *testing.B) {
		for b.Loop() {
			if err := p.Sync(b.Context(), s); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("audit", func(b *testing.B) {
		for b.Loop() {
			if _, err := p.Audit(b.Context(), s, dataplane.Quick); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("change", func(b *testing.B) {
		n := 0
		for b.Loop() {
			n++
			next := s // its maps are the plane's only until the call returns
			id := model.PoolID{Service: "ns/s7:p"}
			pool := next.Pools[id]
			pool.Backends = sorted(append(pool.Backends[:9:9], model.Backend{
				Addr: netip.AddrFrom4([4]byte{10, 246, byte(n >> 8), byte(n)}), Port: 8080, Weight: 1,
			}))
			next.Pools[id] = pool
			change := model.Change{Pools: model.Delta[model.PoolID, model.Pool]{Set: model.Rows[model.PoolID, model.Pool]{{
				Key: id, Value: pool,
			}}}}
			if err := p.Apply(b.Context(), next, change); err != nil {
				b.Fatal(err)
			}
			s = next
		}
	})
}

func sorted(all []model.Backend) []model.Backend {
	slices.SortFunc(all, model.Backend.Compare)
	return all
}
