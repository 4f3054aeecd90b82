package relay

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/internal/share"
)

// Where a new flow waits for the kernel, flows are opened side by side:
//
//	datagram ─► flow? ─ yes ─► send
//	              └ no ─► opening? ─ yes ─► it waits there
//	                         └ no ─► too many? ─ no ─► a goroutine: begin, send what waits, next ◄─┐
//	                                      └ yes ─► it waits for its owner's turn ──────────────────┘

// way is how a flow is known before it is open.
type way struct{ from, client netip.AddrPort }

func (at Packet) way() way { return way{at.answeredFrom(), at.Client} }

const (
	// maxOpening bounds the flows that are opened side by side. Of all others an owner's next one waits for one of them.
	maxOpening = 32
	// maxEarly is how many datagrams may wait for their flow.
	maxEarly = 8
)

// openings are the flows that are about to begin.
type openings struct {
	mu     sync.Mutex
	early  map[way][][]byte // what they are to send
	queued *share.Pool      // datagrams whose flows are to be opened when others are
}

func newOpenings() *openings {
	return &openings{early: map[way][][]byte{}, queued: share.NewReplacing(maxWaiting)}
}

// meet is datagram, but does not wait for a flow to open.
func (p *Proxy) meet(at Packet, data []byte) {
	if !p.options.SideBySide {
		p.datagram(at, data)
		return
	}
	if f := p.flows.find(at); f != nil && f.key.AddrPort() == at.Destination && f.send(data) == nil {
		return
	}
	d := &datagram{proxy: p, at: at, data: slices.Clone(data)}
	if p.openings.add(d) {
		p.group.Go(func() { p.open(at) })
	}
}

// add has a datagram wait for its flow. It reports true if the caller is to open that.
func (o *openings) add(d *datagram) (open bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch w := d.at.way(); {
	case o.waits(w, d):
	case len(o.early) < maxOpening:
		o.early[w] = [][]byte{d.data}
		return true
	default:
		if owner, ok := d.proxy.sends(d.at); ok {
			d.wait(o.queued, owner)
		}
	}
	return false
}

// waits has a datagram wait, or be lost if too many do, if its flow is about to begin.
func (o *openings) waits(w way, d *datagram) bool {
	early, known := o.early[w]
	if known && len(early) < maxEarly {
		o.early[w] = append(early, d.data)
	}
	return known
}

// open begins a flow and sends what waits for it, and then others.
func (p *Proxy) open(at Packet) {
	for next := true; next && p.context.Err() == nil; at, next = p.openings.next() {
		for early := p.openings.take(at.way()); early != nil; early = p.openings.take(at.way()) {
			for _, data := range early {
				p.datagram(at, data)
			}
		}
	}
}

// take takes what waits; nil: nothing does, and the flow is not about to begin any more.
func (o *openings) take(w way) [][]byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	early := o.early[w]
	if o.early[w] = nil; early == nil {
		delete(o.early, w)
	}
	return early
}

// next is a flow that is to be opened.
func (o *openings) next() (at Packet, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		d, ok := o.queued.Next().(*datagram)
		if !ok {
			return at, false
		}
		if w := d.at.way(); !o.waits(w, d) {
			o.early[w] = [][]byte{d.data}
			return d.at, true
		}
	}
}

// leaveFirst has a flow's socket end what it needs of others before it gives its port back, and waits for that in a
// goroutine.
func (p *Proxy) leaveFirst(s *Socket) {
	var once sync.Once
	leave := s.Leave
	s.Leave = func() {
		once.Do(func() {
			p.group.Go(func() {
				leave()
				s.Conn.Close()
			})
		})
	}
}

// end closes the socket of a flow.
func (s *Socket) end() {
	if s.Leave == nil {
		s.Conn.Close()
		return
	}
	s.Leave()
	_ = s.SetReadDeadline(time.Unix(1, 0)) // ends a read that waits; fails only if it is closed
}
