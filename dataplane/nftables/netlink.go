package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// tableName is the name of our table in each family. We own what is in it, and nothing else.
const tableName = "fairlead"

// From include/uapi/linux/netfilter/nf_tables.h; x/sys/unix lacks them.
const (
	acceptPolicy  = 1    // NF_ACCEPT
	dynsetDelete  = 2    // NFT_DYNSET_OP_DELETE
	setConcat     = 0x80 // NFT_SET_CONCAT: ranges of concatenations
	setDescConcat = 2    // NFTA_SET_DESC_CONCAT
	setFieldLen   = 1    // NFTA_SET_FIELD_LEN
	attrKeyEnd    = 10   // NFTA_SET_ELEM_KEY_END
)

// conn is one netlink socket to nf_tables, open as long as the plane. Besides saving system calls
// this avoids the wait for an RCU grace period that closing a socket with deletions pending costs.
type conn struct {
	fd      int
	chunk   int // bytes of steps that one transaction may have
	seq     uint32
	buf     []byte // of the message being built
	receive []byte
}

const (
	sendBuffer    = 128 << 20 // a transaction is one netlink message and must fit
	receiveBuffer = 16 << 20
	readSize      = 1 << 16
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
		c.chunk = min(c.chunk, size/2) // the other half is more than the headers of messages need
	}
	return c, nil
}

// setBuffer sets the size of a buffer. The root of a user namespace may not exceed the system's limit
// (net.core.wmem_max and rmem_max).
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

// encoder appends netlink attributes (include/uapi/linux/netlink.h) to a byte slice.
type encoder struct{ b []byte }

func (e *encoder) attr(kind uint16, data []byte) {
	e.b = binary.NativeEndian.AppendUint16(e.b, uint16(4+len(data)))
	e.b = binary.NativeEndian.AppendUint16(e.b, kind)
	e.b = append(e.b, data...)
	e.pad()
}

func (e *encoder) pad() {
	for len(e.b)%4 != 0 {
		e.b = append(e.b, 0)
	}
}

func (e *encoder) string(kind uint16, s string) {
	e.b = binary.NativeEndian.AppendUint16(e.b, uint16(4+len(s)+1))
	e.b = binary.NativeEndian.AppendUint16(e.b, kind)
	e.b = append(append(e.b, s...), 0)
	e.pad()
}

// uint32 appends a number; nf_tables wants all of them in network byte order.
func (e *encoder) uint32(kind uint16, v uint32) {
	e.attr(kind, binary.BigEndian.AppendUint32(nil, v))
}

// open begins a nested attribute, close ends it.
func (e *encoder) open(kind uint16) (start int) {
	start = len(e.b)
	e.b = append(e.b, 0, 0, 0, 0)
	binary.NativeEndian.PutUint16(e.b[start+2:], kind|unix.NLA_F_NESTED)
	return start
}

func (e *encoder) close(start int) {
	binary.NativeEndian.PutUint16(e.b[start:], uint16(len(e.b)-start))
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

func attributeString(b []byte, want uint16) string {
	return unix.ByteSliceToString(attribute(b, want))
}

// message appends a netlink header and an nfgenmsg header and returns where the message starts.
func (c *conn) message(kind, flags uint16, family uint8, resource uint16) (start int) {
	start = len(c.buf)
	c.seq++
	c.buf = binary.NativeEndian.AppendUint32(c.buf, 0) // length: see end
	c.buf = binary.NativeEndian.AppendUint16(c.buf, kind)
	c.buf = binary.NativeEndian.AppendUint16(c.buf, flags|unix.NLM_F_REQUEST)
	c.buf = binary.NativeEndian.AppendUint32(c.buf, c.seq)
	c.buf = binary.NativeEndian.AppendUint32(c.buf, 0) // port
	c.buf = append(c.buf, family, unix.NFNETLINK_V0)
	c.buf = binary.BigEndian.AppendUint16(c.buf, resource)
	return start
}

func (c *conn) end(start int) {
	binary.NativeEndian.PutUint32(c.buf[start:], uint32(len(c.buf)-start))
}

func (c *conn) send() error {
	for {
		err := unix.Sendto(c.fd, c.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
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
func (c *conn) generation() (uint32, error) {
	c.drain()
	c.buf = c.buf[:0]
	c.end(c.message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0, unix.AF_UNSPEC, 0))
	if err := c.send(); err != nil {
		return 0, err
	}
	var generation uint32
	var err error
	for answered := false; !answered; {
		readErr := c.read(func(h unix.NlMsghdr, body []byte) {
			switch {
			case h.Seq != c.seq:
				return
			case h.Type == unix.NLMSG_ERROR:
				err = errno(body)
			case len(body) > 4:
				if id := attribute(body[4:], unix.NFTA_GEN_ID); len(id) == 4 {
					generation = binary.BigEndian.Uint32(id)
				}
			}
			answered = true
		})
		if readErr != nil {
			return 0, readErr
		}
	}
	return generation, err
}

const maxDumps = 20

// A listing asks for all objects of one kind.
type listing struct {
	verb   uint16 // NFT_MSG_GET*
	family uint8
	filter []byte // attributes of the request
	// reset forgets what each has seen. If somebody changes the ruleset while it is listed, the
	// kernel says so and the listing begins anew.
	reset func()
	each  func(attrs []byte)
}

func (c *conn) dump(l listing) error {
	for range maxDumps {
		l.reset()
		interrupted, err := c.dumpOnce(l)
		if errors.Is(err, unix.ENOENT) {
			return nil // no such table or set: nothing is listed
		}
		if err != nil || !interrupted {
			return err
		}
	}
	return errors.New("the ruleset changes faster than it can be listed")
}

func (c *conn) dumpOnce(l listing) (interrupted bool, err error) {
	c.drain()
	c.buf = c.buf[:0]
	start := c.message(unix.NFNL_SUBSYS_NFTABLES<<8|l.verb, unix.NLM_F_DUMP, l.family, 0)
	c.buf = append(c.buf, l.filter...)
	c.end(start)
	if err := c.send(); err != nil {
		return false, err
	}
	for done := false; !done; {
		readErr := c.read(func(h unix.NlMsghdr, body []byte) {
			switch {
			case h.Seq != c.seq:
				return
			case h.Type == unix.NLMSG_DONE:
				done = true
				if e := errno(body); e != 0 {
					err = e
				}
			case h.Type == unix.NLMSG_ERROR:
				done = true
				err = errno(body)
			case len(body) >= 4:
				l.each(body[4:])
			}
			interrupted = interrupted || h.Flags&unix.NLM_F_DUMP_INTR != 0
		})
		if readErr != nil {
			return false, readErr
		}
	}
	return interrupted, err
}
