package userspace

import (
	"net/netip"
	"slices"
	"sync"
)

// Where addresses are translated a new flow takes two transactions of nf_tables. Connection tracking is asked once, and
// forgets once. So flows are opened side by side; what they need of nf_tables is done together (disguise.step):
//
//	datagram ─► flow? ─ yes ─► send
//	              └ no ─► opening? ─ yes ─► it waits there
//	                         └ no ─► a goroutine: begin, send what waits

// way is how a flow is known before it is open.
type way struct{ from, client netip.AddrPort }

const (
	// maxOpening bounds the flows that are opened side by side.
	maxOpening = 256
	// maxEarly is how many datagrams may wait for their flow.
	maxEarly = 8
)

// meet is datagram, but waits for no flow to open.
func (p *proxy) meet(at packet, data []byte) {
	if p.options.Redirect != ByNAT || p.flows.find(at) != nil {
		p.datagram(at, data)
		return
	}
	w := way{at.answeredFrom(), at.client}
	switch p.flows.wait(w, data) {
	case opens:
		p.group.Go(func() { p.open(w, at) })
	case tooMany:
		p.datagram(at, data)
	}
}

// waited is what became of a datagram that came before its flow.
type waited int

const (
	waits   waited = iota // or is lost, if too many do
	opens                 // it is the first one
	tooMany               // flows are about to begin
)

func (l *flows) wait(w way, data []byte) waited {
	l.mu.Lock()
	defer l.mu.Unlock()
	early, known := l.opening[w]
	switch {
	case known && len(early) >= maxEarly:
		return waits
	case !known && len(l.opening) >= maxOpening:
		return tooMany
	}
	l.opening[w] = append(early, slices.Clone(data))
	if known {
		return waits
	}
	return opens
}

// open begins a flow and sends what waits for it.
func (p *proxy) open(w way, at packet) {
	for {
		early := p.flows.early(w)
		if early == nil {
			return
		}
		for _, data := range early {
			p.datagram(at, data)
		}
	}
}

// early takes what waits; nil: nothing does, and the flow is not about to begin any more.
func (l *flows) early(w way) [][]byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	early := l.opening[w]
	if early == nil {
		delete(l.opening, w)
	} else {
		l.opening[w] = nil
	}
	return early
}

// leaveFirst ends what a socket has with others before it gives its port back, and waits for that in a goroutine.
func (p *proxy) leaveFirst(s *flowSocket, leave func()) {
	var once sync.Once
	s.leave = func() {
		once.Do(func() {
			p.group.Go(func() {
				leave()
				s.UDPConn.Close()
			})
		})
	}
}
