package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// services is a State with n Services of m endpoints each.
func services(n, m int) *model.State {
	s := model.NewState()
	vip, pod := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.128.0.1")
	for i := range n {
		id := model.PoolID{Service: fmt.Sprintf("default/svc-%d:http", i)}
		var p model.Pool
		for range m {
			p.Backends = append(p.Backends, model.Backend{AddrPort: netip.AddrPortFrom(pod, 8080), Weight: 1})
			pod = pod.Next()
		}
		s.Pools[id] = p
		s.Frontends[model.Key{Addr: vip, Port: 80, Protocol: model.TCP}] = model.Frontend{
			Service: id.Service, Verdict: model.Forward, Pool: id, SNAT: model.OffCluster,
		}
		s.Guards[netip.PrefixFrom(vip, 32)] = model.Reject
		vip = vip.Next()
	}
	s.Guards[netip.MustParsePrefix("10.96.0.0/12")] = model.Drop
	s.Pods.Prefixes = []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")}
	return s
}

func TestScratch(t *testing.T) {
	for _, c := range [][2]int{{44000, 1}, {5000, 50}, {1000, 10}, {10000, 10}, {50000, 2}} {
		inNamespace(t, func() {
			s := services(c[0], c[1])
			p, err := New(dataplane.Config{})
			if err != nil {
				t.Error(err)
				return
			}
			ctx := context.Background()
			t0 := time.Now()
			if err := p.Sync(ctx, s); err != nil {
				t.Error(err)
			}
			cold := time.Since(t0)
			t0 = time.Now()
			if err := p.Sync(ctx, s); err != nil {
				t.Error(err)
			}
			warm := time.Since(t0)
			id := model.PoolID{Service: "default/svc-7:http"}
			var best [2]time.Duration
			for i := range 200 {
				pool := s.Pools[id]
				b := append([]model.Backend{}, pool.Backends...)
				k := 0
				if i%2 == 0 {
					b = append(b, model.Backend{AddrPort: netip.MustParseAddrPort("10.255.0.1:80"), Weight: 1})
				} else {
					b = b[:len(b)-1]
				}
				k = i % 2
				pool.Backends = b
				s.Pools[id] = pool
				t0 = time.Now()
				if err := p.Apply(ctx, s, model.Change{Pools: model.Delta[model.PoolID, model.Pool]{Set: map[model.PoolID]model.Pool{id: pool}}}); err != nil {
					t.Error(err)
				}
				if d := time.Since(t0); i > 20 {
					best[k] += d
				}
			}
			t.Log(c, "cold", cold, "warm", warm, "add", best[0]/90, "del", best[1]/90)
			t0 = time.Now()
			p.Remove(ctx)
			p.Close()
			t.Log("remove", time.Since(t0))
		})
	}
}
