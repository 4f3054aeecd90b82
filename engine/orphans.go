package engine

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// orphans remembers the backends that pools have lost: they were removed, or do not answer. The plane resets open
// connections to those of them that are dead.
//
//	Change ─► follow: lost by a pool ─► lost ─► search: does another pool have it? ─► gone, for a while
//	                                                                           look ─► Plane.ResetOrphans
type orphans struct {
	lost     dataplane.Gone // since the last search has begun
	suspects dataplane.Gone // no pool has them of those that were searched
	pools    []model.PoolID // to be searched yet
	gone     dataplane.Gone // no pool has them
	at       time.Time      // of the next look or part of a search; zero: nothing is remembered
	rest     time.Time      // none of these is earlier
	last     time.Time      // when a pool has lost a backend last
	failure  said.Condition
}

const (
	goneFor = 20 * time.Minute
	maxGone = 1 << 14
	// Looks become rarer: a tenth of the time since the last loss is between two, within these bounds. Changes wait for
	// looks and for parts of searches, and these may take long: they take a twentieth of the time at most.
	minOrphanLook, maxOrphanLook, orphanShare = time.Second, 10 * time.Second, 20
	// searchPart is how many pools are searched at once, as changes wait for it.
	searchPart = 1 << 10
)

func newOrphans() orphans {
	return orphans{lost: dataplane.Gone{}, suspects: dataplane.Gone{}, gone: dataplane.Gone{}}
}

// follow notes the backends that pools have lost by a change, and forgets those that pools have got.
func (o *orphans) follow(c *model.Change) {
	now := time.Now()
	for _, b := range c.Lost() {
		remember(o.lost, b, now.Add(goneFor))
		o.last, o.at = now, earlier(o.at, later(now.Add(minOrphanLook), o.rest))
	}
	if o.at.IsZero() {
		return
	}
	for _, p := range c.Pools.Set.All() {
		forget(&p, o.lost, o.suspects, o.gone)
	}
}

// remember adds a backend. One too many takes the place of any other: most dead connections are found soon after the
// loss.
func remember(all dataplane.Gone, b netip.AddrPort, until time.Time) {
	if len(all) == maxGone {
		for other := range all {
			delete(all, other)
			break
		}
	}
	all[b] = until
}

func forget(p *model.Pool, from ...dataplane.Gone) {
	for i := range p.Backends {
		for _, all := range from {
			delete(all, p.Backends[i].AddrPort())
		}
	}
}

// search looks for pools that still have what others have lost, a part of the pools at once, and reports whether it has
// seen all. Of what pools get meanwhile, follow takes care.
func (o *orphans) search(pools map[model.PoolID]model.Pool) bool {
	if len(o.suspects) == 0 {
		if len(o.lost) == 0 {
			return true
		}
		o.suspects, o.lost = o.lost, o.suspects
		o.pools = slices.AppendSeq(make([]model.PoolID, 0, len(pools)), maps.Keys(pools))
	}
	part := o.pools[:min(len(o.pools), searchPart)]
	for _, id := range part {
		p := pools[id]
		forget(&p, o.suspects)
	}
	if o.pools = o.pools[len(part):]; len(o.pools) > 0 && len(o.suspects) > 0 {
		return false
	}
	for b, until := range o.suspects {
		remember(o.gone, b, until)
	}
	clear(o.suspects)
	o.pools = nil
	return true
}

// resetOrphans goes on with the search if it is time to, and then has the plane look. In the last look nothing is gone:
// the plane tidies up.
func (e *Engine) resetOrphans(ctx context.Context) {
	o, now := &e.orphans, time.Now()
	if o.at.IsZero() || now.Before(o.at) {
		return
	}
	if !o.search(e.state.Pools) {
		o.rest = now.Add(orphanShare * time.Since(now))
		o.at = o.rest
		return
	}
	maps.DeleteFunc(o.gone, func(_ netip.AddrPort, until time.Time) bool {
		return now.After(until) || !e.options.ResetOrphans
	})
	var err error
	e.round.Orphans, err = e.options.Plane.ResetOrphans(ctx, o.gone)
	o.rest = now.Add(max(minOrphanLook, orphanShare*time.Since(now)))
	o.at = later(now.Add(min(now.Sub(o.last)/10, maxOrphanLook)), o.rest)
	if len(o.gone) == 0 && len(o.lost) == 0 {
		o.at = time.Time{}
	}
	if o.failure.Failed(err) {
		e.options.Log.Warn("connections to dead backends are left to their clients", "error", err)
	}
}
