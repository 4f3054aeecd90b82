package userspace

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/xtables"
)

// From include/uapi/linux/sctp.h; x/sys/unix lacks them.
const (
	sctpInitMsg     = 2  // SCTP_INITMSG: the number of streams
	sctpNoDelay     = 3  // SCTP_NODELAY
	sctpStatus      = 14 // SCTP_STATUS
	sctpRecvRcvInfo = 32 // SCTP_RECVRCVINFO
	sctpSndInfo     = 2  // SCTP_SNDINFO, a control message
	sctpRcvInfo     = 3  // SCTP_RCVINFO, likewise
	sctpUnordered   = 1

	sizeofStatus   = 176 // struct sctp_status
	inStreamsAt    = 16  // in it
	outStreamsAt   = 18
	sizeofSndInfo  = 16 // struct sctp_sndinfo: stream, flags, protocol, …
	sizeofRcvInfo  = 28 // struct sctp_rcvinfo: stream, sequence number, flags, padding, protocol, …
	streamsOffered = 64
	largestMessage = 4 << 20
)

// association is one of SCTP in the style of TCP (RFC 6458, section 4). Package net has no SCTP; the runtime's poller
// serves it through os.File.
type association struct {
	*os.File
	raw syscall.RawConn
	v6  bool
}

func newAssociation(fd int, v6 bool) (*association, error) {
	f := os.NewFile(uintptr(fd), "sctp")
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &association{f, raw, v6}, nil
}

func (a *association) option(name int, value string) error {
	return control(a.raw, func(fd int) error {
		return os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, unix.IPPROTO_SCTP, name, value))
	})
}

// number is a socket option that is 0 or 1.
func number(v uint32) string { return string(binary.NativeEndian.AppendUint32(nil, v)) }

// streams are what an SCTP endpoint offers: how many it sends over, and how many it receives at most.
func streams(out, in uint16) string {
	b := binary.NativeEndian.AppendUint16(nil, out)
	b = binary.NativeEndian.AppendUint16(b, in)
	return string(append(b, 0, 0, 0, 0)) // attempts and their time are the default
}

func (a *association) reset() {
	_ = abortive(a.raw) // fails only if it is closed
	a.Close()
}

// end closes an association that is over. All that was said has been sent, or will be.
func (a *association) end() {
	_ = control(a.raw, func(fd int) error { // fails only if it is closed
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{})
	})
	a.Close()
}

// sctpSocket makes a socket in the calling thread's namespace.
func sctpSocket(v6 bool) (*association, error) {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ESOCKTNOSUPPORT) {
		return nil, errNoSCTP
	}
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	return newAssociation(fd, v6)
}

var errNoSCTP = errors.New("this kernel has no SCTP (module sctp)")

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPortOf(s unix.Sockaddr) netip.AddrPort {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr).Unmap(), uint16(s.Port))
	}
	return netip.AddrPort{}
}

// listenSCTP makes a socket that takes associations. It may be free to have an address that is not local yet.
func listenSCTP(at netip.AddrPort, free bool) (*association, error) {
	l, err := sctpSocket(at.Addr().Is6())
	if err != nil {
		return nil, err
	}
	err = errors.Join(l.option(sctpInitMsg, streams(streamsOffered, 0)), abortive(l.raw))
	if err == nil {
		err = control(l.raw, func(fd int) error { return listenAt(fd, at, free) })
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func listenAt(fd int, at netip.AddrPort, free bool) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return os.NewSyscallError("setsockopt SO_REUSEADDR", err)
	}
	if free {
		if err := freeBind(fd, at.Addr().Is6()); err != nil {
			return err
		}
	}
	if err := unix.Bind(fd, sockaddr(at)); err != nil {
		return os.NewSyscallError("bind", err)
	}
	return os.NewSyscallError("listen", unix.Listen(fd, unix.SOMAXCONN))
}

