package localhost

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// flow is a UDP client's socket to its backend.
type flow struct {
	*net.UDPConn
	client, backend netip.AddrPort
}

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
	conn, backend, err := r.dial(ctx)
	if err != nil {
		return nil
	}
	f := &flow{conn.(*net.UDPConn), client, backend}
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

// answer waits for a datagram of the backend and sends it to the client. It takes a buffer only when
// there is something to read: most flows are short, and idle for the rest of their time.
func (r *relay) answer(f *flow, socket *net.UDPConn) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
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
	_ = f.SetReadDeadline(time.Now().Add(idle)) // fails only if f is closed, and so does the next Read
	return failed
}

func (r *relay) end(f *flow) {
	f.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.flows[f.client] == f {
		delete(r.flows, f.client)
	}
}
