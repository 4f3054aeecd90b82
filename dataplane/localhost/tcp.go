package localhost

import (
	"context"
	"io"
	"net"
	"sync"
)

// connections accepts until the relay is closed.
func (r *relay) connections(ctx context.Context, l *net.TCPListener) {
	for ctx.Err() == nil {
		client, err := l.AcceptTCP()
		if err != nil {
			pause(ctx)
			continue
		}
		r.group.Go(func() { r.connect(ctx, client) })
	}
}

func (r *relay) connect(ctx context.Context, client *net.TCPConn) {
	backend, _, err := r.dial(ctx)
	if err != nil {
		reset(client)
		return
	}
	go join(client, backend.(*net.TCPConn))
}

// join copies in both directions until both have ended.
func join(client, backend *net.TCPConn) {
	var group sync.WaitGroup
	group.Go(func() { carry(client, backend) })
	group.Go(func() { carry(backend, client) })
	group.Wait()
	client.Close()
	backend.Close()
}

// carry copies in one direction and passes its end on. An error ends both directions, by a reset, as
// if client and backend had one connection.
func carry(to, from *net.TCPConn) {
	_, err := io.Copy(to, from)
	if err == nil {
		err = to.CloseWrite()
	}
	if err != nil {
		reset(to)
		reset(from)
	}
}

func reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // fails only if c is closed
	c.Close()
}
