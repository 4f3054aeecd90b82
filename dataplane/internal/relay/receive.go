package relay

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// All datagrams from one origin come to one socket. Its buffer must not be full of those for one Service. So the
// process takes out all datagrams before it handles one, and takes turns between namespaces, Services and clients. If
// too many wait, the one that has sent most loses datagrams. If datagrams come faster than the process takes them out
// (asking connection tracking takes longest), the kernel's buffer is full, and any client may lose some.
//
//	socket ─ as many as there are ─► where to? ─► waiting, by owners ─ the next one's turn ─► its flow ─► the backend

// intake is such a socket.
type intake struct {
	proxy   *Proxy
	locate  DatagramLocator
	waiting *share.Pool // bytes of datagrams

	buffer, oob []byte
}

const (
	// maxWaiting bounds the bytes that wait at one socket. A datagram counts for what it takes beside its text, too.
	maxWaiting   = 4 << 20
	besideText   = 768
	bufferedOOB  = 256
	receivedNext = 256 // datagrams that are taken in before one is dealt with
)

// datagram is one that waits.
type datagram struct {
	share.Place
	proxy *Proxy
	at    Packet
	data  []byte
}

// Used implements share.Holder.
func (*datagram) Used() int64 { return 0 }

// Yield implements share.Holder.
func (d *datagram) Yield() { d.proxy.turned.count(nil, tooManyDatagrams) }

// wait has it wait among others, or be lost.
func (d *datagram) wait(among *share.Pool, o share.Owner) {
	if !among.Enter(&d.Place, o, len(d.data)+besideText, d) {
		d.Yield()
	}
}

// Receive handles datagrams in a goroutine, until the proxy ends, or the socket is closed. Datagrams that cannot be
// sent are lost, which clients of UDP must expect.
func (p *Proxy) Receive(conn *net.UDPConn, locate DatagramLocator) {
	p.group.Go(func() { p.receive(conn, locate) })
}

func (p *Proxy) receive(conn *net.UDPConn, locate DatagramLocator) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return // it is closed
	}
	in := &intake{
		proxy: p, locate: locate, waiting: share.NewReplacing(maxWaiting),
		buffer: make([]byte, bufferSize), oob: make([]byte, bufferedOOB),
	}
	for p.context.Err() == nil {
		err := in.take(raw)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			p.pause()
		}
		if next, ok := in.waiting.Next().(*datagram); ok {
			p.meet(next.at, next.data)
		}
	}
}

// take waits until there are datagrams, and has all of them wait for their turn. One that comes when there is no other
// has it at once.
func (in *intake) take(raw syscall.RawConn) error {
	idle, alone := false, Packet{}
	var size int
	var failed error
	err := raw.Read(func(fd uintptr) bool {
		for n := range receivedNext {
			var m int
			var from unix.Sockaddr
			size, m, _, from, failed = unix.Recvmsg(int(fd), in.buffer, in.oob, unix.MSG_DONTWAIT)
			if errors.Is(failed, unix.EAGAIN) {
				failed = nil
				idle = n == 0 && in.waiting.Used() == 0
				return !idle
			}
			if failed != nil {
				return true
			}
			at, ok := in.locate(clientOf(from), in.oob[:m])
			at.Protocol = model.UDP
			if !ok || at.translated() && !in.proxy.recall(&at) {
				continue
			}
			if idle {
				alone = at
				return true
			}
			in.wait(at, in.buffer[:size])
		}
		return true
	})
	if err = errors.Join(err, failed); err == nil && alone.Client.IsValid() {
		in.proxy.meet(alone, in.buffer[:size])
	}
	return err
}

// wait has a datagram wait for its turn. It drops one that no row is for.
func (in *intake) wait(at Packet, data []byte) {
	owner, ok := in.proxy.sends(at)
	if !ok {
		return
	}
	d := &datagram{proxy: in.proxy, at: at, data: slices.Clone(data)}
	d.wait(in.waiting, owner)
}

// sends returns the owner of a datagram. ok is false if no row has its destination.
func (p *Proxy) sends(at Packet) (o share.Owner, ok bool) {
	d, ok := p.Rows.lookup(at)
	if !ok {
		return o, false
	}
	return d.owner(at), true
}

// recall finds where a datagram was going that was redirected. It reports false if connection tracking does not know.
// It asks before a datagram waits, because one whose Service is not known would wait among those of all Services. It
// does not ask for a flow that is sure.
func (p *Proxy) recall(at *Packet) (ok bool) {
	f := p.flows.find(*at)
	if f != nil && f.sure() {
		at.Destination = f.key.AddrPort()
		return true
	}
	to, err := p.options.Original(at.Client, at.From.At)
	if err != nil {
		return false
	}
	at.Destination = to
	if f != nil && to == f.key.AddrPort() {
		f.assure()
	}
	return true
}

// A DatagramLocator tells where a datagram was going.
type DatagramLocator func(client netip.AddrPort, control []byte) (at Packet, ok bool)

// Answers is a socket from which clients are answered, as their datagrams have come to it.
type Answers struct {
	*net.UDPConn
	At         netip.AddrPort
	Redirected bool // the datagrams were going elsewhere
}

// clientOf is the sender of a datagram. An address of a link needs that to be answered.
func clientOf(s unix.Sockaddr) netip.AddrPort {
	client := socket.AddrPort(s)
	if v6, ok := s.(*unix.SockaddrInet6); ok && client.Addr().IsLinkLocalUnicast() {
		zone := strconv.FormatUint(uint64(v6.ZoneId), 10)
		client = netip.AddrPortFrom(client.Addr().WithZone(zone), client.Port())
	}
	return client
}
