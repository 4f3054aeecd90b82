// Package ipvs is the client of the kernel's IPVS, over generic netlink.
//
//	Open ─► Client ─ Servers, Destinations, Count, Timeouts ◄─ kernel
//	             └─ Request, Request, … ─► Perform ─► kernel ─► a Refusal for each that is not done
//
// Many requests go to the kernel at once, and lists come in large parts: a node has thousands of virtual servers.
package ipvs

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// Commands about destinations (include/uapi/linux/ip_vs.h).
const (
	NewDestination    = 5
	SetDestination    = 6
	DeleteDestination = 7
)

// Attributes that are timeouts.
const (
	TimeoutTCP = 4
	TimeoutFIN = 5
	TimeoutUDP = 6
)

const (
	genlName    = "IPVS"
	genlVersion = 1
	genlHeader  = 4 // bytes

	cmdNewService = 1
	cmdSetService = 2
	cmdDelService = 3
	cmdGetService = 4
	cmdGetDest    = 8
	cmdSetConfig  = 12
	cmdGetConfig  = 13

	attrService = 1 // of commands
	attrDest    = 2

	serviceFamily    = 1 // of virtual servers
	serviceProtocol  = 2
	serviceAddress   = 3
	servicePort      = 4
	serviceMark      = 5
	serviceScheduler = 6
	serviceFlags     = 7
	serviceTimeout   = 8
	serviceNetmask   = 9
	serviceStats     = 12 // in 64 bits

	destAddress  = 1 // of destinations
	destPort     = 2
	destMethod   = 3
	destWeight   = 4
	destUpper    = 5
	destLower    = 6
	destActive   = 7
	destInactive = 8
	destStats    = 12 // in 64 bits
)

// Masquerade is IP_VS_CONN_F_MASQ, the forwarding method that translates address and port.
const Masquerade = 0

const methodMask = 7 // IP_VS_CONN_F_FWD_MASK

// Key names a virtual server: by what packets are sent to or, if Mark is not 0, by their mark.
type Key struct {
	Addr     netip.Addr
	Port     uint16
	Protocol model.Protocol
	Mark     uint32
	V6       bool
}

// Compare sorts.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Mark, o.Mark), k.Addr.Compare(o.Addr), cmp.Compare(k.Port, o.Port),
		cmp.Compare(k.Protocol, o.Protocol), model.FalseFirst(k.V6, o.V6))
}

func (k Key) String() string {
	switch {
	case k.Mark == 0:
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(k.Addr, k.Port), k.Protocol)
	case k.V6:
		return fmt.Sprintf("fwmark %#x IPv6", k.Mark)
	}
	return fmt.Sprintf("fwmark %#x", k.Mark)
}

func (k Key) encode(ae *netlink.AttributeEncoder) {
	family := uint16(unix.AF_INET)
	if k.V6 {
		family = unix.AF_INET6
	}
	ae.Uint16(serviceFamily, family)
	if k.Mark != 0 {
		ae.Uint32(serviceMark, k.Mark)
		return
	}
	ae.Uint16(serviceProtocol, uint16(k.Protocol))
	ae.Bytes(serviceAddress, k.Addr.AsSlice())
	ae.Bytes(servicePort, binary.BigEndian.AppendUint16(nil, k.Port))
}

// identify encodes what names a virtual server in a request about its destinations.
func (k Key) identify(ae *netlink.AttributeEncoder) {
	ae.Nested(attrService, func(ae *netlink.AttributeEncoder) error {
		k.encode(ae)
		return nil
	})
}

// netmask makes persistence, if there is any, remember single addresses.
func (k Key) netmask() uint32 {
	if k.V6 {
		return 128
	}
	return ^uint32(0)
}

// Destination is a real server.
type Destination struct {
	Addr         netip.AddrPort
	Weight       uint32
	Method       uint32 // of forwarding
	Upper, Lower uint32 // thresholds
	Connections  uint32
	Stats
}

