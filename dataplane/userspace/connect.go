package userspace

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/carry"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// reach connects a call to a backend of its pool, by a function that waits for one no longer than it is told. If one
// cannot be reached, others are tried, but none of those that were before.
func (p *proxy) reach(c call, tried []netip.AddrPort, try func(model.Backend, time.Duration) error,
) (at netip.AddrPort, err error) {
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
		if err = errLoop; !p.leadsBack(c, b) {
			err = try(b, patience)
		}
		if err == nil {
			if len(tried) > 0 {
				p.rescued.Add(1)
			}
			return b.AddrPort(), nil
		}
		if p.context.Err() != nil || isExhausted(err) || c.conn != nil && c.conn.Over() {
			break
		}
		if !isOwn(err) {
			c.pool.failed(b.AddrPort(), time.Now())
		}
		tried = append(tried, b.AddrPort())
	}
	return at, err
}

// haste is the part of its time that the first backend has to answer while there are others to try; each further one
// has twice as much.
const haste = 8

var errNoBackend = errors.New("no backend is left to try")

// leadsBack reports whether the process would serve its own connection to a backend, which is a destination of a row.
// Our own rules leave those alone; where there are none of ours, nothing tells them from those of other processes.
func (p *proxy) leadsBack(c call, b model.Backend) bool {
	return p.asItself() && p.rows.forwards(endpoint{b.AddrPort(), c.key.Protocol})
}

var errLoop = errors.New("the backend is a destination that this process serves itself")

// asItself reports whether all connections are this process's own.
func (p *proxy) asItself() bool {
	return p.options.Redirect == ByListening || p.options.Redirect == ByPlane
}

// asked is a socket that has asked a backend.
type asked struct {
	*carry.Conn
	leave func() // what it has with others while it has no answer; nil: nothing
}

func (a *asked) left() {
	if a.leave != nil {
		a.leave()
	}
}

// await waits for the answer, and closes the socket if there is none. Where it comes after its patience has ended, the
// backend is trusted again; but there must be a file for that.
func (p *proxy) await(c call, a *asked, b model.Backend, patience time.Duration) error {
	c.conn.Reach(a)
	err := a.Await(patience)
	rest := p.options.DialTimeout - patience
	if errors.Is(err, os.ErrDeadlineExceeded) && rest > 0 {
		if back := c.conn.borrow(1); back != nil {
			c.conn.Reach(nil)
			p.group.Go(func() {
				defer back()
				p.linger(c.pool, a, b, rest)
			})
			return err
		}
		err = a.Await(rest)
	}
	a.left()
	if err != nil {
		a.Close()
	}
	return err
}

func (p *proxy) linger(in *pool, a *asked, b model.Backend, rest time.Duration) {
	defer context.AfterFunc(p.context, a.Reset)()
	if a.Await(rest) == nil {
		in.trust(b.AddrPort())
	}
	a.left()
	a.Close()
}

// askBackend makes a socket, sets it up, and asks a backend.
func (p *proxy) askBackend(c call, b model.Backend, setups ...carry.Setup) (*carry.Conn, error) {
	conn, err := p.socket(c.key.Protocol, b.Addr.Is6(), setups...)
	if err != nil {
		return nil, err
	}
	if err := conn.Connect(b.AddrPort()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// socket makes one in the namespace of the plane.
func (p *proxy) socket(protocol model.Protocol, v6 bool, setups ...carry.Setup) (conn *carry.Conn, err error) {
	err = p.sockets.Do(func() (err error) {
		conn, err = carry.Socket(int(protocol), v6, append([]carry.Setup{scarce}, setups...)...)
		return err
	})
	return conn, err
}

// scarce fails, as the kernel does where there is nothing left, for a socket that leaves too few.
func scarce(fd int, _ bool) error {
	if share.Scarce(fd, dialing) {
		return os.NewSyscallError("socket", unix.EMFILE)
	}
	return nil
}

// connectTCP and connectUDP open a connection to one backend, as the client unless that is to be hidden.
func (p *proxy) connectTCP(c call, b model.Backend, patience time.Duration) (*carry.Conn, error) {
	a, err := p.askTCP(c, b)
	c.conn.asks()
	if err == nil {
		err = p.await(c, a, b, patience)
	}
	if err != nil {
		return nil, err
	}
	return a.Conn, nil
}

func (p *proxy) askTCP(c call, b model.Backend) (*asked, error) {
	var conn *carry.Conn
	var err error
	switch {
	case p.options.Redirect == ByNAT && c.hidden(b): // the kernel may choose the port when it knows the backend
		return p.askOwn(c, b, carry.Lively, abortive, latePort)
	case p.options.Redirect == ByNAT:
		return p.askOwn(c, b, carry.Lively, abortive)
	case p.asItself():
		conn, err = p.askBackend(c, b, carry.Lively, abortive)
	case c.hidden(b):
		conn, err = p.askBackend(c, b, carry.Lively, abortive, transparent, latePort)
	default:
		as := carry.Bind(netip.AddrPortFrom(c.client.Addr(), 0))
		conn, err = p.askBackend(c, b, carry.Lively, abortive, transparent, latePort, fromPort(c.client.Port()), as)
		if errors.Is(err, unix.EADDRNOTAVAIL) { // the client has come from there to another destination with this backend
			conn, err = p.askBackend(c, b, carry.Lively, abortive, transparent, latePort, as)
		}
	}
	return &asked{Conn: conn}, err
}

// flowSocket is connected to the backend of a flow.
type flowSocket struct {
	*carry.Conn
	leave func() // the disguise, and then closes; nil: there is none
}

func (s *flowSocket) Close() error {
	if s.leave == nil {
		return s.Conn.Close()
	}
	s.leave()
	return s.SetReadDeadline(time.Unix(1, 0)) // who waits for an answer is to hear of it at once
}

func (p *proxy) connectUDP(c call, b model.Backend) (*flowSocket, error) {
	if p.options.Redirect == ByNAT {
		a, err := p.askOwn(c, b)
		if err != nil {
			return nil, err
		}
		s := &flowSocket{Conn: a.Conn}
		p.leaveFirst(s, a.left)
		return s, nil
	}
	var conn *carry.Conn
	var err error
	switch {
	case p.asItself():
		conn, err = p.askBackend(c, b)
	case c.hidden(b):
		conn, err = p.askBackend(c, b, transparent)
	default:
		conn, err = p.askAs(c, b)
	}
	return &flowSocket{Conn: conn}, err
}

// askAs opens a flow as a client, if it can from a port that the kernel gives to no socket, neither of the client,
// if that is like this machine: what the client asks the same backend by another plane is answered to its own port, and
// a packet for a socket of the node is not forwarded (udp_v4_early_demux and ip_forward in the kernel).
func (p *proxy) askAs(c call, b model.Backend) (*carry.Conn, error) {
	const tries = 16
	as := func(port uint16) carry.Setup { return carry.Bind(netip.AddrPortFrom(c.client.Addr(), port)) }
	if n := len(p.spare); n > 0 {
		for i, begin := 0, rand.IntN(n); i < min(tries, n); i++ {
			s, err := p.askBackend(c, b, transparent, as(p.spare[(begin+i)%n]))
			if errors.Is(err, unix.EADDRINUSE) {
				continue
			}
			if !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) { // SELinux may allow any port, but none by number
				return s, err
			}
			break
		}
	}
	return p.askBackend(c, b, transparent, as(0))
}
