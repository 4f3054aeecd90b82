// Package relay accepts connections and datagrams, chooses a backend of a pool, connects to it, and copies what both
// sides say. It divides connections, flows and files among namespaces, Services and clients.
//
//	socket ─► Packet ─► Directory: the row, as State.Lookup has it ─► pool: whose turn? ─► connect
//	    └─ a bound is reached: reset, or lost      (no answer: the next backend) ◄──────────┤
//	                                     copy or splice, both ways, until both have ended ◄─┘
//
// Its user makes the sockets, tells the rows, and may have a way of its own to connect to a backend.
package relay

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// Options say how a Proxy serves.
type Options struct {
	// DialTimeout is for how long one backend is waited for. Dials is how many are tried.
	DialTimeout time.Duration
	Dials       int
	// IdleTimeout ends a connection over which nothing passes, and HalfClosedTimeout one of which one side has ended its
	// direction.
	IdleTimeout, HalfClosedTimeout time.Duration
	// FlowTimeout ends a flow of UDP that is silent, and StreamTimeout one that was answered and goes on.
	FlowTimeout, StreamTimeout time.Duration
	// MaxConnections and MaxFlows bound those that are open at once, and Extra the files that are borrowed beside the two
	// of each connection and the one of each flow.
	MaxConnections, MaxFlows, Extra int
	// Connect opens a socket that asks a backend, with these setups among others; nil: Proxy.Connect does, as the process.
	Connect func(Call, model.Backend, ...socket.Setup) (*Socket, error)
	// SideBySide says that Connect waits for the kernel. Flows are then opened at the same time, and connections, too.
	SideBySide bool
	// Original is the destination of a datagram that was redirected to a socket of the process.
	Original func(client, own netip.AddrPort) (netip.AddrPort, error)
	// Unserved is told, once, of a destination of UDP whose port another program has, so that no answer can come from
	// there. A proxy that answers from its listeners alone needs none.
	Unserved func(Endpoint, error)
}

// Proxy is what one process relays.
type Proxy struct {
	// Rows are set before a socket is served, and changed by one goroutine.
	Rows *Directory

	options  Options
	sockets  namespace.Namespace
	flows    *flows
	openings *openings
	gate     *Gate
	context  context.Context // ends with the proxy
	stop     context.CancelFunc
	group    sync.WaitGroup // all goroutines
	buffers  sync.Pool      // of *[bufferSize]byte

	connections         *share.Pool // of TCP and SCTP
	extra               *share.Pool // files that are borrowed
	messages            *share.Pool // bytes of large ones of SCTP
	copier              *socket.Copier
	retried, unanswered atomic.Uint64 // see dataplane.Dials
	turned              *turnedAway
	outcomes            outcomes
	legs                sync.Map // of TCP: the leg of each *connection that has a backend
	told                sync.Map // destinations of which Options.Unserved was told
	files               *files
}

const bufferSize = 1 << 16 // holds the largest datagram

// New makes a Proxy that connects to backends in a network namespace.
func New(o Options, sockets namespace.Namespace) *Proxy {
	ctx, stop := context.WithCancel(context.Background())
	return &Proxy{
		Rows: newDirectory(), options: o, sockets: sockets, context: ctx, stop: stop,
		flows: newFlows(o.MaxFlows), openings: newOpenings(), gate: NewGate(dialers(o.SideBySide)),
		buffers:     sync.Pool{New: func() any { return new([bufferSize]byte) }},
		connections: share.New(o.MaxConnections), extra: share.New(o.Extra),
		messages: share.New(largeMessages),
		copier:   socket.NewCopier(o.IdleTimeout, o.HalfClosedTimeout),
		turned:   newTurnedAway(), files: openFiles(),
		outcomes: outcomes{waiting: make(chan model.Outcome, maxOutcomes)},
	}
}

// Close ends all connections and flows, and returns when that is done. All sockets are closed already.
func (p *Proxy) Close() {
	p.stop()
	p.connections.Clear()
	p.flows.endAll()
	p.group.Wait()
	p.end()
}

// Release ends flows, and lets connections live on. All sockets are closed already.
func (p *Proxy) Release() {
	p.flows.endAll()
	go func() {
		p.group.Wait()
		p.end()
	}()
}

func (p *Proxy) end() {
	p.copier.Close()
	p.files.close()
}

// Open is how many connections and flows there are.
func (p *Proxy) Open() int { return p.flows.places.Used() + p.connections.Used() }

// Forget forgets clients whose time has run out. It returns the Services of which clients had to give way since the
// last call.
func (p *Proxy) Forget(now time.Time) (gaveWay []string) {
	p.Rows.eachPool(func(p *pool) { p.forget(now) })
	return p.turned.news()
}

// A Call is a client that is to be connected.
type Call struct {
	decision
	client netip.AddrPort
	conn   *connection // nil: a flow of UDP
}

// Protocol is what the client speaks.
func (c Call) Protocol() model.Protocol { return c.key.Protocol }

// Client is the client's address and port.
func (c Call) Client() netip.AddrPort { return c.client }

// Hidden reports whether a backend is not to see the client's address.
func (c Call) Hidden(b model.Backend) bool { return c.masquerade(c.client.Addr(), b) }

// undialed counts a connection that has no backend: none answered, or the process may open no more files.
func (p *Proxy) undialed(d *decision, err error) {
	switch {
	case isExhausted(err):
		p.turned.count(d, tooManyFiles)
	case p.context.Err() == nil:
		p.unanswered.Add(1)
	}
}

// pause is for errors that pass, as when the process has too many files open.
func (p *Proxy) pause() {
	select {
	case <-p.context.Done():
	case <-time.After(10 * time.Millisecond):
	}
}
