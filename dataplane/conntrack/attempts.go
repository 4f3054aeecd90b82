package conntrack

import (
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

// attempts has connections forgotten that a client has begun and a removed backend has not answered. Connection
// tracking keeps such a flow for up to two minutes, and each SYN from the same port renews it: the client would go on
// asking the removed backend. A flow that was answered is never touched.
//
//	Apply ─► follow: whom have pools lost? ─► a moment later, in a goroutine of its own ─► look: list, delete
//
// A look needs no State. A backend that one Service has lost may be another one's, too: then the client's next SYN
// finds a backend again.
type attempts struct {
	*looks
	config dataplane.Config
	failed atomic.Bool // a look has; the next Audit looks at all flows
	sctp   atomic.Bool // there is, or was, a frontend of SCTP

	mu   sync.Mutex
	lost map[netip.AddrPort]bool // since the last look
	next time.Time               // no look is earlier
}

const (
	// lookAfter is how long changes are collected for one look. A backend that can answer has answered by then. A
	// client sends its SYN again after a second.
	lookAfter = 20 * time.Millisecond
	// lookRest is how many times as long as a look the pause before the next one is, at least.
	lookRest = 20
)

// follow notes which backends a change takes away. Apply waits for it.
func (a *attempts) follow(c *model.Change) {
	a.mu.Lock()
	defer a.mu.Unlock()
	waits := len(a.lost) > 0
	for _, b := range c.Lost() {
		a.lost[b] = true
	}
	if !waits && len(a.lost) > 0 {
		time.AfterFunc(max(lookAfter, time.Until(a.next)), a.look)
	}
}

// look forgets what the backends that are lost by now have not answered.
func (a *attempts) look() {
	a.Lock()
	defer a.Unlock()
	a.mu.Lock()
	lost := a.lost
	a.lost = map[netip.AddrPort]bool{}
	a.mu.Unlock()
	if len(lost) == 0 { // Close was faster
		return
	}
	begun, relayed := time.Now(), a.config.RelayMark()
	var filters []tracked.Filter
	for _, f := range flowsTo(maps.Keys(lost)) {
		for _, unanswered := range a.unanswered() {
			f.Protocol, f.Mask = unanswered.Protocol, unanswered.Mask
			filters = append(filters, f)
		}
	}
	forgotten, err := tracked.ForgetListed(a.conntrack, func(f *tracked.Flow) bool {
		return f.To != f.Answers && f.Mark&relayed == 0 && lost[f.Answers]
	}, filters...)
	if err != nil {
		a.failed.Store(true)
	}
	say(a.config, "deleted tracked connection attempts to backends that were removed", len(forgotten))
	a.mu.Lock()
	defer a.mu.Unlock()
	a.next = time.Now().Add(lookRest * time.Since(begun))
}

// unanswered are the flows without an answer, of the protocols that have connections.
func (a *attempts) unanswered() []tracked.Filter {
	filters := []tracked.Filter{{Protocol: model.TCP, Mask: tracked.Answered}}
	if a.sctp.Load() {
		filters = append(filters, tracked.Filter{Protocol: model.SCTP, Mask: tracked.Answered})
	}
	return filters
}
