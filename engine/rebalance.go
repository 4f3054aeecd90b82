package engine

import (
	"cmp"
	"context"
	"maps"
	"math"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// rebalances has idle connections closed after a pool has changed, if its Service wants that: clients connect anew, and
// meet the backends that came later.
//
//	Change ─► follow: which pools? ─► in rounds, for a while: Plane.CloseIdle ─► which are open ─► surplus ─► are closed
type rebalances struct {
	until   map[model.PoolID]time.Time
	next    time.Time // round; zero: there is none
	failure said.Condition
}

const (
	rebalanceFor   = 10 * time.Minute
	rebalanceRound = 2 * time.Second
	// rebalanceShare is the part of the connections that backends lack that a round moves to them, if chance decides which
	// backends clients meet.
	rebalanceShare = 12
	// uneven is how far from its even share the connections of a backend may be, and less than one is no difference.
	uneven = 0.1
)

// follow notes the pools that have changed.
func (r *rebalances) follow(c *model.Change) {
	now := time.Now()
	for id, pool := range c.Pools.Set.All() {
		if pool.Rebalance > 0 {
			r.until[id], r.next = now.Add(rebalanceFor), now.Add(rebalanceRound)
		}
	}
}

// rebalance has the plane close connections, if it is time to.
func (e *Engine) rebalance(ctx context.Context) {
	r, now := &e.rebalances, time.Now()
	if r.next.IsZero() || now.Before(r.next) {
		return
	}
	pools, backends := map[model.PoolID]model.Pool{}, map[netip.AddrPort]bool{}
	for id, until := range r.until {
		pool := e.state.Pools[id]
		if pool.Rebalance == 0 || now.After(until) {
			delete(r.until, id)
			continue
		}
		pools[id] = pool
		for i := range pool.Backends {
			backends[pool.Backends[i].AddrPort()] = true
		}
	}
	if r.next = now.Add(rebalanceRound); len(pools) == 0 {
		r.next = time.Time{}
		return
	}
	services := map[netip.AddrPort][]model.PoolID{}
	for key, f := range e.options.Table.Near(maps.Keys(pools)) {
		if pools[f.Pool].Rebalance > 0 && key.Protocol == model.TCP {
			services[key.AddrPort()] = append(services[key.AddrPort()], f.Pool)
		}
	}
	n, err := e.options.Plane.CloseIdle(ctx, &dataplane.Idle{
		Backends: backends, Choose: func(open []dataplane.Open) []int { return choose(open, pools, services) },
	})
	if r.failure.Failed(err) {
		e.options.Log.Warn("idle connections stay with crowded backends", "error", err)
	}
	if e.round.Rebalanced = n; n > 0 {
		e.options.Log.Info("closed idle connections of crowded backends", "connections", n)
	}
}

// choose returns the places of the connections that are to be closed, of all pools.
func choose(
	open []dataplane.Open, pools map[model.PoolID]model.Pool, services map[netip.AddrPort][]model.PoolID,
) (closing []int) {
	places := map[model.PoolID][]int{}
	for i, c := range open {
		of := services[c.Service]
		has := func(id model.PoolID) bool { _, has := pools[id].At(c.Backend); return has }
		if at := slices.IndexFunc(of, has); at >= 0 {
			places[of[at]] = append(places[of[at]], i)
		}
	}
	for id, all := range places {
		closing = append(closing, surplus(pools[id], open, all)...)
	}
	return closing
}

// surplus returns the places of the connections of a pool that a round closes. Each is the one that is idle longest, of
// the backend that is most crowded then. Each backend keeps its even share, by weight, rounded down. Connections of
// draining backends do not count.
func surplus(p model.Pool, open []dataplane.Open, places []int) (closing []int) {
	counts, idle, serving := map[netip.AddrPort]int{}, map[netip.AddrPort][]int{}, p.Serving()
	for _, i := range places {
		b := open[i].Backend
		if counts[b]++; open[i].Idle >= p.Rebalance {
			idle[b] = append(idle[b], i)
		}
	}
	total, weights := 0, 0
	for _, b := range serving {
		total, weights = total+counts[b.AddrPort()], weights+int(b.Weight)
	}
	share := func(b model.Backend) float64 { return float64(total) * float64(b.Weight) / float64(weights) }
	lacking, reached, even := 0.0, 0, true
	for _, b := range serving {
		lacks := share(b) - float64(counts[b.AddrPort()])
		if even = even && math.Abs(lacks) < max(1, share(b)*uneven); lacks > 0 {
			lacking, reached = lacking+lacks, reached+int(b.Weight)
		}
		slices.SortStableFunc(idle[b.AddrPort()], func(x, y int) int { return cmp.Compare(open[x].Idle, open[y].Idle) })
	}
	crowd := func(b model.Backend) float64 {
		if n := counts[b.AddrPort()]; n > int(share(b)) && len(idle[b.AddrPort()]) > 0 {
			return float64(n) / share(b)
		}
		return 0
	}
	most := int(math.Ceil(lacking / rebalanceShare * float64(weights) / float64(reached)))
	for !even && len(closing) < most {
		worst := slices.MaxFunc(serving, func(a, b model.Backend) int { return cmp.Compare(crowd(a), crowd(b)) })
		if crowd(worst) == 0 {
			break
		}
		b := worst.AddrPort()
		last := len(idle[b]) - 1
		closing, idle[b] = append(closing, idle[b][last]), idle[b][:last]
		counts[b]--
	}
	return closing
}
