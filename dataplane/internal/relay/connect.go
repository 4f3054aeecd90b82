package relay

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// reach connects a call to a backend of its pool, by a function that waits for one no longer than it is told. If one
// cannot be reached, others are tried, but none of those that were before.
func (p *Proxy) reach(c Call, tried []netip.AddrPort, try func(model.Backend, time.Duration) error,
) (at netip.AddrPort, err error) {
	err = errNoBackend
	for i := range p.options.Dials {
		b, hurry := c.pool.choose(c.client.Addr(), tried, time.Now())
		if hurry == 0 {
			break
		}
		patience := p.options.DialTimeout
		if i < p.options.Dials-1 {
			patience = min(patience, patience/hurry<<i)
		}
		if err = errLoop; !p.leadsBack(c, b) {
			err = try(b, patience)
		}
		if err == nil {
			if len(tried) > 0 {
				p.retried.Add(1)
			}
			return b.AddrPort(), nil
		}
		if p.context.Err() != nil || isExhausted(err) || c.conn != nil && c.conn.Over() {
			break
		}
		c.pool.missed(c.client.Addr(), b.AddrPort())
		if !isOwn(err) {
			c.pool.failed(b.AddrPort(), time.Now())
		}
		tried = append(tried, b.AddrPort())
	}
	return at, err
}

// haste divides the time that the first backend has to answer while there are others to try; each further one has twice
// as much. It divides once more that of a backend that lately did not answer.
const haste = 8

var errNoBackend = errors.New("no backend is left to try")

// leadsBack reports whether the process would serve its own connection to a backend, which is a destination of a row. A
// plane with its own Connect has rules that leave its connections alone.
func (p *Proxy) leadsBack(c Call, b model.Backend) bool {
	return p.options.Connect == nil && p.Rows.Forwards(Endpoint{b.AddrPort(), c.key.Protocol})
}

var errLoop = errors.New("the backend is a destination that this process serves itself")

// A Socket has asked a backend.
type Socket struct {
	*socket.Conn
	// Leave ends what the socket needs of others: a connection while there is no answer, a flow as long as it lasts. It
	// may be called more than once; nil: it needs nothing.
	Leave func()
}

func (s *Socket) left() {
	if s.Leave != nil {
		s.Leave()
	}
}

// await waits for the answer, and closes the socket if there is none. Where it comes after its patience has ended, the
// backend is trusted again; but there must be a file for that.
func (p *Proxy) await(c Call, s *Socket, b model.Backend, patience time.Duration) error {
	c.conn.Reach(s)
	ends := p.hear(&c, b.AddrPort())
	err, rest := s.Await(patience), p.options.DialTimeout-patience
	if errors.Is(err, os.ErrDeadlineExceeded) && rest > 0 {
		if back := c.conn.borrow(1); back != nil {
			c.conn.Reach(nil)
			p.group.Go(func() {
				defer back()
				defer context.AfterFunc(p.context, s.Reset)()
				late := s.Await(rest)
				if ends(late); late == nil {
					c.pool.trust(b.AddrPort())
				}
				s.left()
				s.Close()
			})
			return err
		}
		err = s.Await(rest)
	}
	ends(err)
	s.left()
	if err != nil {
		s.Close()
	}
	return err
}

// Connect makes a socket in the namespace of the plane, sets it up, and asks a backend.
func (p *Proxy) Connect(c Call, b model.Backend, setups ...socket.Setup) (conn *socket.Conn, err error) {
	err = p.sockets.Do(func() (err error) {
		conn, err = socket.New(int(c.key.Protocol), b.Addr.Is6(), append([]socket.Setup{scarce}, setups...)...)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := conn.Connect(b.AddrPort()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// ask makes a socket for a call that asks a backend.
func (p *Proxy) ask(c Call, b model.Backend, setups ...socket.Setup) (s *Socket, err error) {
	if p.options.Connect != nil {
		s, err = p.options.Connect(c, b, setups...)
	} else {
		s = &Socket{}
		s.Conn, err = p.Connect(c, b, setups...)
	}
	if err != nil {
		p.tell(&c, b.AddrPort(), err)
	}
	return s, err
}

// scarce fails, as the kernel does where there is nothing left, for a socket that leaves too few.
func scarce(fd int, _ bool) error {
	if share.Scarce(fd, dialing) {
		return os.NewSyscallError("socket", unix.EMFILE)
	}
	return nil
}

// connect opens a connection to one backend.
func (p *Proxy) connect(c Call, b model.Backend, patience time.Duration, setups []socket.Setup) (*socket.Conn, error) {
	s, err := p.ask(c, b, setups...)
	c.conn.asks()
	if err == nil {
		err = p.await(c, s, b, patience)
	}
	if err != nil {
		return nil, err
	}
	return s.Conn, nil
}
