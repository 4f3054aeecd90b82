package localhost

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/namespace"
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
	id      model.PoolID
	sockets namespace.Namespace
	network string // tcp or udp
	socket  io.Closer
	stop    context.CancelFunc
	group   sync.WaitGroup // all goroutines but those of established TCP connections
	buffers sync.Pool      // of *[maxDatagram]byte

	mu    sync.Mutex
	pool  model.Pool
	last  netip.AddrPort // the backend of the latest connection, for affinity
	used  time.Time      // when that was
	flows map[netip.AddrPort]*flow
}

// listen opens a relay.
func listen(sockets namespace.Namespace, key model.Key, pool model.Pool) (*relay, error) {
	ctx, stop := context.WithCancel(context.Background())
	r := &relay{
		sockets: sockets,
		network: key.Protocol.String(),
		stop:    stop,
		pool:    pool,
		buffers: sync.Pool{New: func() any { return new([maxDatagram]byte) }},
		flows:   map[netip.AddrPort]*flow{},
	}
	var loop func()
	err := sockets.Do(func() (err error) {
		loop, err = r.open(ctx, key.AddrPort().String())
		return err
	})
	if err != nil {
		stop()
		return nil, err
	}
	r.group.Go(loop)
	return r, nil
}

func (r *relay) open(ctx context.Context, addr string) (loop func(), err error) {
	config := net.ListenConfig{Control: share}
	config.SetMultipathTCP(false) // on loopback there is one path
	if r.network == "udp" {
		c, err := config.ListenPacket(ctx, r.network, addr)
		if err != nil {
			return nil, err
		}
		r.socket = c
		return func() { r.datagrams(ctx, c.(*net.UDPConn)) }, nil
	}
	l, err := config.Listen(ctx, r.network, addr)
	if err != nil {
		return nil, err
	}
	r.socket = l
	return func() { r.connections(ctx, l.(*net.TCPListener)) }, nil
}

// share lets another plane of the same user listen too, so that one can take over from the other. Who
// does not ask for it, as other programs do not, still gets and causes "address already in use".
func share(_, _ string, c syscall.RawConn) error {
	var failed error
	if err := c.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	}); err != nil {
		return err
	}
	return failed
}

// use replaces the pool. Flows of backends that are not in it end.
func (r *relay) use(id model.PoolID, pool model.Pool) {
	r.id = id
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pool = pool
	for client, f := range r.flows {
		if find(pool.Backends, f.backend) < 0 {
			f.Close()
			delete(r.flows, client)
		}
	}
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

// dial connects to a backend for a new connection or flow. If one does not answer, others are tried.
func (r *relay) dial(ctx context.Context) (conn net.Conn, backend netip.AddrPort, err error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	left, i := r.choose()
	for range maxDials {
		backend = left[i].AddrPort()
		err = r.sockets.Do(func() (err error) {
			conn, err = dialer.DialContext(ctx, r.network, backend.String())
			return err
		})
		if err == nil {
			r.remember(backend)
			break
		}
		if left = slices.Concat(left[:i], left[i+1:]); len(left) == 0 {
			break
		}
		i = pick(left)
	}
	return conn, backend, err
}

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
