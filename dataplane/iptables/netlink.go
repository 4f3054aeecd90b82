package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// conn is one netlink socket to nf_tables, open as long as the plane: closing one with deletions pending
// waits for an RCU grace period.
type conn struct {
	fd      int
	chunk   int // bytes that one transaction may have
	seq     uint32
	receive []byte
}

const (
	sendBuffer    = 128 << 20 // a transaction is one netlink message and must fit
	receiveBuffer = 16 << 20
	readSize      = 1 << 17
	timeout       = 60 // seconds; the kernel answers at once unless it hangs
)

func dial() (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	c := &conn{fd: fd, chunk: chunkSize, receive: make([]byte, readSize)}
	err = errors.Join(
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: timeout}),
		setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer),
		setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receiveBuffer))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set up netlink socket: %w", err), c.close())
	}
	if size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF); err == nil {
		c.chunk = min(c.chunk, size/4)
	}
	return c, nil
}

// setBuffer sets the size of a buffer. The root of a user namespace may not exceed the system's limit.
func setBuffer(fd, force, limited, size int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size)
	if errors.Is(err, unix.EPERM) {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, limited, size)
	}
	return err
}

// close may be repeated: by then the number may be that of another file.
func (c *conn) close() error {
	fd := c.fd
	if c.fd = -1; fd < 0 {
		return nil
	}
	return unix.Close(fd)
}

// encoder appends netlink messages and attributes (include/uapi/linux/netlink.h).
type encoder struct{ b []byte }

func (e *encoder) header(kind uint16, length int) {
	e.b = binary.NativeEndian.AppendUint16(e.b, uint16(4+length))
	e.b = binary.NativeEndian.AppendUint16(e.b, kind)
}

func (e *encoder) attr(kind uint16, data []byte) {
	e.header(kind, len(data))
	e.b = append(e.b, data...)
	e.pad()
}

func (e *encoder) pad() {
	for len(e.b)%4 != 0 {
		e.b = append(e.b, 0)
	}
}

func (e *encoder) string(kind uint16, s string) {
	e.header(kind, len(s)+1)
	e.b = append(append(e.b, s...), 0)
	e.pad()
}

// uint32 appends a number; nf_tables wants all of them in network byte order.
func (e *encoder) uint32(kind uint16, v uint32) {
	e.header(kind, 4)
	e.b = binary.BigEndian.AppendUint32(e.b, v)
}

// open begins a nested attribute, close ends it.
func (e *encoder) open(kind uint16) (start int) {
	start = len(e.b)
	e.header(kind|unix.NLA_F_NESTED, 0)
	return start
}

func (e *encoder) close(start int) {
	binary.NativeEndian.PutUint16(e.b[start:], uint16(len(e.b)-start))
}

// message begins a message with a netlink header and an nfgenmsg header; finish ends it.
func (e *encoder) message(h unix.NlMsghdr, family uint8, resource uint16) (start int) {
	start = len(e.b)
	e.b = binary.NativeEndian.AppendUint32(e.b, 0)
	e.b = binary.NativeEndian.AppendUint16(e.b, h.Type)
	e.b = binary.NativeEndian.AppendUint16(e.b, h.Flags|unix.NLM_F_REQUEST)
	e.b = binary.NativeEndian.AppendUint32(e.b, h.Seq)
	e.b = binary.NativeEndian.AppendUint32(e.b, 0) // port
	e.b = append(e.b, family, unix.NFNETLINK_V0)
	e.b = binary.BigEndian.AppendUint16(e.b, resource)
	return start
}

func (e *encoder) finish(start int) {
	binary.NativeEndian.PutUint32(e.b[start:], uint32(len(e.b)-start))
}

// attributes calls f for each attribute in b; the bytes are valid during the call only.
func attributes(b []byte, f func(kind uint16, data []byte)) {
	for len(b) >= 4 {
		length := int(binary.NativeEndian.Uint16(b))
		if length < 4 || length > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:length])
		b = b[min((length+3)&^3, len(b)):]
	}
}

// attribute is the first attribute of a kind, or nil.
func attribute(b []byte, want uint16) (found []byte) {
	attributes(b, func(kind uint16, data []byte) {
		if kind == want && found == nil {
			found = data
		}
	})
	return found
}

