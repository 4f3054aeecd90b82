package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// listTries is how often a list is asked for that changes while the kernel writes it.
const listTries = 10

// Server is a virtual server as the kernel lists it, without its real servers.
type Server struct {
	Scheduler string
	Flags     uint32
	Stats
}

// Stats are what the kernel has counted since it has had the server. "In" is what clients send.
type Stats struct{ Conns, InPackets, OutPackets, InBytes, OutBytes uint64 }

// Less is what is left of s without o, which may have been read a little later.
func (s Stats) Less(o Stats) Stats {
	less := func(a, b uint64) uint64 { return max(a, b) - b }
	return Stats{
		less(s.Conns, o.Conns), less(s.InPackets, o.InPackets), less(s.OutPackets, o.OutPackets),
		less(s.InBytes, o.InBytes), less(s.OutBytes, o.OutBytes),
	}
}

// decode reads attributes with numbers. The kernel may put padding between them.
func (s *Stats) decode(b []byte) error {
	const header, size = 4, 4 + 8
	of := [...]*uint64{1: &s.Conns, &s.InPackets, &s.OutPackets, &s.InBytes, &s.OutBytes}
	for len(b) >= header {
		n, kind := int(binary.NativeEndian.Uint16(b)), int(binary.NativeEndian.Uint16(b[2:]))
		if n < header || n > len(b) {
			return fmt.Errorf("statistics: an attribute of %d bytes in %d", n, len(b))
		}
		if 0 < kind && kind < len(of) && n == size {
			*of[kind] = binary.NativeEndian.Uint64(b[header:])
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

// Servers are all virtual servers in the namespace, of all programs. The kernel hands out a list in parts. Between two
// parts the positions of the remaining servers may change, so that some are listed twice, or not at all. Before Linux 7
// any server that is made or deleted causes this, in whatever namespace. Since then only the growth of a table that is
// too small does. So Servers lists again, up to listTries times, if a list does not have as many servers of IPv4 as
// there are.
func (c *Client) Servers() (found map[Key]Server, err error) {
	for range listTries {
		before, err := c.Count()
		if err != nil {
			return nil, err
		}
		listed, order, err := c.list()
		if err != nil {
			return nil, err
		}
		after, err := c.Count()
		if err != nil {
			return nil, err
		}
		c.places.note(order)
		if found = listed; before == after && len(found) == len(order) && ofIPv4(found) == after {
			break
		}
	}
	return found, nil
}

// list is Servers, once, and in which order the kernel has them.
func (c *Client) list() (found map[Key]Server, order []Key, err error) {
	found = map[Key]Server{}
	all := Request{command: cmdGetService, what: "virtual servers", encode: func(*netlink.AttributeEncoder) {}}
	err = c.get(all, netlink.Dump, inside(attrService, func(ad *netlink.AttributeDecoder) error {
		key, s := decodeServer(ad)
		found[key], order = s, append(order, key)
		return ad.Err()
	}))
	return found, order, err
}

func ofIPv4(servers map[Key]Server) (n int) {
	for key := range servers {
		if !key.V6 {
			n++
		}
	}
	return n
}

func decodeServer(ad *netlink.AttributeDecoder) (key Key, s Server) {
	const hashed = 2 // IP_VS_SVC_F_HASHED, which says nothing
	var address []byte
	for ad.Next() {
		switch ad.Type() {
		case serviceFamily:
			key.V6 = ad.Uint16() == unix.AF_INET6
		case serviceProtocol:
			key.Protocol = model.Protocol(ad.Uint16())
		case serviceAddress:
			address = ad.Bytes()
		case servicePort:
			key.Port = bigEndian16(ad.Bytes())
		case serviceMark:
			key.Mark = ad.Uint32()
		case serviceScheduler:
			s.Scheduler = ad.String()
		case serviceFlags:
			if b := ad.Bytes(); len(b) >= 4 {
				s.Flags = binary.NativeEndian.Uint32(b) &^ hashed
			}
		case serviceStats:
			ad.Do(s.decode)
		}
	}
	if key.Mark != 0 {
		return Key{Mark: key.Mark, V6: key.V6}, s
	}
	key.Addr = decodeAddress(address, key.V6)
	return key, s
}

func bigEndian16(b []byte) uint16 {
	if len(b) != 2 {
		return 0
	}
	return binary.BigEndian.Uint16(b)
}

// decodeAddress takes the part of a union nf_inet_addr that an address family uses.
func decodeAddress(b []byte, v6 bool) netip.Addr {
	if !v6 && len(b) > 4 {
		b = b[:4]
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr
}

// Destinations are the real servers of a virtual server.
func (c *Client) Destinations(k Key) (found []Destination, err error) {
	of := Request{command: cmdGetDest, what: "real servers of " + k.String(), encode: k.identify}
	err = c.get(of, netlink.Dump, inside(attrDest, func(ad *netlink.AttributeDecoder) error {
		found = append(found, decodeDestination(ad, k.V6))
		return ad.Err()
	}))
	if errors.Is(err, unix.ESRCH) { // the virtual server went meanwhile
		return nil, nil
	}
	return found, err
}

func decodeDestination(ad *netlink.AttributeDecoder, v6 bool) (d Destination) {
	var address []byte
	var port uint16
	for ad.Next() {
		switch ad.Type() {
		case destAddress:
			address = ad.Bytes()
		case destPort:
			port = bigEndian16(ad.Bytes())
		case destMethod:
			d.Method = ad.Uint32() & methodMask
		case destWeight:
			d.Weight = ad.Uint32()
		case destUpper:
			d.Upper = ad.Uint32()
		case destLower:
			d.Lower = ad.Uint32()
		case destActive, destInactive:
			d.Connections += ad.Uint32()
		case destStats:
			ad.Do(d.decode)
		}
	}
	d.Addr = netip.AddrPortFrom(decodeAddress(address, v6), port)
	return d
}

// Count is how many virtual servers of IPv4 the kernel has, of all programs.
func (c *Client) Count() (int, error) {
	const getInfo = 64 + 1024 + 64 + 1 // IP_VS_SO_GET_INFO in include/uapi/linux/ip_vs.h
	var info struct{ version, size, services uint32 }
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(c.counter), unix.IPPROTO_IP, getInfo,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0, fmt.Errorf("count virtual servers: %w", errno)
	}
	return int(info.services), nil
}

// dumpSize is the most that the kernel lists at a time. For each part it searches from the list's beginning for the
// position where it was. With pages of 4 KiB, as package netlink asks for, a long list spends most of its time there.
const dumpSize = 32 << 10

// get calls f with each object that the kernel lists (netlink.Dump), or with one (netlink.Acknowledge). The first part
// of the answer is in the socket when the request has been sent, and each other one when the last has been read.
// Receive therefore never waits.
func (c *Client) get(r Request, flags netlink.HeaderFlags, f func(ad *netlink.AttributeDecoder) error) error {
	m, err := c.message(r, flags)
	if err != nil {
		return err
	}
	if m, err = c.conn.Send(m); err != nil {
		return err
	}
	if c.buffer == nil {
		c.buffer = make([]byte, dumpSize)
	}
	var failed error // what follows is read all the same, as there is one list at a time
	for done := false; !done; {
		n, err := c.receive(c.buffer)
		if err != nil {
			return fmt.Errorf("list %s: %w", r.what, err)
		}
		if done, err = objects(c.buffer[:n], m.Header.Sequence, f); err != nil {
			failed = fmt.Errorf("list %s: %w", r.what, err)
		}
	}
	return failed
}

// objects calls f with those in a part of the answer to a request, and reports whether that was the last one.
func objects(b []byte, sequence uint32, f func(*netlink.AttributeDecoder) error) (done bool, err error) {
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return false, fmt.Errorf("parse an answer of %d bytes: %w", len(b), err)
	}
	for _, m := range messages {
		switch {
		case m.Header.Seq != sequence: // of an earlier listing, which was given up
		case m.Header.Type == unix.NLMSG_DONE || m.Header.Type == unix.NLMSG_ERROR:
			return true, errnoOf(m.Data)
		case len(m.Data) >= genlHeader:
			ad, err := netlink.NewAttributeDecoder(m.Data[genlHeader:])
			if err == nil {
				err = f(ad)
			}
			if err != nil {
				return false, err
			}
		}
	}
	return false, nil
}

// inside calls f with the attributes of an object.
func inside(kind uint16, f func(*netlink.AttributeDecoder) error) func(*netlink.AttributeDecoder) error {
	return func(ad *netlink.AttributeDecoder) error {
		for ad.Next() {
			if ad.Type() == kind {
				ad.Nested(f)
			}
		}
		return ad.Err()
	}
}

// Timeouts are those of the kernel, by their attributes.
func (c *Client) Timeouts() (found map[uint16]time.Duration, err error) {
	found = map[uint16]time.Duration{}
	all := Request{command: cmdGetConfig, what: "timeouts of IPVS", encode: func(*netlink.AttributeEncoder) {}}
	return found, c.get(all, netlink.Acknowledge, func(ad *netlink.AttributeDecoder) error {
		for ad.Next() {
			found[ad.Type()] = time.Duration(ad.Uint32()) * time.Second
		}
		return ad.Err()
	})
}

// errnoOf is what the kernel says at the end of a list, or in its place.
func errnoOf(b []byte) error {
	if len(b) < 4 {
		return nil
	}
	if n := int32(binary.NativeEndian.Uint32(b)); n < 0 {
		return unix.Errno(-n)
	}
	return nil
}
