package ebpf

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
)

// packet is a packet as text and as bytes:
//
//	tcp 192.0.2.9:4000 > 192.0.2.1:30080 S
//	udp 192.0.2.9:4000 > 192.0.2.1:30053 unsummed
//	icmp 192.0.2.254:0 > 192.0.2.1:0 unreachable (tcp 192.0.2.1:30080 > 192.0.2.9:4000)
//
// More words: options (IPv4 options; IPv6 extension headers), first, later (fragments of one datagram). Of TCP there
// are seq=N and ack=N, 0 if they are missing, and empty, which most are not. Of SCTP there are init, init-ack, abort
// and complete, tag=N, and own=N, the tag that the other side is to use. Of ICMP there are port-unreachable,
// protocol-unreachable and echo. for=ADDRESS:PORT is the option of direct answers.
// When bytes become text, a checksum or length that is wrong is named.
type packet struct {
	protocol model.Protocol
	src, dst netip.AddrPort
	words    []string // sorted
	inner    *packet
}

const (
	icmp   = 1
	icmpv6 = 58
	// A datagram of UDP that is cut in two: header and zeros, the first part of them in the first fragment.
	datagram, firstPart = 32, 24
)

func (p packet) is(word string) bool { return slices.Contains(p.words, word) }

func (p packet) v6() bool { return p.src.Addr().Is6() }

func protocols() map[string]model.Protocol {
	return map[string]model.Protocol{"tcp": model.TCP, "udp": model.UDP, "sctp": model.SCTP, "icmp": icmp, "icmpv6": icmpv6}
}

func parsePacket(text string) (p packet, err error) {
	text = strings.TrimSpace(text)
	if outer, inner, ok := strings.Cut(text, "("); ok {
		quoted, err := parsePacket(strings.TrimSuffix(inner, ")"))
		if err != nil {
			return p, err
		}
		text, p.inner = outer, &quoted
	}
	words := strings.Fields(text)
	if len(words) < 4 || words[2] != ">" {
		return p, fmt.Errorf("%q: want PROTOCOL FROM > TO", text)
	}
	var known bool
	if p.protocol, known = protocols()[words[0]]; !known {
		return p, fmt.Errorf("%q: no protocol", words[0])
	}
	p.src, err = netip.ParseAddrPort(words[1])
	if err == nil {
		p.dst, err = netip.ParseAddrPort(words[3])
	}
	p.words = words[4:]
	slices.Sort(p.words)
	return p, err
}

func (p packet) String() string {
	var name string
	for n, protocol := range protocols() {
		if protocol == p.protocol {
			name = n
		}
	}
	s := strings.Join(append([]string{name, p.src.String(), ">", p.dst.String()}, p.words...), " ")
	if p.inner != nil {
		s += " (" + p.inner.String() + ")"
	}
	return s
}

// bytes are those of the packet, with the header of Ethernet.
func (p packet) bytes() []byte {
	frame := append(make([]byte, 11, 200), 1) // to a device that has no address, from one that has
	if p.v6() {
		return append(append(frame, 0x86, 0xdd), p.ip()...)
	}
	return append(append(frame, 0x08, 0x00), p.ip()...)
}

func (p packet) ip() []byte {
	payload := p.l4()
	switch {
	case p.is("first"):
		payload = payload[:firstPart]
	case p.is("later"):
		payload = payload[firstPart:]
	}
	if p.v6() {
		return p.ip6(payload)
	}
	header := make([]byte, 20)
	if p.is("options") {
		header = append(header, 1, 1, 1, 1, 1, 1, 1, 0)
	}
	if p.service().IsValid() {
		header = append(header, p.option()...)
	}
	header[0] = 0x40 | byte(len(header)/4)
	binary.BigEndian.PutUint16(header[2:], uint16(len(header)+len(payload)))
	binary.BigEndian.PutUint16(header[4:], 77)
	binary.BigEndian.PutUint16(header[6:], p.fragment(true))
	header[8], header[9] = 64, byte(p.protocol)
	copy(header[12:], p.src.Addr().AsSlice())
	copy(header[16:], p.dst.Addr().AsSlice())
	binary.BigEndian.PutUint16(header[10:], ^sum(header))
	return append(header, payload...)
}

// fragment is the offset and flag of a fragment.
func (p packet) fragment(v4 bool) uint16 {
	var more, offset uint16 = 1, firstPart
	if v4 {
		more, offset = 0x2000, firstPart/8
	}
	switch {
	case p.is("first"):
		return more
	case p.is("later"):
		return offset
	}
	return 0
}

