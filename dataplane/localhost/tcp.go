package localhost

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/carry"
	"fairlead.dev/fairlead/internal/share"
)

// connections accepts until the relay is closed.
func (r *relay) connections(ctx context.Context, l *carry.Conn) {
	to := l.LocalAddr()
	for ctx.Err() == nil {
		err := l.Accept(func(fd int, from netip.AddrPort) { r.enter(ctx, carry.Accepted{FD: fd}, from, to) })
		if err != nil {
			pause(ctx)
		}
	}
}

// connection is one that has a place among those of all relays. It lives on when the relay is closed.
type connection struct {
	carry.Activity
	carry.Ends
	place  share.Place
	owner  share.Owner
	within *clients
}

// Yield implements share.Holder.
func (c *connection) Yield() { c.Reset() }

// borrow asks for files beside the two that a connection has.
func (c *connection) borrow(files int) (back func()) {
	var place share.Place
	if !c.within.pipes.Borrow(&place, c.owner, files) {
		return nil
	}
	return func() { c.within.pipes.Leave(&place) }
}

// enter has a client served, unless that would have more than its share.
func (r *relay) enter(ctx context.Context, client carry.Accepted, from, to netip.AddrPort) {
	all := r.clients
	c := &connection{within: all}
	c.owner = all.owner(r.id(), all.connections, diagSocket{unix.IPPROTO_TCP, from, to})
	c.Take(client)
	c.Touch()
	if !all.connections.Enter(&c.place, c.owner, 1, c) {
		client.Reset()
		return
	}
	r.group.Go(func() { r.connect(ctx, c) })
}

func (r *relay) connect(ctx context.Context, c *connection) {
	client := c.Open()
	if client == nil {
		r.clients.connections.Leave(&c.place)
		return
	}
	backend, _, err := r.dial(ctx, &c.Ends)
	if err != nil {
		client.Reset()
		r.clients.connections.Leave(&c.place)
		return
	}
	go func() {
		defer c.within.connections.Leave(&c.place)
		c.within.carrier.Carry(&carry.Link{Activity: &c.Activity, Client: client, Backend: backend, Borrow: c.borrow})
	}()
}
