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

	"fairlead.dev/fairlead/dataplane/internal/carry"
	"fairlead.dev/fairlead/dataplane/internal/localport"
	"fairlead.dev/fairlead/dataplane/internal/namespace"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// proxy is the process's side of the plane: the sockets to which the kernel's rules lead, and what is carried.
type proxy struct {
	options  Options
	sockets  namespace.Namespace
	rows     *directory
	flows    *flows
	openings *openings
	gate     *gate
	ends     []origination // of both families
	// redirections are the sockets for what TPROXY cannot lead here, disguise what connects from the own address.
	redirections []*redirection
	disguise     *disguise
	tracking     *tracking       // for new flows
	origins      *tracking       // for datagrams that come, which do not wait for new flows
	listeners    *listeners      // nil: there are rules
	context      context.Context // ends with the proxy
	stop         context.CancelFunc
	group        sync.WaitGroup // all goroutines
	buffers      sync.Pool      // of *[bufferSize]byte

	connections   *share.Pool // of TCP and SCTP
	extra         *share.Pool // files that connections borrow beside their two
	messages      *share.Pool // bytes of large ones of SCTP
	carrier       *carry.Carrier
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
		buffers:     sync.Pool{New: func() any { return new([bufferSize]byte) }},
		connections: share.New(o.MaxConnections), extra: share.New(share.Files() / extraShare),
		messages: share.New(largeMessages),
		carrier:  carry.New(o.IdleTimeout, o.HalfClosedTimeout),
		turned:   newTurnedAway(), files: openFiles(),
	}
	p.flows, p.openings, p.gate = newFlows(o.MaxFlows), newOpenings(), newGate(dialers(o.Redirect))
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
	if p.tracking, err = openTracking(); err != nil {
		return err
	}
	p.origins, err = openTracking()
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
		at[o] = e.tcp.LocalAddr().Port()
	}
	for o := range numOrigins {
		p.group.Go(func() { p.accept(ends[o].tcp, model.TCP, o.brought) })
		p.group.Go(func() { p.receive(ends[o].udp, o.brings) })
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
	tcp *carry.Conn
	udp *net.UDPConn
}

func originate(a netip.Addr, port uint16) (origination, error) {
	tcp, err := listenTCP(netip.AddrPortFrom(a, port), transparent)
	if err != nil {
		return origination{}, err
	}
	port = tcp.LocalAddr().Port()
	udp, err := listenUDP(netip.AddrPortFrom(a, port), transparent, original)
	if err != nil {
		return origination{}, errors.Join(err, tcp.Close())
	}
	receiveMuch(udp)
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
	p.connections.Clear()
	p.flows.endAll()
	p.group.Wait()
	p.carrier.Close()
	p.files.close()
	p.disguise.close()
	p.tracking.close()
	p.origins.close()
}

// call is a client who is to be connected.
type call struct {
	decision
	client netip.AddrPort
	conn   *connection // nil: a flow of UDP
}

// hidden reports whether a backend is not to see who calls.
func (c call) hidden(b model.Backend) bool { return c.masquerade(c.client.Addr(), b) }

// undialed counts a connection that has no backend: none answered, or the process may open no more files.
func (p *proxy) undialed(d *decision, err error) {
	switch {
	case isExhausted(err):
		p.turned.count(d, tooManyFiles)
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
