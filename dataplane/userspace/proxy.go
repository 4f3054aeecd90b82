package userspace

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/localport"
	"fairlead.dev/fairlead/dataplane/internal/namespace"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// proxy is the process's side of the plane: the sockets to which the kernel's rules lead, and what is carried.
type proxy struct {
	options Options
	sockets namespace.Namespace
	rows    *directory
	flows   *flows
	ends    []origination // of both families
	// redirections are the sockets for what TPROXY cannot lead here, disguise what connects from the own address.
	redirections []*redirection
	disguise     *disguise
	tracking     *tracking
	listeners    *listeners      // nil: there are rules
	context      context.Context // ends with the proxy
	stop         context.CancelFunc
	group        sync.WaitGroup // all goroutines
	buffers      sync.Pool      // of *[bufferSize]byte

	connections   atomic.Int64  // open ones of TCP
	rescued, lost atomic.Uint64 // see dataplane.Dials
	turned        *turnedAway
	files         *files
	spare         []uint16 // ports for flows, see connectAs
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
		turned:  newTurnedAway(), files: openFiles(),
	}
	p.flows = newFlows()
	if o.Redirect == ByTPROXY { // what cannot be read leaves the choice to the kernel
		_ = sockets.Do(func() (err error) {
			p.spare, err = localport.Above()
			return err
		})
	}
	return p
}

// firstPort is that of the first origin; the others follow. They are outside the range from which the kernel
// takes ports by itself, and the same in each process, so that the next one finds rules that fit.
const firstPort = 17985

// ask opens what asks the kernel of connections. The caller is in the right namespace.
func (p *proxy) ask() (err error) {
	if p.disguise.conn, err = nfnetlink.Dial(); err != nil {
		return err
	}
	conn, err := nfnetlink.Dial()
	p.tracking = &tracking{conn: conn}
	return err
}

// listenIn opens all sockets of one family, by its number. The caller is in the right namespace.
func (p *proxy) listenIn(family int) (at listening, err error) {
	loopback := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}[family]
	if at.redirectAll = p.options.Redirect != ByTPROXY; !at.redirectAll {
		if at.ports, err = p.listen(loopback); err != nil {
			return at, err
		}
	}
	at.redirectPorts, err = p.listenRedirected(loopback.Is6())
	return at, err
}

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
		p.group.Go(func() { p.accept(ends[o].tcp, o.brought) })
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
	tcp, err := listenTCP(netip.AddrPortFrom(a, port), transparent)
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
	for _, r := range p.redirections {
		r.close()
	}
	if p.listeners != nil {
		p.listeners.closeAll()
	}
	p.flows.endAll()
	p.group.Wait()
	p.files.close()
	p.disguise.close()
	p.tracking.close()
}

// atEnd has f called when the proxy ends. The caller calls leave before it returns. That calls f off or waits for it:
// while a reset is not sent, close must not return, because the kernel's rules translate the reset's address.
func (p *proxy) atEnd(f func()) (leave func()) {
	done := make(chan struct{})
	stop := context.AfterFunc(p.context, func() {
		defer close(done)
		f()
	})
	return func() {
		if !stop() {
			<-done
		}
	}
}

// call is a client who is to be connected.
type call struct {
	decision
	client netip.AddrPort
}

// hidden reports whether a backend is not to see who calls.
func (c call) hidden(b model.Backend) bool { return c.masquerade(c.client.Addr(), b) }

// dial connects a call to a backend of its pool, by a function for its protocol. If one cannot be reached, others are
// tried, but none of those that were before.
func dial[C io.Closer](p *proxy, c call, tried []netip.AddrPort, connect func(call, model.Backend) (C, error),
) (conn C, at netip.AddrPort, err error) {
	err = errNoBackend
	for i := range p.options.Dials {
		b, others, ok := c.pool.choose(c.client.Addr(), tried, time.Now())
		if !ok {
			break
		}
		patience := p.options.DialTimeout
		if others && i < p.options.Dials-1 {
			patience = min(patience, patience/haste<<i)
		}
		a := attempt{c.pool, b.AddrPort(), patience}
		if conn, err = await(p, a, func() (C, error) { return connect(c, b) }); err == nil {
			if len(tried) > 0 {
				p.rescued.Add(1)
			}
			return conn, b.AddrPort(), nil
		}
		if p.context.Err() != nil || isExhausted(err) {
			break
		}
		tried = append(tried, b.AddrPort())
	}
	return conn, at, err
}