// accept waits for the next association.
func (a *association) accept() (client *association, from netip.AddrPort, err error) {
	var fd int
	var peer unix.Sockaddr
	var failed error
	err = a.raw.Read(func(listener uintptr) bool {
		fd, peer, failed = unix.Accept4(int(listener), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		return !errors.Is(failed, unix.EAGAIN)
	})
	if err = errors.Join(err, os.NewSyscallError("accept", failed)); err != nil {
		return nil, from, err
	}
	client, err = newAssociation(fd, a.v6)
	return client, addrPortOf(peer), err
}

// acceptSCTP takes associations until the proxy ends, or the socket is closed, as accept does.
func (p *proxy) acceptSCTP(l *association, locate func(*association, netip.AddrPort) (packet, error)) {
	for p.context.Err() == nil {
		client, from, err := l.accept()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			p.pause()
			continue
		}
		at, err := locate(client, from)
		if err != nil { // somebody asks us directly
			client.reset()
			continue
		}
		at.protocol = model.SCTP
		p.enter(at, caller{client.raw, client.reset, func(d decision) { p.serveSCTP(client, at, d) }})
	}
}

// serveSCTP finds a backend for a client and carries messages until one of them has ended.
func (p *proxy) serveSCTP(client *association, at packet, d decision) {
	defer p.atEnd(client.reset)()
	to := call{decision: d, client: at.client}
	backend, b, err := dial(p, to, nil, func(c call, b model.Backend) (*association, error) {
		return p.associate(client, c, b)
	})
	if err != nil {
		p.undialed(d.key, err)
		client.reset()
		return
	}
	defer p.atEnd(backend.reset)()
	d.pool.answered(at.client.Addr(), b, time.Now())
	var both activity
	both.touch()
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.carrySCTP(client, backend, &both)
	}()
	p.carrySCTP(backend, client, &both)
	<-done
	client.end()
	backend.end()
}

// associate opens an association with a backend, with as many streams as the client's has.
func (p *proxy) associate(client *association, c call, b model.Backend) (*association, error) {
	in, out, err := client.streams()
	if err != nil {
		return nil, err
	}
	var a *association
	err = p.sockets.Do(func() (err error) {
		a, err = sctpSocket(b.Addr.Is6())
		return err
	})
	if err != nil {
		return nil, err
	}
	err = errors.Join(a.option(sctpInitMsg, streams(in, out)), a.option(sctpNoDelay, number(1)), abortive(a.raw))
	if err == nil {
		err = p.connectSCTP(a, c, b)
	}
	if err != nil {
		a.reset()
		return nil, err
	}
	return a, nil
}

func (p *proxy) connectSCTP(a *association, c call, b model.Backend) error {
	if p.asItself() {
		return a.connect(p.context, b.AddrPort(), p.options.DialTimeout)
	}
	var own netip.AddrPort
	err := control(a.raw, func(fd int) (err error) {
		own, err = bindOwn(fd, b.Addr.Is6())
		return err
	})
	if err != nil {
		return err
	}
	leave, err := p.present(c, b, own)
	if err != nil {
		return err
	}
	defer leave()
	return a.connect(p.context, b.AddrPort(), p.options.DialTimeout)
}

// streams are those that an association receives and sends over.
func (a *association) streams() (in, out uint16, err error) {
	var status [sizeofStatus]byte
	err = control(a.raw, func(fd int) error {
		return os.NewSyscallError("getsockopt SCTP_STATUS", xtables.GetOption(fd, unix.IPPROTO_SCTP, sctpStatus, status[:]))
	})
	return binary.NativeEndian.Uint16(status[inStreamsAt:]), binary.NativeEndian.Uint16(status[outStreamsAt:]), err
}

// connect waits until an association is there, or has failed.
func (a *association) connect(ctx context.Context, to netip.AddrPort, patience time.Duration) error {
	err := control(a.raw, func(fd int) error { return unix.Connect(fd, sockaddr(to)) })
	if !errors.Is(err, unix.EINPROGRESS) {
		return os.NewSyscallError("connect", err)
	}
	defer context.AfterFunc(ctx, func() { _ = a.SetWriteDeadline(time.Unix(1, 0)) })()
	_ = a.SetWriteDeadline(time.Now().Add(patience)) // fails only if it is closed
	var failed error
	err = a.raw.Write(func(fd uintptr) bool {
		errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 {
			err = unix.Errno(errno)
		}
		if failed = err; failed != nil {
			return true
		}
		_, err = unix.Getpeername(int(fd)) // the poller may wake up before anything has happened
		return err == nil
	})
	_ = a.SetWriteDeadline(time.Time{})
	return errors.Join(err, os.NewSyscallError("connect", failed))
}

