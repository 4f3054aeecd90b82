package relay

import (
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/share"
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
	largeMessages  = 16 << 20 // bytes of all large ones, and of those of which a part has come
)

// Sockets of SCTP are in the style of TCP (RFC 6458, section 4).

func sctpOption(name int, value string) socket.Setup {
	return func(fd int, _ bool) error {
		return os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, unix.IPPROTO_SCTP, name, value))
	}
}

// number is a socket option that is 0 or 1.
func number(v uint32) string { return string(binary.NativeEndian.AppendUint32(nil, v)) }

// streams are what an SCTP endpoint offers: how many it sends over, and how many it receives at most.
func streams(out, in uint16) socket.Setup {
	b := binary.NativeEndian.AppendUint16(nil, out)
	b = binary.NativeEndian.AppendUint16(b, in)
	return sctpOption(sctpInitMsg, string(append(b, 0, 0, 0, 0))) // attempts and their time are the default
}

var errNoSCTP = errors.New("this kernel has no SCTP (module sctp)")

// ListenSCTP listens, in the calling thread's namespace.
func ListenSCTP(a netip.AddrPort, setups ...socket.Setup) (*socket.Conn, error) {
	l, err := socket.Listen(unix.IPPROTO_SCTP, a, append(setups, streams(streamsOffered, 0), socket.Abortive)...)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ESOCKTNOSUPPORT) {
		err = errNoSCTP
	}
	return l, err
}

// setupsSCTP are for an association with a backend that has as many streams as the client's.
func setupsSCTP(client *socket.Conn) []socket.Setup {
	return []socket.Setup{func(fd int, v6 bool) error {
		in, out, err := streamsOf(client)
		if err != nil {
			return err
		}
		return streams(in, out)(fd, v6)
	}, sctpOption(sctpNoDelay, number(1)), socket.Abortive}
}

// copyBothSCTP passes messages on until one side has ended.
func (p *Proxy) copyBothSCTP(client, backend *socket.Conn, c *connection, carried *socket.Carried) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.passSCTP(client, backend, c, &carried.ToClient)
	}()
	p.passSCTP(backend, client, c, &carried.ToBackend)
	<-done
	client.End()
	backend.End()
}

// streamsOf are those that an association receives and sends over.
func streamsOf(a *socket.Conn) (in, out uint16, err error) {
	var status [sizeofStatus]byte
	err = a.Do(func(fd int) error {
		return os.NewSyscallError("getsockopt SCTP_STATUS", socket.GetOption(fd, unix.IPPROTO_SCTP, sctpStatus, status[:]))
	})
	return binary.NativeEndian.Uint16(status[inStreamsAt:]), binary.NativeEndian.Uint16(status[outStreamsAt:]), err
}

// passSCTP passes messages on in one direction, and its end. SCTP knows no half-open associations: when one side has
// shut its own down, what it has sent still arrives, and it takes nothing any more. So the other direction ends, too: a
// socket that was shut down here is not told when the association is over. An error ends both by an abort.
func (p *Proxy) passSCTP(to, from *socket.Conn, c *connection, sum *socket.Sum) {
	err := p.copySCTP(to, from, c, sum)
	switch {
	case err == nil:
		c.HalfClose()
		_ = to.CloseWrite() // it may be over
		_ = to.SetReadDeadline(time.Now())
	case c.HalfClosed(): // the other side has ended it, and does not take anything any more
	default:
		to.Reset()
		from.Reset()
	}
}

// message is a message of SCTP and how it travels.
type message struct {
	data     []byte
	borrowed share.Place // bytes, if it is large
	stream   uint16
	flags    uint16
	protocol uint32 // as its sender wrote it
}

func (p *Proxy) copySCTP(to, from *socket.Conn, c *connection, sum *socket.Sum) error {
	err := from.Do(func(fd int) error { return sctpOption(sctpRecvRcvInfo, number(1))(fd, false) })
	if err != nil {
		return err
	}
	for {
		_ = from.SetReadDeadline(p.copier.Deadline(&c.Activity)) // fails only if it is closed
		if c.HalfClosed() {
			return nil
		}
		err := p.pass(to, from, c, sum)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(p.copier.Deadline(&c.Activity)):
		case err != nil:
			return err
		default:
			c.Touch()
		}
	}
}

// pass waits for a message and sends it on. It takes a buffer only when there is something to read, and the other side
// takes it.
func (p *Proxy) pass(to, from *socket.Conn, c *connection, sum *socket.Sum) error {
	var m message
	defer p.messages.Leave(&m.borrowed)
	more := func(bytes int) bool {
		p.messages.Leave(&m.borrowed)
		return p.messages.Borrow(&m.borrowed, c.owner, bytes)
	}
	if err := to.AwaitRoom(p.options.IdleTimeout); err != nil {
		return err
	}
	var failed error
	var buf *[bufferSize]byte
	err := from.Raw().Read(func(fd uintptr) bool {
		if buf == nil {
			buf = p.buffers.Get().(*[bufferSize]byte)
			m.data = buf[:0]
		}
		failed = m.receive(int(fd), more)
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
	sum.Add(0, len(m.data))
	return m.send(to)
}

// receive reads until the message is complete: a large one comes in pieces, for which there must be memory.
func (m *message) receive(fd int, more func(bytes int) bool) error {
	var control [128]byte
	for {
		if size := 4 * cap(m.data); len(m.data) == cap(m.data) {
			if size > largestMessage || !more(size) {
				return os.NewSyscallError("recvmsg", unix.EMSGSIZE)
			}
			m.data = append(make([]byte, 0, size), m.data...)
		}
		n, c, flags, _, err := unix.Recvmsg(fd, m.data[len(m.data):cap(m.data)], control[:], 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN) && len(m.data) > 0 && !more(cap(m.data)):
			return os.NewSyscallError("recvmsg", unix.ENOBUFS)
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

// send sends the message as it came.
func (m *message) send(to *socket.Conn) error {
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
	err := to.Raw().Write(func(fd uintptr) bool {
		_, failed = unix.SendmsgN(int(fd), m.data, control, nil, unix.MSG_NOSIGNAL)
		return !errors.Is(failed, unix.EAGAIN)
	})
	return errors.Join(err, os.NewSyscallError("sendmsg", failed))
}
