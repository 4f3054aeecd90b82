package conntrack

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// traffic adds up the packets and bytes of flows that rules have translated. The kernel counts them in each flow if the
// sysctl net.netfilter.nf_conntrack_acct says so. IPVS counts those that it translates itself.
//
//	a flow ends ── event ──► ended ─┐
//	flows that go on ── list ───────┴► of each destination and backend
//
// The event makes a connection some percent dearer, so that traffic is counted only with the connections of each
// backend. Events that are lost when very many flows end at once are missing in the sums.
type traffic struct {
	watch *tracked.Watch
	done  chan struct{}

	mu    sync.Mutex
	ended map[way]dataplane.Sum

	told map[way]dataplane.Sum // at least so much, as a flow that ends is in neither for a moment
}

// way is from a destination of clients to what answers them.
type way struct {
	to      model.Key
	backend netip.AddrPort // not valid: those that have left
}

// maxWays bounds of how many ways ended flows are added up.
const maxWays = 1 << 16

// watchTraffic begins, if the kernel tells when flows end.
func watchTraffic() *traffic {
	w, err := tracked.NewWatch(tracked.Ended)
	if err != nil {
		return nil
	}
	t := &traffic{watch: w, done: make(chan struct{}), ended: map[way]dataplane.Sum{}, told: map[way]dataplane.Sum{}}
	go func() {
		defer close(t.done)
		for {
			if err := w.Next(t.end); err != nil && !errors.Is(err, tracked.ErrMissed) {
				return // closed
			}
		}
	}()
	return t
}

func (t *traffic) end(f *tracked.Flow) {
	at, s := of(f)
	if f.Status&tracked.NewTo == 0 || s == (dataplane.Sum{}) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if had, ok := t.ended[at]; ok || len(t.ended) < maxWays {
		t.ended[at] = had.Plus(s)
	}
}

// of is what a flow has carried.
func of(f *tracked.Flow) (way, dataplane.Sum) {
	return way{model.Key{Addr: f.To.Addr(), Port: f.To.Port(), Protocol: f.Protocol}, f.Answers},
		dataplane.Sum{ToBackend: dataplane.Traffic(f.Sent), ToClient: dataplane.Traffic(f.Received)}
}

// add puts the sums into counters, in the rows of backends.
func (t *traffic) add(c *dataplane.Counters, conn *nfnetlink.Socket, s *model.State) error {
	settle(t.told, s)
	t.mu.Lock()
	settle(t.ended, s)
	all := maps.Clone(t.ended)
	t.mu.Unlock()
	open := map[way]dataplane.Sum{}
	translated := tracked.Filter{Status: tracked.NewTo, Mask: tracked.NewTo}
	err := translated.Each(conn, func() { clear(open) }, func(f *tracked.Flow) {
		at, s := of(f)
		open[at] = open[at].Plus(s)
	})
	if err != nil {
		return fmt.Errorf("traffic of flows: %w", err)
	}
	settle(open, s)
	for at, sum := range open {
		all[at] = all[at].Plus(sum)
	}
	rows := dataplane.Tally{}
	for _, row := range c.Served {
		rows.Add(row)
	}
	for at, sum := range all {
		if sum.ToBackend.Packets == 0 { // the kernel does not count, or began later
			continue
		}
		row, _ := rowOf(s, at)
		row.Sum = sum.Max(t.told[at])
		t.told[at] = row.Sum
		rows.Add(row)
	}
	c.Served, c.Traffic = rows.Served(), c.Traffic || len(t.told) > 0
	c.Sort()
	return nil
}

// settle adds up the sums of backends that have left their pool, so that these take no places any more. It drops those
// of a destination that is no Service's any more, or never was.
func settle(sums map[way]dataplane.Sum, s *model.State) {
	for at, sum := range sums {
		row, ok := rowOf(s, at)
		if ok && row.Backend == at.backend {
			continue
		}
		if delete(sums, at); ok {
			at.backend = row.Backend
			sums[at] = sums[at].Plus(sum)
		}
	}
}

// rowOf is where the connections of a way are counted.
func rowOf(s *model.State, at way) (row dataplane.Served, ok bool) {
	for _, id := range s.PoolsAt(at.to.Protocol, at.to.AddrPort()) {
		_, has := s.Pools[id].At(at.backend)
		if ok && !has {
			continue
		}
		row, ok = dataplane.Served{Pool: id}, true
		if has {
			row.Backend = at.backend
		}
	}
	return row, ok
}

func (t *traffic) close() error {
	if t == nil {
		return nil
	}
	err := t.watch.Close()
	<-t.done
	return err
}
