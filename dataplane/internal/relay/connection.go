package relay

import (
	"sync/atomic"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/share"
)

// connection is one of a client, of TCP or SCTP, that has a place among all. It yields that to others, and at the end
// of the proxy, by a reset of both sides.
type connection struct {
	socket.Activity
	socket.Ends
	proxy *Proxy
	owner share.Owner
	name  string // of the Service
	place share.Place

	serve    func()
	queued   share.Place // at the gate
	hasAsked atomic.Bool // the backend
}

// enter has a client served in a goroutine of its own, or sends it away.
func (p *Proxy) enter(at Packet, c socket.Accepted) {
	d, ok := p.Rows.lookup(at)
	if !ok { // the row went while the client came
		c.Reset()
		return
	}
	conn := &connection{proxy: p, name: d.service(), owner: d.owner(at)}
	conn.Take(c)
	conn.Touch()
	if bound := p.admit(conn, c.FD); bound != "" {
		p.turned.count(&d, bound)
		c.Reset()
		return
	}
	conn.serve = func() {
		defer conn.leave()
		if !conn.Over() {
			p.serve(at, d, conn)
		}
	}
	if p.gate.Enter(&conn.queued, conn.owner, conn.start) {
		conn.start()
	}
}

func (c *connection) start() { c.proxy.group.Go(c.serve) }

// admit gives a connection a place, or tells which bound keeps it out.
func (p *Proxy) admit(c *connection, fd int) (bound string) {
	if share.Scarce(fd, 1) {
		return tooManyFiles
	}
	if !p.connections.Enter(&c.place, c.owner, 1, c) {
		return tooManyConnections
	}
	return ""
}

// Yield implements share.Holder.
func (c *connection) Yield() {
	if c.proxy.context.Err() == nil {
		c.proxy.turned.yielded(c.name, tooManyConnections)
	}
	c.Reset()
	c.proxy.gate.Leave(&c.queued)
}

// asks notes that a connection is asking its backend, or is over, so that another one may go on.
func (c *connection) asks() {
	if !c.hasAsked.Swap(true) {
		c.proxy.gate.Pass()
	}
}

// leave gives the place back, and waits for a reset that is being sent. Until then the proxy must not end: the kernel's
// rules translate the reset's address.
func (c *connection) leave() {
	c.asks()
	c.proxy.connections.Leave(&c.place)
	c.Over()
}

// borrow asks for files beside the two that a connection has.
func (c *connection) borrow(files int) (back func()) { return c.proxy.borrow(c.owner, files) }

// borrow asks for files that are set aside for no connection. The function that it returns gives them back; nil: there
// are none to be had.
func (p *Proxy) borrow(o share.Owner, files int) (back func()) {
	var place share.Place
	if !p.extra.Borrow(&place, o, files) {
		return nil
	}
	return func() { p.extra.Leave(&place) }
}