// carrySCTP passes messages on in one direction, and its end. SCTP knows no half-open associations: when one side has
// shut its own down, what is on its way still arrives. An error ends both by an abort.
func (p *proxy) carrySCTP(to, from *association, both *activity) {
	err := p.copySCTP(to, from, both)
	switch {
	case err == nil:
		both.half.Store(true)
		_ = control(to.raw, func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) }) // it may be over
	case both.half.Load(): // the other side has ended it, and does not take anything any more
	default:
		to.reset()
		from.reset()
	}
}

// message is a message of SCTP and how it travels.
type message struct {
	data     []byte
	stream   uint16
	flags    uint16
	protocol uint32 // as its sender wrote it
}

func (p *proxy) copySCTP(to, from *association, both *activity) error {
	if err := from.option(sctpRecvRcvInfo, number(1)); err != nil {
		return err
	}
	for {
		_ = from.SetReadDeadline(both.deadline(p.options)) // fails only if it is closed
		err := p.pass(to, from)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(both.deadline(p.options)):
		case err != nil:
			return err
		default:
			both.touch()
		}
	}
}

// pass waits for a message and sends it on. It takes a buffer only when there is something to read.
func (p *proxy) pass(to, from *association) error {
	var m message
	var failed error
	var buf *[bufferSize]byte
	err := from.raw.Read(func(fd uintptr) bool {
		if buf == nil {
			buf = p.buffers.Get().(*[bufferSize]byte)
			m.data = buf[:0]
		}
		failed = m.receive(int(fd))
		if errors.Is(failed, unix.EAGAIN) && len(m.data) == 0 {
			p.buffers.Put(buf)
			buf = nil
		}
		return !errors.Is(failed, unix.EAGAIN)
	})
	if buf != nil {
		defer p.buffers.Put(buf)
	}
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	return to.send(&m)
}

// receive reads until the message is complete: a large one comes in pieces.
func (m *message) receive(fd int) error {
	var control [128]byte
	for {
		if len(m.data) == cap(m.data) {
			if cap(m.data) >= largestMessage {
				return os.NewSyscallError("recvmsg", unix.EMSGSIZE)
			}
			m.data = append(make([]byte, 0, 4*cap(m.data)), m.data...)
		}
		n, c, flags, _, err := unix.Recvmsg(fd, m.data[len(m.data):cap(m.data)], control[:], 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			return io.EOF
		}
		m.data = m.data[:len(m.data)+n]
		m.travel(control[:c])
		if flags&unix.MSG_EOR != 0 {
			return nil
		}
	}
}

// travel reads how the message came.
func (m *message) travel(control []byte) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return
	}
	for _, c := range messages {
		if c.Header.Level == unix.IPPROTO_SCTP && c.Header.Type == sctpRcvInfo && len(c.Data) >= sizeofRcvInfo {
			m.stream = binary.NativeEndian.Uint16(c.Data)
			m.flags = binary.NativeEndian.Uint16(c.Data[4:]) & sctpUnordered
			m.protocol = binary.NativeEndian.Uint32(c.Data[8:])
		}
	}
}

// send sends a message as it came.
func (a *association) send(m *message) error {
	info := make([]byte, sizeofSndInfo)
	binary.NativeEndian.PutUint16(info, m.stream)
	binary.NativeEndian.PutUint16(info[2:], m.flags)
	binary.NativeEndian.PutUint32(info[4:], m.protocol)
	control := make([]byte, unix.CmsgSpace(len(info)))
	header := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
	header.Level, header.Type = unix.IPPROTO_SCTP, sctpSndInfo
	header.SetLen(unix.CmsgLen(len(info)))
	copy(control[unix.CmsgLen(0):], info)
	var failed error
	err := a.raw.Write(func(fd uintptr) bool {
		_, failed = unix.SendmsgN(int(fd), m.data, control, nil, unix.MSG_NOSIGNAL)
		return !errors.Is(failed, unix.EAGAIN)
	})
	return errors.Join(err, os.NewSyscallError("sendmsg", failed))
}
