package attack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// forged is a packet whose sender writes what it likes.
type forged struct {
	protocol model.Protocol // TCP, UDP, or one of the two ICMPs
	src, dst netip.AddrPort // of ICMP without ports
	flags    byte           // of TCP
	seq, ack uint32         // of TCP
	kind     [2]byte        // type and code of ICMP
	more     uint16         // of IPv4: flags and offset of a fragment
	payload  []byte         // what an ICMP error quotes, among others
}

// Flags of TCP, and protocols.
const (
	fin, syn, rst, psh, ack byte = 1, 2, 4, 8, 16

	icmp4, icmp6 model.Protocol = 1, 58
)

// append adds the packet to b.
func (p *forged) append(b []byte) []byte {
	start := len(b)
	if p.dst.Addr().Is6() {
		b = append(b, 0x60, 0, 0, 0, 0, 0, byte(p.protocol), 64)
	} else {
		b = append(b, 0x45, 0, 0, 0, 0, 1, byte(p.more>>8), byte(p.more), 64, byte(p.protocol), 0, 0)
	}
	b = append(append(b, p.src.Addr().AsSlice()...), p.dst.Addr().AsSlice()...)
	header := len(b)
	b = append(p.appendTransport(b), p.payload...)
	size := len(b) - header
	if p.dst.Addr().Is6() {
		binary.BigEndian.PutUint16(b[start+4:], uint16(size))
	} else {
		binary.BigEndian.PutUint16(b[start+2:], uint16(len(b)-start))
		binary.BigEndian.PutUint16(b[start+10:], checksum(b[start:header], 0))
	}
	at := map[model.Protocol]int{model.TCP: 16, model.UDP: 6, icmp4: 2, icmp6: 2}[p.protocol]
	if header+at+2 > len(b) || p.more&0x1fff != 0 {
		return b // a fragment but for the first
	}
	var pseudo uint32
	if p.protocol != icmp4 {
		pseudo = sum(b[header-2*p.src.Addr().BitLen()/8:header]) + uint32(p.protocol) + uint32(size)
	}
	binary.BigEndian.PutUint16(b[header+at:], checksum(b[header:], pseudo))
	return b
}

func (p *forged) appendTransport(b []byte) []byte {
	switch p.protocol {
	case icmp4, icmp6:
		return append(b, p.kind[0], p.kind[1], 0, 0, 0, 0, 0, 0)
	case model.UDP:
		b = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, p.src.Port()), p.dst.Port())
		return binary.BigEndian.AppendUint32(b, uint32(8+len(p.payload))<<16)
	}
	b = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, p.src.Port()), p.dst.Port())
	b = binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, p.seq), p.ack)
	return append(b, 5<<4, p.flags, 0xff, 0xff, 0, 0, 0, 0)
}

func sum(b []byte) (n uint32) {
	for i, c := range b {
		n += uint32(c) << (8 * (1 - i%2))
	}
	return n
}

func checksum(b []byte, n uint32) uint16 {
	for n += sum(b); n > 0xffff; {
		n = n>>16 + n&0xffff
	}
	return ^uint16(n)
}

// forge sends so many packets from outside the cluster, as fast as it can. The test kernel, in which a packet takes some
// ten times as long, gets each tenth.
func (s *stage) forge(many int, packet func(n int) forged) {
	s.Helper()
	s.forgeAt(testbed.Outside, many, packet)
}

// forgeAt sends them from a place.
func (s *stage) forgeAt(from testbed.Place, many int, packet func(n int) forged) {
	s.Helper()
	step := 1
	if inTestKernel() {
		step = 10
	}
	err := s.bed.Do(from, func() error {
		raw := map[bool]int{}
		for v6, family := range map[bool]int{false: unix.AF_INET, true: unix.AF_INET6} {
			fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
			if err != nil {
				return os.NewSyscallError("socket", err)
			}
			defer unix.Close(fd)
			raw[v6] = fd
		}
		var b []byte
		for n := 0; n < many; n += step {
			p := packet(n)
			b = p.append(b[:0])
			to := p.dst.Addr()
			// Packets that do not fit into a queue, or that a rule refuses, are lost as on any network.
			err := unix.Sendto(raw[to.Is6()], b, 0, sockaddr(to))
			if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EPERM) {
				return fmt.Errorf("send to %s: %w", p.dst, err)
			}
		}
		return nil
	})
	if err != nil {
		s.Error(err)
	}
}

// inTestKernel reports whether the kernel is a User-Mode Linux.
func inTestKernel() bool {
	text, err := os.ReadFile("/proc/cpuinfo")
	return err == nil && bytes.Contains(text, []byte("User Mode Linux"))
}

func sockaddr(a netip.Addr) unix.Sockaddr {
	if a.Is6() {
		return &unix.SockaddrInet6{Addr: a.As16()}
	}
	return &unix.SockaddrInet4{Addr: a.As4()}
}

// sender is one of its own for each number up to ten million, in the family of whom it asks.
func sender(n int, to netip.AddrPort) netip.AddrPort {
	first := "172.16.0.1"
	if to.Addr().Is6() {
		first = "2001:db8::1"
	}
	return netip.AddrPortFrom(nth(first, n), uint16(1024+n%60_000))
}

// either is TCP or UDP, in turn.
func either(n int) model.Protocol { return []model.Protocol{model.TCP, model.UDP}[n%2] }

// base is where the attacker's own Service is reached from outside: in turn its NodePort and its load balancer, in both
// families.
func (s *stage) base(n int) netip.AddrPort {
	if n/2%2 == 0 {
		return netip.AddrPortFrom(s.bed.Addr(testbed.Node, n%2 == 1), baseNodePort)
	}
	return netip.AddrPortFrom(both(baseBalancer)[n%2], 80)
}

// hidden are the backends of quiet connections whose clients the node hides, and how many ports may hide one.
func (s *stage) hidden() (backends []netip.AddrPort, ports int) {
	for _, pod := range []testbed.Place{"web-1", "web-2"} {
		for _, v6 := range []bool{false, true} {
			backends = append(backends, netip.AddrPortFrom(s.bed.Addr(pod, v6), firstTarget+quietNumber))
		}
	}
	return backends, 1<<16 - firstHidden
}

const firstHidden = 1024

// toHidden sends a segment of TCP from each backend to each port of the node that may hide a client, and one that seems to
// be the client's.
func (s *stage) toHidden(p forged) {
	backends, ports := s.hidden()
	p.protocol = model.TCP
	for _, answer := range []bool{true, false} {
		s.forge(len(backends)*ports, func(n int) forged {
			backend := backends[n%len(backends)]
			p.src, p.dst = backend, netip.AddrPortFrom(s.bed.Addr(testbed.Node, backend.Addr().Is6()), uint16(firstHidden+n/len(backends)))
			if !answer {
				p.src, p.dst = p.dst, p.src
			}
			return p
		})
	}
}

// aboutHidden sends an ICMP error about each connection that there may be from the node to a backend.
func (s *stage) aboutHidden() {
	backends, ports := s.hidden()
	s.forge(len(backends)*ports, func(n int) forged {
		to := backends[n%len(backends)]
		node := netip.AddrPortFrom(s.bed.Addr(testbed.Node, to.Addr().Is6()), uint16(firstHidden+n/len(backends)))
		quoted := forged{protocol: model.TCP, src: node, dst: to, flags: ack, seq: 12345}
		p := forged{protocol: icmp4, kind: [2]byte{3, 1}, src: to, dst: node, payload: quoted.append(nil)}
		if to.Addr().Is6() {
			p.protocol, p.kind = icmp6, [2]byte{1, 3}
		}
		return p
	})
}
