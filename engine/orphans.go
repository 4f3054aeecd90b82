package engine

import (
	"context"
	"maps"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// orphans remembers the backends that pools have lost: they were removed, or do not answer. The plane resets open
// connections to those of them that are dead.
//
//	Change ─► follow: lost by a pool ─► gone, for a while ─► look: does another pool have it? ─► Plane.ResetOrphans
type orphans struct {
	gone    dataplane.Gone
	at      time.Time // of the next look; zero: nothing is gone
	rest    time.Time // no look is earlier
	lost    time.Time // when a pool has lost a backend last
	failure said.Condition
}

const (
	goneFor = 20 * time.Minute
	maxGone = 1 << 14
	// Looks become rarer: a tenth of the time since the last loss is between two, within these bounds. Changes wait for
	// looks, and these may take long: they take a twentieth of the time at most.
	minOrphanLook, maxOrphanLook, orphanShare = time.Second, 10 * time.Second, 20
)

// follow notes the backends that pools have lost by a change. One too many takes the place of any other: most dead
// connections are found soon after the loss.
func (o *orphans) follow(c *model.Change) {
	now := time.Now()
	for _, b := range c.Lost() {
		if len(o.gone) == maxGone {
			for other := range o.gone {
				delete(o.gone, other)
				break
			}
		}
		o.gone[b], o.lost = now.Add(goneFor), now
		o.at = earlier(o.at, later(now.Add(minOrphanLook), o.rest))
	}
}

// resetOrphans has the plane look, if it is time to. In the last look nothing is gone: the plane tidies up.
func (e *Engine) resetOrphans(ctx context.Context) {
	o, now := &e.orphans, time.Now()
	if o.at.IsZero() || now.Before(o.at) {
		return
	}
	maps.DeleteFunc(o.gone, func(_ netip.AddrPort, until time.Time) bool {
		return now.After(until) || !e.options.ResetOrphans
	})
	for _, pool := range e.state.Pools {
		for i := range pool.Backends {
			delete(o.gone, pool.Backends[i].AddrPort())
		}
	}
	var err error
	e.round.Orphans, err = e.options.Plane.ResetOrphans(ctx, o.gone)
	o.rest = now.Add(max(minOrphanLook, orphanShare*time.Since(now)))
	if o.at = later(now.Add(min(now.Sub(o.lost)/10, maxOrphanLook)), o.rest); len(o.gone) == 0 {
		o.at = time.Time{}
	}
	if o.failure.Failed(err) {
		e.options.Log.Warn("connections to dead backends are left to their clients", "error", err)
	}
}
