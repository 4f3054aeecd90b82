package localhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/carry"
	"fairlead.dev/fairlead/dataplane/internal/namespace"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

const (
	dialTimeout = 5 * time.Second
	maxDials    = 6                // backends that a connection tries
	idle        = 30 * time.Second // after which a UDP flow ends, as in conntrack one without answers
	maxDatagram = 1 << 16
)

// relay serves one frontend. What is above mu belongs to the plane's goroutine or does not change.
type relay struct {
	clients *clients
	sockets namespace.Namespace
	place   share.Place // of the socket
	network string      // tcp or udp
	socket  io.Closer
	stop    context.CancelFunc
	group   sync.WaitGroup // all goroutines but those of established TCP connections
	buffers sync.Pool      // of *[maxDatagram]byte

	mu    sync.Mutex
	named model.PoolID
	pool  model.Pool
	last  netip.AddrPort // the backend of the latest connection, for affinity
	used  time.Time      // when that was
	flows map[netip.AddrPort]*flow
}

// listen opens a relay.
func listen(c *clients, key model.Key, id model.PoolID, pool model.Pool) (*relay, error) {
	ctx, stop := context.WithCancel(context.Background())
	r := &relay{
		clients: c,
		sockets: c.sockets,
		network: key.Protocol.String(),
		stop:    stop,
		named:   id,
		pool:    pool,
		buffers: sync.Pool{New: func() any { return new([maxDatagram]byte) }},
		flows:   map[netip.AddrPort]*flow{},
	}
	var loop func()
	err := r.sockets.Do(func() (err error) {
		loop, err = r.open(ctx, key.AddrPort())
		return err
	})
	if err != nil {
		stop()
		return nil, err
	}
	r.group.Go(loop)
	return r, nil
}

func (r *relay) open(ctx context.Context, at netip.AddrPort) (loop func(), err error) {
	if r.network == "udp" {
		config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
			failed := c.Control(func(fd uintptr) { err = shared(int(fd), false) })
			return errors.Join(failed, err)
		}}
		c, err := config.ListenPacket(ctx, r.network, at.String())
		if err != nil {
			return nil, err
		}
		r.socket = c
		return func() { r.datagrams(ctx, c.(*net.UDPConn)) }, nil
	}
	l, err := carry.Listen(unix.IPPROTO_TCP, at, shared, carry.Lively)
	if err != nil {
		return nil, fmt.Errorf("listen %s %s: %w", r.network, at, err)
	}
	r.socket = l
	return func() { r.connections(ctx, l) }, nil
}

// shared lets another plane of the same user listen too, so that one can take over from the other. Who
// does not ask for it, as other programs do not, still gets and causes "address already in use".
func shared(fd int, _ bool) error {
	return os.NewSyscallError("setsockopt SO_REUSEPORT", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
}

// use replaces the pool. Flows of backends that are not in it end.
func (r *relay) use(id model.PoolID, pool model.Pool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.named, r.pool = id, pool
	for client, f := range r.flows {
		if find(pool.Backends, f.backend) < 0 {
			f.Close()
			delete(r.flows, client)
		}
	}
}

// id is the name of the pool.
func (r *relay) id() model.PoolID {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.named
}

func find(backends []model.Backend, a netip.AddrPort) int {
	return slices.IndexFunc(backends, func(b model.Backend) bool { return b.AddrPort() == a })
}

// close ends the relay and returns when all but established TCP connections have ended.
func (r *relay) close() {
	r.stop()
	r.socket.Close()
	r.mu.Lock()
	for _, f := range r.flows {
		f.Close()
	}
	r.mu.Unlock()
	r.group.Wait()
}

// dial connects to a backend for a new connection or flow. If one does not answer, others are tried, until both ends
// are reset.
func (r *relay) dial(ctx context.Context, ends *carry.Ends) (conn *carry.Conn, backend netip.AddrPort, err error) {
	left, i := r.choose()
	for range maxDials {
		backend = left[i].AddrPort()
		if conn, err = r.ask(ctx, ends, backend); err == nil {
			r.remember(backend)
			break
		}
		if left = slices.Concat(left[:i], left[i+1:]); len(left) == 0 || ctx.Err() != nil || ends.Over() {
			break
		}
		i = pick(left)
	}
	return conn, backend, err
}

// ask connects to one backend.
func (r *relay) ask(ctx context.Context, ends *carry.Ends, backend netip.AddrPort) (conn *carry.Conn, err error) {
	if backend.Addr().IsLoopback() {
		return nil, errLoop
	}
	v6 := backend.Addr().Is6()
	err = r.sockets.Do(func() (err error) {
		if r.network == "udp" {
			conn, err = carry.Socket(unix.IPPROTO_UDP, v6)
		} else {
			conn, err = carry.Socket(unix.IPPROTO_TCP, v6, carry.Lively)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	ends.Reach(conn)
	defer context.AfterFunc(ctx, conn.Reset)()
	if err = conn.Connect(backend); err == nil && r.network != "udp" {
		err = conn.Await(dialTimeout)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// errLoop: what is on the loopback address may be a relay, which would serve this one's connection again.
var errLoop = errors.New("a backend must not be on the loopback address")

// choose returns the backends that may be tried, and the index of the one to try first.
func (r *relay) choose() ([]model.Backend, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	serving := r.pool.Serving()
	if r.pool.Affinity > 0 && time.Since(r.used) < r.pool.Affinity {
		if i := find(serving, r.last); i >= 0 {
			return serving, i
		}
	}
	return serving, pick(serving)
}

func (r *relay) remember(backend netip.AddrPort) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last, r.used = backend, time.Now()
}

// pick chooses at random, by weight.
func pick(backends []model.Backend) int {
	total := 0
	for _, b := range backends {
		total += int(b.Weight)
	}
	n := rand.IntN(total)
	return slices.IndexFunc(backends, func(b model.Backend) bool {
		n -= int(b.Weight)
		return n < 0
	})
}

// pause is for errors that pass, as when the process has too many files open.
func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(10 * time.Millisecond):
	}
}
