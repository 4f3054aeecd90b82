package localhost

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/carry"
	"fairlead.dev/fairlead/internal/share"
)

// flow is a UDP client's socket to its backend.
type flow struct {
	carry.Activity
	*carry.Conn
	place           share.Place
	client, backend netip.AddrPort
	answered        bool // known to the goroutine that waits for answers
}

// Yield implements share.Holder. The goroutine that waits for answers does the rest.
func (f *flow) Yield() { f.Close() }

// datagrams serves clients until the relay is closed. What cannot be sent is lost, which clients of
// UDP must expect.
func (r *relay) datagrams(ctx context.Context, socket *net.UDPConn) {
	buf := make([]byte, maxDatagram)
	for ctx.Err() == nil {
		n, client, err := socket.ReadFromUDPAddrPort(buf)
		if err != nil {
			pause(ctx)
			continue
		}
		f := r.flow(client)
		if f == nil {
			if f = r.begin(ctx, client, socket); f == nil {
				continue
			}
		}
		f.Touch()
		_ = f.SetReadDeadline(time.Now().Add(idle)) // fails only if f is closed, and so does Write
		if _, err := f.Write(buf[:n]); err != nil {
			r.end(f)
		}
	}
}

func (r *relay) flow(client netip.AddrPort) *flow {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.flows[client]
}

// begin opens a flow and starts to send its answers; nil if there is nobody to talk to.
func (r *relay) begin(ctx context.Context, client netip.AddrPort, socket *net.UDPConn) *flow {
	conn, backend, err := r.dial(ctx, &carry.Ends{})
	if err != nil {
		return nil
	}
	f := &flow{Conn: conn, client: client, backend: backend}
	f.Touch()
	if !r.admit(f, socket) {
		f.Close()
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flows[client] = f
	if ctx.Err() != nil || find(r.pool.Backends, backend) < 0 { // close or use came before
		f.Close()
	}
	r.group.Go(func() {
		defer r.end(f)
		for r.answer(f, socket) == nil {
		}
	})
	return f
}

// admit gives a flow a place among those of all relays, unless its client would have more than its share.
func (r *relay) admit(f *flow, socket *net.UDPConn) bool {
	to := socket.LocalAddr().(*net.UDPAddr).AddrPort()
	all := r.clients.flows
	owner := r.clients.owner(r.id(), all, diagSocket{unix.IPPROTO_UDP, f.client, to})
	owner.Unproven = true
	return all.Enter(&f.place, owner, 1, f)
}

// answer waits for a datagram of the backend and sends it to the client. It takes a buffer only when
// there is something to read: most flows are short, and idle for the rest of their time.
func (r *relay) answer(f *flow, socket *net.UDPConn) error {
	var failed error
	err := f.Raw().Read(func(fd uintptr) bool {
		buf := r.buffers.Get().(*[maxDatagram]byte)
		defer r.buffers.Put(buf)
		var n int
		if n, failed = unix.Read(int(fd), buf[:]); errors.Is(failed, unix.EAGAIN) {
			return false
		}
		if failed == nil {
			_, failed = socket.WriteToUDPAddrPort(buf[:n], f.client)
		}
		return true
	})
	if err != nil {
		return err
	}
	f.Touch()
	if !f.answered {
		f.answered = true
		r.clients.flows.Prove(&f.place)
	}
	_ = f.SetReadDeadline(time.Now().Add(idle)) // fails only if f is closed, and so does the next Read
	return failed
}

func (r *relay) end(f *flow) {
	f.Close()
	r.clients.flows.Leave(&f.place)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.flows[f.client] == f {
		delete(r.flows, f.client)
	}
}