// attempt is one to reach a backend.
type attempt struct {
	in       *pool
	to       netip.AddrPort
	patience time.Duration
}

// await connects to a backend in another goroutine, as that of a connection keeps what stack it had for as long as it
// lasts. Where its patience ends before that has ended, a backend that answers after all is trusted again.
func await[C io.Closer](p *proxy, a attempt, connect func() (C, error)) (conn C, err error) {
	type result struct {
		conn C
		err  error
	}
	done, left := make(chan result), make(chan struct{})
	p.group.Go(func() {
		conn, err := connect()
		select {
		case done <- result{conn, err}:
		case <-left:
			if err == nil {
				conn.Close()
				a.in.trust(a.to)
			}
		}
	})
	var late <-chan time.Time
	if a.patience < p.options.DialTimeout {
		timer := time.NewTimer(a.patience)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case r := <-done:
		if r.err != nil && p.context.Err() == nil && !isOwn(r.err) {
			a.in.failed(a.to, time.Now())
		}
		return r.conn, r.err
	case <-late:
		a.in.failed(a.to, time.Now())
		close(left)
		return conn, os.ErrDeadlineExceeded
	}
}

// haste is the part of its time that the first backend has to answer while there are others to try; each further one
// has twice as much.
const haste = 8

var errNoBackend = errors.New("no backend is left to try")

// connectTCP and connectUDP open a connection to one backend, as the client unless that is to be hidden.
func (p *proxy) connectTCP(c call, b model.Backend) (*net.TCPConn, error) {
	if p.options.Redirect == ByNAT {
		conn, leave, err := p.connectOwn(c, b, "tcp")
		leave()
		if err != nil {
			return nil, err
		}
		return conn.(*net.TCPConn), nil
	}
	if p.asItself() {
		return p.connectPlain(b)
	}
	if c.hidden(b) {
		return p.connectTransparent(net.Dialer{Control: outgoing}, b)
	}
	as := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.client.Addr(), 0))}
	as.Control = outgoingFrom(c.client.Port())
	conn, err := p.connectTransparent(as, b)
	if errors.Is(err, unix.EADDRNOTAVAIL) { // the client has come from there to another destination with this backend
		as.Control = outgoing
		conn, err = p.connectTransparent(as, b)
	}
	return conn, err
}

