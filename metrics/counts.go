package metrics

import (
	"context"
	"net/netip"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
)

// counts are how many rows there are.
type counts struct {
	rows    map[string]int
	noLocal map[noLocalKey]int
}

// noLocalKey groups the ports of Services that have endpoints on other nodes only, as their traffic policy
// sees it.
type noLocalKey struct{ policy, family string }

// count has the rows counted, between two batches, if they have changed and if the engine answers in
// time. Looking at all rows takes a millisecond for ten thousand Services, which is too much for each
// change and little for each scrape.
func (c *collector) count(ctx context.Context) {
	if !c.stale.Swap(false) {
		return
	}
	var found *counts
	err := c.engine.Do(ctx, func(_ context.Context, v engine.View) error {
		found = countRows(v.State)
		return nil
	})
	if err != nil {
		c.stale.Store(true)
		return
	}
	c.counted = found
}

func countRows(s *model.State) *counts {
	backends := 0
	for _, p := range s.Pools {
		backends += len(p.Backends)
	}
	return &counts{
		rows: map[string]int{
			"frontends": len(s.Frontends), "pools": len(s.Pools), "backends": backends,
			"guards": len(s.Guards), "health_checks": len(s.Health),
		},
		noLocal: countNoLocal(s),
	}
}

// countNoLocal counts ports whose packets are dropped: no other rows than those of a traffic policy
// without an endpoint on this node do that.
func countNoLocal(s *model.State) map[noLocalKey]int {
	type port struct {
		service string
		noLocalKey
	}
	seen := map[port]bool{}
	n := map[noLocalKey]int{}
	for key, f := range s.Frontends {
		if f.Verdict != model.Drop {
			continue
		}
		p := port{f.Service, noLocalKey{"external", "IPv4"}}
		if key.Addr.Is6() {
			p.family = "IPv6"
		}
		if _, ok := s.Guards[netip.PrefixFrom(key.Addr, key.Addr.BitLen())]; ok { // a ClusterIP has one
			p.policy = "internal"
		}
		if !seen[p] {
			seen[p] = true
			n[p.noLocalKey]++
		}
	}
	return n
}

func (c *counts) collect(of *collector, to series) {
	for kind, n := range c.rows {
		to.gauge(of.rows, float64(n), kind)
	}
	for _, policy := range []string{"internal", "external"} {
		for _, family := range []string{"IPv4", "IPv6"} {
			to.gauge(of.noLocal, float64(c.noLocal[noLocalKey{policy, family}]), policy, family)
		}
	}
}
