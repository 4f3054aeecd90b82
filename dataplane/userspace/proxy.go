package userspace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/namespace"
	"fairlead.dev/fairlead/model"
)

// proxy is the process's side of the plane: the sockets to which the kernel's rules lead, and what is carried.
type proxy struct {
	options Options
	sockets namespace.Namespace
	rows    *directory
	flows   *flows
	ends    []origination   // of both families
	context context.Context // ends with the proxy
	stop    context.CancelFunc
	group   sync.WaitGroup // all goroutines
	buffers sync.Pool      // of *[bufferSize]byte

	connections atomic.Int64 // open ones of TCP
	mu          sync.Mutex
	turned      map[model.Key]uint64 // connections turned away because of a bound
}

const (
	bufferSize    = 1 << 16 // holds the largest datagram
	receiveBuffer = 4 << 20 // of the sockets to which all datagrams come
)

func newProxy(o Options, sockets namespace.Namespace) *proxy {
	ctx, stop := context.WithCancel(context.Background())
	p := &proxy{
		options: o, sockets: sockets, rows: newDirectory(), context: ctx, stop: stop,
		buffers: sync.Pool{New: func() any { return new([bufferSize]byte) }},
		turned:  map[model.Key]uint64{},
	}
	p.flows = newFlows()
	return p
}

// firstPort is that of the first origin; the others follow. They are outside the range from which the kernel
// takes ports by itself, and the same in each process, so that the next one finds rules that fit.
const firstPort = 17985

// listen opens the sockets of one family, all or none, and serves them. The caller is in the right namespace.
func (p *proxy) listen(a netip.Addr) (at ports, err error) {
	var ends []origination
	for o := range numOrigins {
		e, err := originate(a, firstPort+uint16(o))
		if errors.Is(err, unix.EADDRINUSE) {
			e, err = originate(a, 0)
		}
		if err != nil {
			closeAll(ends)
			return ports{}, err
		}
		ends = append(ends, e)
		at[o] = uint16(e.tcp.Addr().(*net.TCPAddr).Port)
	}
	for o := range numOrigins {
		p.group.Go(func() { p.accept(ends[o].tcp, o) })
		p.group.Go(func() { p.receive(ends[o].udp, o) })
	}
	p.ends = append(p.ends, ends...)
	return at, nil
}

func closeAll(ends []origination) {
	for _, e := range ends {
		e.tcp.Close()
		e.udp.Close()
	}
}

// origination is the sockets to which the rules lead what comes from one origin, at one port.
type origination struct {
	tcp *net.TCPListener
	udp *net.UDPConn
}

func originate(a netip.Addr, port uint16) (origination, error) {
	tcp, err := listenTCP(netip.AddrPortFrom(a, port))
	if err != nil {
		return origination{}, err
	}
	port = uint16(tcp.Addr().(*net.TCPAddr).Port)
	udp, err := listenUDP(netip.AddrPortFrom(a, port), original)
	if err != nil {
		return origination{}, errors.Join(err, tcp.Close())
	}
	_ = udp.SetReadBuffer(receiveBuffer) // the kernel gives as much as net.core.rmem_max allows
	return origination{tcp, udp}, nil
}

// close ends all connections and flows, and returns when that is done.
func (p *proxy) close() {
	p.stop()
	closeAll(p.ends)
	p.flows.endAll()
	p.group.Wait()
}

// dial connects to a backend of the decision's pool, for a client. If one cannot be reached, others are tried.
func (p *proxy) dial(d decision, client netip.AddrPort, tried []netip.AddrPort) (net.Conn, netip.AddrPort, error) {
	err := errNoBackend
	for range p.options.Dials {
		b, ok := d.pool.choose(client.Addr(), tried, time.Now())
		if !ok {
			break
		}
		var conn net.Conn
		if conn, err = p.connect(d, client, b); err == nil {
			return conn, b.AddrPort, nil
		}
		if p.context.Err() != nil {
			break
		}
		d.pool.failed(b.AddrPort, time.Now())
		tried = append(tried, b.AddrPort)
	}
	return nil, netip.AddrPort{}, err
}

var errNoBackend = errors.New("no backend is left to try")

// connect opens a connection to one backend, as the client unless that is to be hidden.
func (p *proxy) connect(d decision, client netip.AddrPort, b model.Backend) (conn net.Conn, err error) {
	dialer := net.Dialer{Timeout: p.options.DialTimeout, Control: transparent}
	dialer.SetMultipathTCP(false) // the address of the client has no other path
	hide := d.masquerade(client.Addr(), b)
	protocol := d.key.Protocol.String()
	source := netip.AddrPortFrom(client.Addr(), 0)
	switch {
	case protocol == "tcp":
		dialer.Control = outgoing
		if !hide {
			dialer.LocalAddr = net.TCPAddrFromAddrPort(source)
		}
	case !hide:
		dialer.LocalAddr = net.UDPAddrFromAddrPort(source)
	}
	err = p.sockets.Do(func() (err error) {
		conn, err = dialer.DialContext(p.context, family(protocol, b.Addr()), b.AddrPort.String())
		return err
	})
	return conn, err
}

// turnAway counts a connection that a bound keeps out.
func (p *proxy) turnAway(key model.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key.Scope = model.Any
	p.turned[key]++
}

// exhausted counts a connection that could not be made because the process, or the machine, may open no more files.
func (p *proxy) exhausted(key model.Key, err error) {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		p.turnAway(key)
	}
}

// pause is for errors that pass, as when the process has too many files open.
func (p *proxy) pause() {
	select {
	case <-p.context.Done():
	case <-time.After(10 * time.Millisecond):
	}
}
