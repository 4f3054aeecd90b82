package httpserve

import (
	"cmp"
	"net"
	"net/netip"
	"sync"
	"time"
)

// A Pool holds the connections of several servers. Its methods may be called from several goroutines.
type Pool struct {
	limits    Limits
	onRefusal func(listener, reason string)

	mu      sync.Mutex
	turn    uint64 // counts what connections do
	open    map[*conn]struct{}
	sources map[netip.Prefix]int // their connections
}

// New makes a Pool. onRefusal, if it is not nil, is called from any goroutine when a limit closes a connection.
func New(l Limits, onRefusal func(listener, reason string)) *Pool {
	if onRefusal == nil {
		onRefusal = func(string, string) {}
	}
	return &Pool{limits: l, onRefusal: onRefusal, open: map[*conn]struct{}{}, sources: map[netip.Prefix]int{}}
}

func (p *Pool) report(reason string) { p.onRefusal(p.limits.Listener, reason) }

// pooled is a listener whose connections belong to a Pool.
type pooled struct {
	net.Listener
	pool *Pool
}

// Accept implements net.Listener.
func (l pooled) Accept() (net.Conn, error) {
	inner, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: inner, pool: l.pool, source: sourceOf(inner.RemoteAddr().String())}
	if closed, reason := l.pool.add(c); closed != nil {
		l.pool.report(reason)
		_ = closed.Close()
		time.Sleep(l.pool.limits.Pace)
	}
	return c, nil
}

// add takes a connection in. If there is one too many, it returns the one to be closed.
func (p *Pool) add(c *conn) (closed *conn, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.touch(c)
	p.open[c] = struct{}{}
	p.sources[c.source]++
	switch {
	case p.sources[c.source] > p.limits.Source:
		closed, reason = p.worst(c, func(other *conn) bool { return other.source == c.source }), Source
	case len(p.open) > p.limits.Connections:
		closed, reason = p.worst(c, func(*conn) bool { return true }), Total
	default:
		return nil, ""
	}
	if closed == nil {
		closed, reason = c, Busy
	}
	p.drop(closed)
	return closed, reason
}

// worst is the connection to be closed for a new one: of the source that has most, the one that has done nothing for
// the longest time. One whose answer is being made is never chosen: its handler would go on, uncounted.
func (p *Pool) worst(newcomer *conn, eligible func(*conn) bool) *conn {
	var worst *conn
	for c := range p.open {
		if c == newcomer || c.computing() || !eligible(c) {
			continue
		}
		if worst == nil || p.worse(c, worst) {
			worst = c
		}
	}
	return worst
}

func (p *Pool) worse(a, b *conn) bool {
	return cmp.Or(cmp.Compare(p.sources[a.source], p.sources[b.source]), cmp.Compare(b.turn, a.turn)) > 0
}

// touch notes, with mu held, that a connection has done something.
func (p *Pool) touch(c *conn) {
	p.turn++
	c.turn = p.turn
}

// drop takes a connection out, with mu held.
func (p *Pool) drop(c *conn) {
	if _, ok := p.open[c]; !ok {
		return
	}
	delete(p.open, c)
	if p.sources[c.source]--; p.sources[c.source] == 0 {
		delete(p.sources, c.source)
	}
}
