package kernelspace

import (
	"fmt"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/model"
)

// BenchmarkPlan is how long it takes to find the load balancers of 5,000 Services with 10 backends each.
func BenchmarkPlan(b *testing.B) {
	s := model.NewState()
	for i := range 5000 {
		id := model.PoolID{Service: fmt.Sprintf("ns/s%d:p", i)}
		var pool model.Pool
		for j := range 10 {
			n := i*10 + j
			pool.Backends = append(pool.Backends, model.Backend{
				Addr: netip.AddrFrom4([4]byte{10, 245, byte(n >> 8), byte(n)}), Port: 8080, Weight: 1,
			})
		}
		s.Pools[id] = pool
		s.Frontends[model.Key{Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80, Protocol: model.TCP}] =
			model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id}
	}
	for b.Loop() {
		newLayout(true, hns.Version{Major: 15, Minor: 5}.Features(), false).change(s, s.Whole())
	}
}