func (p *proxy) connectTransparent(dialer net.Dialer, b model.Backend) (*net.TCPConn, error) {
	conn, err := p.connect("tcp", dialer, b.AddrPort())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// asItself reports whether all connections are this process's own.
func (p *proxy) asItself() bool {
	return p.options.Redirect == ByListening || p.options.Redirect == ByPlane
}

// connectPlain opens a connection as this process.
func (p *proxy) connectPlain(b model.Backend) (*net.TCPConn, error) {
	reset := func(_, _ string, raw syscall.RawConn) error { return abortive(raw) }
	conn, err := p.connect("tcp", net.Dialer{Control: reset}, b.AddrPort())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// flowSocket is connected to the backend of a flow.
type flowSocket struct {
	*net.UDPConn
	leave func() // the disguise, and then closes; nil: there is none
}

func (s *flowSocket) Close() error {
	if s.leave == nil {
		return s.UDPConn.Close()
	}
	s.leave()
	return s.SetReadDeadline(time.Unix(1, 0)) // who waits for an answer is to hear of it at once
}

func (p *proxy) connectUDP(c call, b model.Backend) (*flowSocket, error) {
	if p.options.Redirect == ByNAT {
		conn, leave, err := p.connectOwn(c, b, "udp")
		if err != nil {
			leave()
			return nil, err
		}
		s := &flowSocket{UDPConn: conn.(*net.UDPConn)}
		p.leaveFirst(s, leave)
		return s, nil
	}
	switch {
	case p.asItself():
		return p.connectDatagrams(net.Dialer{Control: plain}, b)
	case c.hidden(b):
		return p.connectDatagrams(net.Dialer{Control: transparent}, b)
	}
	return p.connectAs(c.client.Addr(), b)
}

// connectAs opens a flow as a client, if it can from a port that the kernel gives to no socket, neither of the client,
// if that is like this machine: what the client asks the same backend by another plane is answered to its own port, and
// a packet for a socket of the node is not forwarded (udp_v4_early_demux and ip_forward in the kernel).
func (p *proxy) connectAs(client netip.Addr, b model.Backend) (*flowSocket, error) {
	const tries = 16
	from := func(port uint16) net.Dialer {
		address := net.UDPAddrFromAddrPort(netip.AddrPortFrom(client, port))
		return net.Dialer{LocalAddr: address, Control: transparent}
	}
	if n := len(p.spare); n > 0 {
		for i, begin := 0, rand.IntN(n); i < min(tries, n); i++ {
			s, err := p.connectDatagrams(from(p.spare[(begin+i)%n]), b)
			if errors.Is(err, unix.EADDRINUSE) {
				continue
			}
			if !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) { // SELinux may allow any port, but none by number
				return s, err
			}
			break
		}
	}
	return p.connectDatagrams(from(0), b)
}

func (p *proxy) connectDatagrams(dialer net.Dialer, b model.Backend) (*flowSocket, error) {
	conn, err := p.connect("udp", dialer, b.AddrPort())
	if err != nil {
		return nil, err
	}
	return &flowSocket{UDPConn: conn.(*net.UDPConn)}, nil
}

func (p *proxy) connect(protocol string, dialer net.Dialer, to netip.AddrPort) (conn net.Conn, err error) {
	dialer.Timeout = p.options.DialTimeout
	dialer.SetMultipathTCP(false) // the address of the client has no other path
	setup := dialer.Control
	dialer.Control = func(network, address string, c syscall.RawConn) error {
		if err := keepSome(network, address, c); err != nil {
			return err
		}
		return setup(network, address, c)
	}
	err = p.sockets.Do(func() (err error) {
		conn, err = dialer.DialContext(p.context, family(protocol, to.Addr()), to.String())
		return err
	})
	return conn, err
}

// caller is somebody who was accepted.
type caller struct {
	socket syscall.RawConn
	away   func()
	serve  func(decision)
}

// enter has a caller served in a goroutine of its own, or sends it away.
func (p *proxy) enter(at packet, c caller) {
	d, ok := p.rows.lookup(at)
	if !ok { // the row went while the client came
		c.away()
		return
	}
	if bound := p.admit(c); bound != "" {
		p.turned.count(&d.key, bound)
		c.away()
		return
	}
	p.group.Go(func() {
		defer p.connections.Add(-1)
		c.serve(d)
	})
}

// admit counts a connection as open, or tells which bound keeps it out.
func (p *proxy) admit(c caller) (bound string) {
	if scarce(c.socket) {
		return tooManyFiles
	}
	if p.connections.Add(1) > int64(p.options.MaxConnections) {
		p.connections.Add(-1)
		return tooManyConnections
	}
	return ""
}

// undialed counts a connection that has no backend: none answered, or the process may open no more files.
func (p *proxy) undialed(key model.Key, err error) {
	switch {
	case isExhausted(err):
		p.turned.count(&key, tooManyFiles)
	case p.context.Err() == nil:
		p.lost.Add(1)
	}
}

// pause is for errors that pass, as when the process has too many files open.
func (p *proxy) pause() {
	select {
	case <-p.context.Done():
	case <-time.After(10 * time.Millisecond):
	}
}