func attributeString(b []byte, want uint16) string { return unix.ByteSliceToString(attribute(b, want)) }

func (c *conn) send(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("send to netlink socket", err)
		}
	}
}

// read calls f for each message of one datagram.
func (c *conn) read(f func(h unix.NlMsghdr, body []byte)) error {
	var n int
	for {
		var err error
		n, _, err = unix.Recvfrom(c.fd, c.receive, 0)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("receive from netlink socket", err)
		}
	}
	for b := c.receive[:n]; len(b) >= unix.SizeofNlMsghdr; {
		h := unix.NlMsghdr{
			Len:   binary.NativeEndian.Uint32(b),
			Type:  binary.NativeEndian.Uint16(b[4:]),
			Flags: binary.NativeEndian.Uint16(b[6:]),
			Seq:   binary.NativeEndian.Uint32(b[8:]),
		}
		if h.Len < unix.SizeofNlMsghdr || int(h.Len) > len(b) {
			return errors.New("truncated netlink message")
		}
		f(h, b[unix.SizeofNlMsghdr:h.Len])
		b = b[min(int(h.Len+3)&^3, len(b)):]
	}
	return nil
}

// errno is the error number in an NLMSG_ERROR message; 0 acknowledges.
func errno(body []byte) syscall.Errno {
	if len(body) < 4 {
		return unix.EPROTO
	}
	return syscall.Errno(-int32(binary.NativeEndian.Uint32(body)))
}

// drain throws away answers that an earlier, interrupted exchange left in the socket.
func (c *conn) drain() {
	for {
		if _, _, err := unix.Recvfrom(c.fd, c.receive, unix.MSG_DONTWAIT); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return
		}
	}
}

// generation is the number of the ruleset, which grows by one with each transaction of anybody.
func (c *conn) generation() (generation uint32, err error) {
	listed := func(attrs []byte) {
		if id := attribute(attrs, unix.NFTA_GEN_ID); len(id) == 4 {
			generation = binary.BigEndian.Uint32(id)
		}
	}
	err = c.ask(request{kind: nftMessage | unix.NFT_MSG_GETGEN, each: listed})
	return generation, err
}

const maxDumps = 20

const nftMessage = unix.NFNL_SUBSYS_NFTABLES << 8

// A request asks for an object, or, with the flag NLM_F_DUMP, for all objects of a kind.
type request struct {
	kind   uint16 // subsystem and message: see nftMessage
	flags  uint16
	family uint8
	filter []byte // attributes of the request
	each   func(attrs []byte)
}

var errInterrupted = errors.New("the ruleset changes faster than it can be listed")

// dump lists all objects of a kind. If somebody changes the ruleset meanwhile, reset is called, and the
// listing begins anew.
func (c *conn) dump(r request, reset func()) error {
	r.flags |= unix.NLM_F_DUMP
	for range maxDumps {
		reset()
		if err := c.ask(r); !errors.Is(err, errInterrupted) {
			return err
		}
	}
	return errInterrupted
}

func (c *conn) ask(r request) (err error) {
	c.drain()
	c.seq++
	var e encoder
	start := e.message(unix.NlMsghdr{Type: r.kind, Flags: r.flags, Seq: c.seq}, r.family, 0)
	e.b = append(e.b, r.filter...)
	e.finish(start)
	if err := c.send(e.b); err != nil {
		return err
	}
	interrupted := false
	for done := false; !done; {
		readErr := c.read(func(h unix.NlMsghdr, body []byte) {
			switch {
			case h.Seq != c.seq:
				return
			case h.Type == unix.NLMSG_DONE, h.Type == unix.NLMSG_ERROR:
				done = true
				if e := errno(body); e != 0 {
					err = e
				}
			case len(body) >= 4:
				r.each(body[4:])
				done = r.flags&unix.NLM_F_DUMP == 0
			}
			interrupted = interrupted || h.Flags&unix.NLM_F_DUMP_INTR != 0
		})
		if readErr != nil {
			return readErr
		}
	}
	if err == nil && interrupted {
		err = errInterrupted
	}
	return err
}