// Request is one thing to do to IPVS. The kernel answers each by itself, so that one that it refuses
// does not keep the others out.
type Request struct {
	// Server is the virtual server that this is, or is part of.
	Server    Key
	Scheduler string // of a virtual server that is made or changed

	command uint8
	what    string // for people: the object
	encode  func(ae *netlink.AttributeEncoder)
	done    func() // nil: no caller waits for it
}

// NewServer makes a virtual server.
func NewServer(k Key, scheduler string, done func()) Request {
	return serverRequest(cmdNewService, k, scheduler, done)
}

// SetServer changes one.
func SetServer(k Key, scheduler string, done func()) Request {
	return serverRequest(cmdSetService, k, scheduler, done)
}

func serverRequest(command uint8, k Key, scheduler string, done func()) Request {
	encode := func(ae *netlink.AttributeEncoder) {
		ae.Nested(attrService, func(ae *netlink.AttributeEncoder) error {
			k.encode(ae)
			ae.String(serviceScheduler, scheduler)
			ae.Bytes(serviceFlags, flagBytes(FlagsOf(scheduler)))
			ae.Uint32(serviceTimeout, 0)
			ae.Uint32(serviceNetmask, k.netmask())
			return nil
		})
	}
	what := "virtual server " + k.String()
	return Request{command: command, what: what, encode: encode, done: done, Server: k, Scheduler: scheduler}
}

// FlagsOf has schedulers that hash choose another destination where the one that they find takes no
// connections; otherwise they would refuse its clients (IP_VS_SVC_F_SCHED_SH_FALLBACK, …MH_FALLBACK).
func FlagsOf(scheduler string) uint32 {
	const fallback = 8
	if scheduler == "sh" || scheduler == "mh" {
		return fallback
	}
	return 0
}

// flagBytes sets exactly these flags of a virtual server (struct ip_vs_flags).
func flagBytes(flags uint32) []byte {
	b := binary.NativeEndian.AppendUint32(nil, flags)
	return binary.NativeEndian.AppendUint32(b, ^uint32(0))
}

// DeleteServer deletes a virtual server with its destinations.
func DeleteServer(k Key, done func()) Request {
	return Request{command: cmdDelService, what: "virtual server " + k.String(), encode: k.identify, done: done, Server: k}
}

// NewRequest is one about a destination: NewDestination, SetDestination or DeleteDestination.
func NewRequest(command uint8, k Key, d Destination, done func()) Request {
	what := fmt.Sprintf("real server %s of %s", d.Addr, k)
	return Request{command: command, what: what, Server: k, done: done, encode: func(ae *netlink.AttributeEncoder) {
		k.identify(ae)
		ae.Nested(attrDest, func(ae *netlink.AttributeEncoder) error {
			ae.Bytes(destAddress, d.Addr.Addr().AsSlice())
			ae.Bytes(destPort, binary.BigEndian.AppendUint16(nil, d.Addr.Port()))
			ae.Uint32(destMethod, d.Method)
			ae.Uint32(destWeight, d.Weight)
			ae.Uint32(destUpper, d.Upper)
			ae.Uint32(destLower, d.Lower)
			return nil
		})
	}}
}

// SetTimeout sets one of the timeouts for all virtual servers, in seconds. The parameter what is its name, for people.
func SetTimeout(attribute uint16, seconds uint32, what string, done func()) Request {
	return Request{command: cmdSetConfig, what: what, done: done,
		encode: func(ae *netlink.AttributeEncoder) { ae.Uint32(attribute, seconds) }}
}

// Refusal says which request the kernel does not do, and why.
type Refusal struct {
	Request Request
	Err     unix.Errno
}

func (r *Refusal) Error() string {
	s := fmt.Sprintf("IPVS refuses %s: %v", r.Request.what, r.Err)
	if name := r.Request.Scheduler; name != "" && r.Err == unix.ENOENT {
		s += fmt.Sprintf(": this kernel has no scheduler %s: load module ip_vs_%[1]s, or choose another", name)
	}
	return s
}

// Unwrap is the kernel's error.
func (r *Refusal) Unwrap() error { return r.Err }