func (p packet) ip6(payload []byte) []byte {
	header := make([]byte, 40)
	next := &header[6]
	extend := func(number byte, extension ...byte) {
		*next = number
		header = append(header, extension...)
		next = &header[len(header)-len(extension)]
	}
	header[0], header[7] = 0x60, 64
	copy(header[8:], p.src.Addr().AsSlice())
	copy(header[24:], p.dst.Addr().AsSlice())
	if p.is("options") {
		extend(0, 0, 0, 1, 4, 0, 0, 0, 0)
		extend(60, 0, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	}
	if p.service().IsValid() {
		extend(60, p.option()...)
	}
	if p.is("first") || p.is("later") {
		f := p.fragment(false)
		extend(44, 0, 0, byte(f>>8), byte(f), 0, 0, 0, 77)
	}
	*next = byte(p.protocol)
	binary.BigEndian.PutUint16(header[4:], uint16(len(header)-40+len(payload)))
	return append(header, payload...)
}

// l4 is the whole datagram, also if the packet is a fragment of it.
func (p packet) l4() []byte {
	var b []byte
	b = binary.BigEndian.AppendUint16(b, p.src.Port())
	b = binary.BigEndian.AppendUint16(b, p.dst.Port())
	switch p.protocol {
	case model.TCP:
		b = append(b, make([]byte, 16)...)
		binary.BigEndian.PutUint32(b[4:], p.number("seq"))
		binary.BigEndian.PutUint32(b[8:], p.number("ack"))
		b[12], b[13] = 0x50, p.flags()
		if !p.is("empty") {
			b = append(b, "hello"...)
		}
		binary.BigEndian.PutUint16(b[16:], ^sum(p.pseudo(len(b)), b))
	case model.UDP:
		b = append(b, make([]byte, datagram-4)...)
		binary.BigEndian.PutUint16(b[4:], datagram)
		if !p.is("unsummed") { // a sum of 0 is sent as its other form: 0 says that there is none (RFC 768)
			binary.BigEndian.PutUint16(b[6:], cmp.Or(^sum(p.pseudo(datagram), b), 0xffff))
		}
	case model.SCTP:
		b = append(b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1)
		binary.BigEndian.PutUint32(b[4:], p.number("tag"))
		binary.BigEndian.PutUint32(b[16:], p.number("own"))
		for chunk, word := range chunks() {
			if p.is(word) {
				b[12] = chunk
			}
		}
		binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	case icmp, icmpv6:
		return p.icmp()
	}
	return b
}

// chunks are those of SCTP that matter.
func chunks() map[byte]string {
	return map[byte]string{1: "init", 2: "init-ack", 6: "abort", 14: "complete"}
}

// messages are the types and codes of ICMP.
func messages(protocol model.Protocol) map[string][2]byte {
	if protocol == icmp {
		return map[string][2]byte{
			"unreachable": {3, 1}, "protocol-unreachable": {3, 2}, "port-unreachable": {3, 3}, "echo": {8, 0},
		}
	}
	return map[string][2]byte{"unreachable": {1, 0}, "port-unreachable": {1, 4}, "echo": {128, 0}}
}

func (p packet) icmp() []byte {
	b := make([]byte, 8)
	for word, message := range messages(p.protocol) {
		if p.is(word) {
			copy(b, message[:])
		}
	}
	if p.inner != nil {
		b = append(b, p.inner.ip()...)
	}
	var pseudo []byte
	if p.protocol == icmpv6 {
		pseudo = p.pseudo(len(b))
	}
	binary.BigEndian.PutUint16(b[2:], ^sum(pseudo, b))
	return b
}

// number is what stands behind a name.
func (p packet) number(name string) (n uint32) {
	for _, word := range p.words {
		if _, err := fmt.Sscanf(word, name+"=%d", &n); err == nil {
			break
		}
	}
	return n
}

const flagLetters = "FSRPA"

func (p packet) flags() (b byte) {
	for _, word := range p.words {
		if strings.Trim(word, flagLetters) == "" {
			for _, letter := range word {
				b |= 1 << strings.IndexRune(flagLetters, letter)
			}
		}
	}
	return b
}

func (p packet) pseudo(length int) []byte {
	b := slices.Concat(p.src.Addr().AsSlice(), p.dst.Addr().AsSlice())
	return append(b, byte(length>>8), byte(length), 0, byte(p.protocol))
}

// sum is the checksum of the Internet (RFC 1071), of which the complement is sent.
func sum(parts ...[]byte) uint16 {
	var s uint32
	for _, b := range parts {
		if len(b)%2 != 0 {
			b = append(slices.Clone(b), 0)
		}
		for i := 0; i < len(b); i += 2 {
			s += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// decode reads a packet that bytes made, with other addresses and ports.
func decode(frame []byte) (packet, error) {
	if len(frame) < 14 {
		return packet{}, errors.New("no frame")
	}
	return decodeIP(frame[14:], true)
}

// decodeIP reads a packet, or the quoted part of one, whose inner checksums cannot be checked.
func decodeIP(b []byte, whole bool) (p packet, err error) {
	if len(b) < 20 {
		return p, errors.New("no header of IP")
	}
	var payload []byte
	if b[0]>>4 == 6 {
		payload = p.decode6(b, whole)
	} else {
		payload = p.decode4(b, whole)
	}
	if !p.is("later") {
		p.src = netip.AddrPortFrom(p.src.Addr(), binary.BigEndian.Uint16(payload))
		p.dst = netip.AddrPortFrom(p.dst.Addr(), binary.BigEndian.Uint16(payload[2:]))
	}
	if err := p.decodeL4(payload, whole); err != nil {
		return p, err
	}
	slices.Sort(p.words)
	return p, nil
}

func (p *packet) decode4(b []byte, whole bool) []byte {
	header := int(b[0]&15) * 4
	if whole && int(binary.BigEndian.Uint16(b[2:])) != len(b) {
		p.words = append(p.words, "BAD-LENGTH")
	}
	p.protocol = model.Protocol(b[9])
	src, _ := netip.AddrFromSlice(b[12:16])
	dst, _ := netip.AddrFromSlice(b[16:20])
	p.src, p.dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
	if sum(b[:header]) != 0xffff {
		p.words = append(p.words, "BAD-IP-SUM")
	}
	if header > 20 && !p.decodeOption(b[20:header]) {
		p.words = append(p.words, "options")
	}
	p.decodeFragment(b[6]&0x20 != 0, binary.BigEndian.Uint16(b[6:])&0x1fff != 0)
	return b[header:]
}

func (p *packet) decodeFragment(more, offset bool) {
	switch {
	case offset:
		p.words = append(p.words, "later")
	case more:
		p.words = append(p.words, "first")
	}
}

func (p *packet) decode6(b []byte, whole bool) []byte {
	if whole && int(binary.BigEndian.Uint16(b[4:]))+40 != len(b) {
		p.words = append(p.words, "BAD-LENGTH")
	}
	src, _ := netip.AddrFromSlice(b[8:24])
	dst, _ := netip.AddrFromSlice(b[24:40])
	p.src, p.dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
	next, b := b[6], b[40:]
	for {
		switch next {
		case 0:
			p.words = append(p.words, "options")
			next, b = b[0], b[8+8*int(b[1]):]
		case 60:
			p.decodeOption(b[:8+8*int(b[1])])
			next, b = b[0], b[8+8*int(b[1]):]
		case 44:
			p.decodeFragment(b[3]&1 != 0, binary.BigEndian.Uint16(b[2:])&0xfff8 != 0)
			next, b = b[0], b[8:]
		default:
			p.protocol = model.Protocol(next)
			return b
		}
	}
}

func (p *packet) decodeL4(b []byte, whole bool) (err error) {
	if p.is("later") {
		return nil
	}
	length := len(b)
	if p.is("first") {
		length = datagram
	}
	good := true
	switch p.protocol {
	case model.TCP:
		p.words = append(p.words, letters(b[13])...)
		p.addNumber("seq", b[4:])
		p.addNumber("ack", b[8:])
		if whole && len(b) == 20 {
			p.words = append(p.words, "empty")
		}
		good = sum(p.pseudo(length), b) == 0xffff
	case model.UDP:
		if b[6] == 0 && b[7] == 0 {
			p.words = append(p.words, "unsummed")
		} else {
			good = sum(p.pseudo(length), b) == 0xffff
		}
	case model.SCTP:
		p.addNumber("tag", b[4:])
		p.addNumber("own", b[16:])
		if word := chunks()[b[12]]; word != "" {
			p.words = append(p.words, word)
		}
		c := slices.Clone(b)
		copy(c[8:], []byte{0, 0, 0, 0})
		good = binary.LittleEndian.Uint32(b[8:]) == crc32.Checksum(c, crc32.MakeTable(crc32.Castagnoli))
	case icmp, icmpv6:
		p.src, p.dst = netip.AddrPortFrom(p.src.Addr(), 0), netip.AddrPortFrom(p.dst.Addr(), 0)
		for word, message := range messages(p.protocol) {
			if bytes.Equal(b[:2], message[:]) {
				p.words = append(p.words, word)
			}
		}
		good = sum(b) == 0xffff
		if p.protocol == icmpv6 {
			good = sum(p.pseudo(length), b) == 0xffff
		}
		if len(b) > 8 {
			var inner packet
			inner, err = decodeIP(b[8:], false)
			p.inner = &inner
		}
	}
	if whole && !good {
		p.words = append(p.words, "BAD-SUM")
	}
	return err
}

func (p *packet) addNumber(name string, b []byte) {
	if n := binary.BigEndian.Uint32(b); n > 0 {
		p.words = append(p.words, fmt.Sprintf("%s=%d", name, n))
	}
}

func letters(flags byte) []string {
	var s strings.Builder
	for i, letter := range flagLetters {
		if flags&(1<<i) != 0 {
			s.WriteRune(letter)
		}
	}
	if s.Len() == 0 {
		return nil
	}
	return []string{s.String()}
}
