package conformance_test

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// capture sees what arrives at the devices of pods.
type capture struct {
	sockets []int
	seen    map[arrival]bool
	traffic map[netip.AddrPort]traffic // of backends
	payload map[netip.AddrPort]traffic // without headers, and without packets of TCP
}

// traffic is what a backend gets and sends.
type traffic struct{ toBackend, toClient dataplane.Traffic }

// arrival is a connection as its backend sees it.
type arrival struct {
	protocol        model.Protocol
	client, backend netip.AddrPort
}

// captured is a packet.
type captured struct {
	arrival
	begins         bool // a connection
	whole, payload dataplane.Traffic
}

func newCapture(t *testing.T, bed interface {
	Do(p testbed.Place, f func() error) error
}, pods []testbed.PodSpec) *capture {
	t.Helper()
	c := &capture{seen: map[arrival]bool{}, traffic: map[netip.AddrPort]traffic{}, payload: map[netip.AddrPort]traffic{}}
	all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	for _, pod := range pods {
		must(t, bed.Do(testbed.Place(pod.Name), func() error {
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(all))
			if err != nil {
				return err
			}
			c.sockets = append(c.sockets, fd)
			t.Cleanup(func() { _ = unix.Close(fd) })
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
		}))
	}
	return c
}

// take takes what has come and gone.
func (c *capture) take() {
	packet := make([]byte, 128)
	for _, fd := range c.sockets {
		for {
			n, from, err := unix.Recvfrom(fd, packet, 0)
			if err != nil {
				break
			}
			a, ok := decodeArrival(packet[:n])
			if !ok {
				continue
			}
			if link, ok := from.(*unix.SockaddrLinklayer); ok && link.Pkttype == unix.PACKET_OUTGOING {
				add(c.traffic, a.client, traffic{toClient: a.whole})
				add(c.payload, a.client, traffic{toClient: a.payload})
				continue
			}
			add(c.traffic, a.backend, traffic{toBackend: a.whole})
			add(c.payload, a.backend, traffic{toBackend: a.payload})
			if a.begins {
				c.seen[a.arrival] = true
			}
		}
	}
}

func add[K comparable](to map[K]traffic, key K, more traffic) {
	if more != (traffic{}) {
		to[key] = traffic{to[key].toBackend.Plus(more.toBackend), to[key].toClient.Plus(more.toClient)}
	}
}

// connections counts those of each backend that began: SYNs and first datagrams.
func (c *capture) connections() map[netip.AddrPort]uint64 {
	c.take()
	counts := map[netip.AddrPort]uint64{}
	for a := range c.seen {
		counts[a.backend]++
	}
	return counts
}

// decodeArrival reads an IP packet of TCP or UDP, without options.
func decodeArrival(b []byte) (a captured, ok bool) {
	const v4, v6, udp, offset, flags, syn, ack = 20, 40, 8, 12, 13, 2, 16
	var length, headers int
	var from, to netip.Addr
	switch {
	case len(b) >= v4+8 && b[0] == 0x45:
		a.protocol, length = model.Protocol(b[9]), int(binary.BigEndian.Uint16(b[2:]))
		from, to, b = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), b[v4:]
		headers = v4
	case len(b) >= v6+8 && b[0]>>4 == 6:
		a.protocol, length = model.Protocol(b[6]), v6+int(binary.BigEndian.Uint16(b[4:]))
		from, to, b = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40])), b[v6:]
		headers = v6
	default:
		return a, false
	}
	a.client = netip.AddrPortFrom(from, binary.BigEndian.Uint16(b))
	a.backend = netip.AddrPortFrom(to, binary.BigEndian.Uint16(b[2:]))
	a.whole = dataplane.Traffic{Packets: 1, Bytes: uint64(length)}
	switch {
	case a.protocol == model.UDP:
		a.begins, a.payload = true, dataplane.Traffic{Packets: 1, Bytes: uint64(length - headers - udp)}
	case a.protocol == model.TCP && len(b) > flags:
		a.begins = b[flags]&(syn|ack) == syn
		a.payload = dataplane.Traffic{Bytes: uint64(length - headers - int(b[offset]>>4*4))}
	default:
		return a, false
	}
	return a, true
}
