package conntrack

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// attempts has connections forgotten that a client has begun and a removed backend has not answered. Connection
// tracking keeps such a flow for up to two minutes, and each SYN from the same port renews it: the client would go on
// asking the removed backend. A flow that was answered is never touched.
//
//	Apply ─► follow: what pools were, and are ─► a goroutine, a moment later ─► look: who is lost? list, delete
//
// A look needs no State. A backend that one Service has lost may be another one's, too: then the client's next SYN
// finds a backend again.
type attempts struct {
	conntrack *nfnetlink.Socket // the goroutine's own
	config    dataplane.Config
	wake      chan struct{} // has one if pools have changed; closed: the plane is closed
	stop      chan struct{} // closed likewise, so that the goroutine waits no more
	ended     chan struct{}
	failed    atomic.Bool // a look has; the next Audit looks at all flows
	sctp      atomic.Bool // there is, or was, a frontend of SCTP

	mu    sync.Mutex
	pools []poolChange // since the last look
}

type poolChange struct{ was, now []model.Backend }

const (
	// lookAfter is how long changes are collected for one look. A backend that can answer has answered by then. A
	// client sends its SYN again after a second.
	lookAfter = 20 * time.Millisecond
	// lookRest is how many times as long as a look the pause before the next one is, at least.
	lookRest = 20
)

func newAttempts(c dataplane.Config) (*attempts, error) {
	socket, err := nfnetlink.Dial()
	if err != nil {
		return nil, err
	}
	a := &attempts{
		conntrack: socket, config: c,
		wake: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{}),
	}
	go a.run()
	return a, nil
}

// follow notes which pools a change is about. Apply waits for it.
func (a *attempts) follow(c *model.Change) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, now := range c.Pools.Set.All() {
		if was := c.PoolsBefore[id]; was != nil {
			a.pools = append(a.pools, poolChange{was.Backends, now.Backends})
		}
	}
	for _, id := range c.Pools.Delete {
		if was := c.PoolsBefore[id]; was != nil {
			a.pools = append(a.pools, poolChange{was.Backends, nil})
		}
	}
	if len(a.pools) > 0 {
		select {
		case a.wake <- struct{}{}:
		default:
		}
	}
}

// takeLost are the backends that pools have lost since the last look.
func (a *attempts) takeLost() map[netip.AddrPort]bool {
	a.mu.Lock()
	pools := a.pools
	a.pools = nil
	a.mu.Unlock()
	lost := map[netip.AddrPort]bool{}
	for _, p := range pools {
		now := model.Pool{Backends: p.now}
		for _, b := range p.was {
			if _, has := now.At(b.AddrPort()); !has {
				lost[b.AddrPort()] = true
			}
		}
	}
	return lost
}

func (a *attempts) run() {
	defer close(a.ended)
	var next time.Time
	for range a.wake {
		select {
		case <-time.After(max(lookAfter, time.Until(next))):
		case <-a.stop:
		}
		begin := time.Now()
		if err := a.look(); err != nil {
			a.failed.Store(true)
		}
		next = time.Now().Add(lookRest * time.Since(begin))
	}
}

// look forgets what the backends that are lost by now have not answered.
func (a *attempts) look() (err error) {
	lost, relayed := a.takeLost(), a.config.RelayMark()
	forgotten := 0
	for _, v6 := range []bool{false, true} {
		of := lostOf(lost, v6)
		if len(of) == 0 {
			continue
		}
		var single netip.AddrPort
		if len(of) == 1 {
			single = of[0]
		}
		for _, f := range a.unanswered(single) {
			n, failed := tracked.ForgetListed(a.conntrack, v6, f, func(f *tracked.Flow) bool {
				return f.To != f.Answers && f.Mark&relayed == 0 && lost[f.Answers]
			})
			forgotten, err = forgotten+n, errors.Join(err, failed)
		}
	}
	say(a.config, "deleted tracked connection attempts to backends that were removed", forgotten)
	return err
}

// lostOf are those of one address family.
func lostOf(lost map[netip.AddrPort]bool, v6 bool) (of []netip.AddrPort) {
	for b := range lost {
		if b.Addr().Is6() == v6 {
			of = append(of, b)
		}
	}
	return of
}

// unanswered are the flows without an answer of a backend; zero: of all.
func (a *attempts) unanswered(of netip.AddrPort) []tracked.Filter {
	filters := []tracked.Filter{{Protocol: model.TCP, Answers: of, Mask: tracked.Answered}}
	if a.sctp.Load() {
		filters = append(filters, tracked.Filter{Protocol: model.SCTP, Answers: of, Mask: tracked.Answered})
	}
	return filters
}

// close ends the goroutine, which forgets at once the rest of what it has to.
func (a *attempts) close() error {
	close(a.wake)
	close(a.stop)
	<-a.ended
	return a.conntrack.Close()
}
