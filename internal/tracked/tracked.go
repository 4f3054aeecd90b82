// Package tracked lists the flows that connection tracking knows, and has it forget some.
//
//	Filters ─► the kernel passes over the others ─► List: those that are wanted ─► Forget
//
// The kernel walks its whole table for each filter and address family, however few flows there are. So of few flows
// List has all read, in one walk.
package tracked

import (
	"cmp"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// Flow is what matters of one. Addresses and ports are those of its two tuples: what its client sends has From and To,
// what comes back Answers and Back. They differ where a source or a destination is translated.
type Flow struct {
	Protocol       model.Protocol
	From, To       netip.AddrPort
	Answers, Back  netip.AddrPort
	Mark           uint32
	Zone           uint16 // in which its tuples are; 0: that of packets without a rule
	Status         Status
	TCP            uint8         // its state, TCP_CONNTRACK_*
	Unheard        bool          // a connection is open, and what its client has sent is not acknowledged
	Resumed        bool          // it is open and has left a flowtable, and since then only its client has sent
	Left           time.Duration // until it is forgotten, if no packet comes
	Sent, Received Traffic       // by the client; 0 unless nf_conntrack_acct was 1 when the flow began

	attrs []byte
}

// Traffic is packets, and their bytes from the IP header on.
type Traffic struct{ Packets, Bytes uint64 }

// Attempt reports whether a client of TCP has sent the first packet, and no other packet followed.
func (f *Flow) Attempt() bool { return f.TCP == nl.TCP_CONNTRACK_SYN_SENT }

// Established reports whether both sides of a connection of TCP may send.
func (f *Flow) Established() bool { return f.TCP == nl.TCP_CONNTRACK_ESTABLISHED }

// Open reports whether it is a connection, or a flow of datagrams, that may go on.
func (f *Flow) Open() bool {
	switch f.Protocol {
	case model.TCP:
		return f.TCP < nl.TCP_CONNTRACK_TIME_WAIT
	case model.UDP, model.SCTP:
		return true
	}
	return false
}

// Status are bits of enum ip_conntrack_status (linux/netfilter/nf_conntrack_common.h).
type Status uint32

// Some of them.
const (
	Answered Status = 1 << 1 // IPS_SEEN_REPLY
	Assured  Status = 1 << 2 // IPS_ASSURED: of TCP, both sides have said that it is open
	NewFrom  Status = 1 << 4 // IPS_SRC_NAT: who answers does not see the client
	NewTo    Status = 1 << 5 // IPS_DST_NAT: who answers is another one than was asked
)

// Filter says which flows are listed. Fields that are 0 match all flows.
type Filter struct {
	Protocol    model.Protocol
	To, Answers netip.AddrPort // only with a Protocol; also a port without an address
	Mark        uint32         // bits that are set
	// Status is what the bits of Mask are.
	Status, Mask Status
}

// HasAddress reports whether it is about an address.
func (f Filter) HasAddress() bool { return f.To.Addr().IsValid() || f.Answers.Addr().IsValid() }

// V6 reports whether that is one of IPv6. The kernel does not choose by these, but by their ports: List does.
func (f Filter) V6() bool { return cmp.Or(f.To.Addr(), f.Answers.Addr()).Is6() }

// Attributes of a dump, of linux/netfilter/nfnetlink_conntrack.h, that older kernels pass over.
const (
	attrMarkMask   = 21 // CTA_MARK_MASK
	attrFilter     = 25 // CTA_FILTER, Linux 5.8
	attrStatusMask = 26 // CTA_STATUS_MASK, Linux 5.15
)

// Attributes of CTA_FILTER: by what of each tuple a flow is chosen. The kernel has names for these bits only inside
// (net/netfilter/nf_conntrack_netlink.c).
const (
	origFlags, replyFlags = 1, 2 // CTA_FILTER_ORIG_FLAGS, CTA_FILTER_REPLY_FLAGS

	bySource          = 1 << 0
	byDestination     = 1 << 1
	byProtocol        = 1 << 3
	bySourcePort      = 1 << 4
	byDestinationPort = 1 << 5
)

const (
	getFlows   = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	deleteFlow = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_DELETE
	getTotals  = unix.NFNL_SUBSYS_CTNETLINK<<8 | 5 // IPCTNL_MSG_CT_GET_STATS
)

func family(v6 bool) uint8 {
	if v6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// flowsPerWalk is how many flows are read in the time of one walk through a table of 262,144 places, which is the
// kernel's usual size (BenchmarkList).
const flowsPerWalk = 2048

// walk is one through the kernel's table.
type walk struct {
	family uint8
	Filter // the kernel's
}

// walks are as few as may be that show each flow that passes one of the filters. For each that it saves, one reads as
// many flows more as perWalk says.
func walks(c *nfnetlink.Socket, perWalk uint32, filters []Filter) (all []walk) {
	for _, f := range filters {
		switch {
		case f.HasAddress():
			all = append(all, walk{family(f.V6()), f})
		case f.Protocol != 0: // the kernel chooses by a tuple in one family only
			all = append(all, walk{unix.AF_INET, f}, walk{unix.AF_INET6, f})
		default:
			all = append(all, walk{unix.AF_UNSPEC, f})
		}
	}
	if saved := len(all) - 1; saved > 0 {
		if n, err := Count(c); err == nil && n < perWalk*uint32(saved) {
			return []walk{{family: unix.AF_UNSPEC}}
		}
	}
	return all
}

// List returns the flows of both address families that pass one of the filters, and are wanted. List drops flows beyond
// the filters, which an older kernel lists. That only takes longer.
func List(c *nfnetlink.Socket, wanted func(*Flow) bool, filters ...Filter) ([]Flow, error) {
	return list(c, flowsPerWalk, wanted, filters)
}

func list(c *nfnetlink.Socket, perWalk uint32, wanted func(*Flow) bool, filters []Filter) (flows []Flow, err error) {
	for _, w := range walks(c, perWalk, filters) {
		var some []Flow
		err := w.each(c, func() { some = nil }, func(flow *Flow) {
			first := slices.IndexFunc(filters, func(f Filter) bool { return f.has(flow) })
			own := w.Filter == Filter{} || first >= 0 && w.Filter == filters[first] // else another walk shows it, too
			if first >= 0 && own && wanted(flow) {
				kept := *flow
				kept.attrs = slices.Clone(flow.attrs)
				some = append(some, kept)
			}
		})
		if err != nil {
			return nil, err
		}
		flows = append(flows, some...)
	}
	return flows, nil
}

// Each calls each with the flows of both address families that pass a filter without a Protocol, which it may not keep;
// after reset, from the start.
func (f Filter) Each(c *nfnetlink.Socket, reset func(), each func(*Flow)) error {
	return walk{unix.AF_UNSPEC, f}.each(c, reset, func(flow *Flow) {
		if f.has(flow) {
			each(flow)
		}
	})
}

func (w walk) each(c *nfnetlink.Socket, reset func(), each func(*Flow)) error {
	return c.Dump(nfnetlink.Request{
		Kind: getFlows, Family: w.family, Filter: w.encode(), Reset: reset,
		Each: func(attrs []byte) {
			flow := Flow{attrs: attrs}
			flow.decode(attrs)
			each(&flow)
		},
	})
}

func (f Filter) has(flow *Flow) bool {
	return (f.Protocol == 0 || flow.Protocol == f.Protocol) &&
		flow.Mark&f.Mark == f.Mark && flow.Status&f.Mask == f.Status &&
		isAt(flow.To, f.To) && isAt(flow.Answers, f.Answers)
}

// isAt reports whether an end of a flow is what a filter wants.
func isAt(end, wanted netip.AddrPort) bool {
	return (wanted.Port() == 0 || end.Port() == wanted.Port()) && (!wanted.Addr().IsValid() || end.Addr() == wanted.Addr())
}

// encode says to the kernel what it can know.
func (f Filter) encode() (e nfnetlink.Encoder) {
	if f.Mark != 0 {
		e.Uint32(nl.CTA_MARK, f.Mark)
		e.Uint32(attrMarkMask, f.Mark)
	}
	if f.Mask != 0 {
		e.Uint32(nl.CTA_STATUS, uint32(f.Status))
		e.Uint32(attrStatusMask, uint32(f.Mask))
	}
	if f.Protocol == 0 {
		return e
	}
	// Addresses of IPv6 are left to has: the kernel passes over those that are the same (ctnetlink_filter_match_tuple).
	orig, reply := byProtocol, 0
	if f.To.Port() != 0 {
		orig |= byDestinationPort
	}
	if f.To.Addr().Is4() {
		orig |= byDestination
	}
	Tuple{Protocol: f.Protocol, To: f.To}.encode(&e, nl.CTA_TUPLE_ORIG)
	if f.Answers.Port() != 0 {
		reply = byProtocol | bySourcePort
		Tuple{Protocol: f.Protocol, From: f.Answers}.encode(&e, nl.CTA_TUPLE_REPLY)
	}
	if f.Answers.Addr().Is4() {
		reply |= bySource
	}
	filter := e.Open(attrFilter)
	e.Bytes(origFlags, binary.NativeEndian.AppendUint32(nil, uint32(orig)))
	e.Bytes(replyFlags, binary.NativeEndian.AppendUint32(nil, uint32(reply)))
	e.Close(filter)
	return e
}

// Forget has the kernel forget flows. Those that are gone already are no error.
func Forget(c *nfnetlink.Socket, flows []Flow) error {
	var errs []error
	for _, f := range flows {
		r := nfnetlink.Request{Kind: deleteFlow, Family: family(f.To.Addr().Is6()), Filter: nfnetlink.Encoder{B: f.attrs}}
		if err := c.Do(r); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// ForgetListed has the kernel forget what List returns, and returns it.
func ForgetListed(c *nfnetlink.Socket, wanted func(*Flow) bool, filters ...Filter) ([]Flow, error) {
	flows, err := List(c, wanted, filters...)
	if err == nil {
		err = Forget(c, flows)
	}
	return flows, err
}

// Count is the number of flows of both address families, in this network namespace.
func Count(c *nfnetlink.Socket) (n uint32, err error) {
	const globalEntries = 1 // CTA_STATS_GLOBAL_ENTRIES
	return n, c.Get(nfnetlink.Request{Kind: getTotals, Each: func(attrs []byte) {
		n = nfnetlink.Uint32(attrs, globalEntries)
	}})
}

// Tuple is what packets of one direction of a flow have.
type Tuple struct {
	Protocol model.Protocol
	From, To netip.AddrPort // zero: any
}

// ForgetFrom has the kernel forget the flow whose client sends such packets, if there is one.
func ForgetFrom(c *nfnetlink.Socket, t Tuple) error {
	r := nfnetlink.Request{Kind: deleteFlow, Family: family(t.From.Addr().Is6())}
	t.encode(&r.Filter, nl.CTA_TUPLE_ORIG)
	if err := c.Do(r); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// ByAnswers is the flow whose answers are such packets.
func ByAnswers(c *nfnetlink.Socket, t Tuple) (Flow, error) { return t.flow(c, nl.CTA_TUPLE_REPLY) }

// BySender is the flow whose client sends such packets.
func BySender(c *nfnetlink.Socket, t Tuple) (Flow, error) { return t.flow(c, nl.CTA_TUPLE_ORIG) }

func (t Tuple) flow(c *nfnetlink.Socket, kind uint16) (f Flow, err error) {
	r := nfnetlink.Request{Kind: getFlows, Family: family(t.From.Addr().Is6()), Each: f.decode}
	t.encode(&r.Filter, kind)
	if err = c.Get(r); err == nil && (!f.To.IsValid() || !f.Answers.IsValid()) {
		err = errors.New("connection tracking does not say where it goes")
	}
	return f, err
}

func (f *Flow) decode(attrs []byte) {
	nfnetlink.Attributes(attrs, func(kind uint16, data []byte) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			f.From, f.To, f.Protocol = decodeTuple(data)
		case nl.CTA_TUPLE_REPLY:
			f.Answers, f.Back, _ = decodeTuple(data)
		case nl.CTA_STATUS:
			f.Status = Status(number(data))
		case nl.CTA_MARK:
			f.Mark = number(data)
		case nl.CTA_ZONE:
			if len(data) == 2 {
				f.Zone = binary.BigEndian.Uint16(data)
			}
		case nl.CTA_TIMEOUT:
			f.Left = time.Duration(number(data)) * time.Second
		case nl.CTA_COUNTERS_ORIG:
			f.Sent = decodeTraffic(data)
		case nl.CTA_COUNTERS_REPLY:
			f.Received = decodeTraffic(data)
		case nl.CTA_PROTOINFO:
			tcp := nfnetlink.Attribute(data, nl.CTA_PROTOINFO_TCP)
			if state := nfnetlink.Attribute(tcp, nl.CTA_PROTOINFO_TCP_STATE); len(state) == 1 {
				f.TCP = state[0]
			}
			const unacknowledged, sent = 0x10, 0x20 // IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED, IP_CT_TCP_FLAG_MAXACK_SET
			flags := nfnetlink.Attribute(tcp, nl.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL)
			if f.TCP != nl.TCP_CONNTRACK_ESTABLISHED || len(flags) == 0 {
				return
			}
			replies := nfnetlink.Attribute(tcp, nl.CTA_PROTOINFO_TCP_FLAGS_REPLY)
			f.Unheard = flags[0]&unacknowledged != 0
			f.Resumed = flags[0]&sent != 0 && len(replies) > 0 && replies[0]&sent == 0
		}
	})
}

// encode writes the tuple as a nested attribute, without what is zero: a filter may name one end only, or a port. Ports
// are in network byte order.
func (t Tuple) encode(e *nfnetlink.Encoder, kind uint16) {
	type end struct {
		netip.AddrPort
		v4, v6, port uint16
	}
	ends := []end{
		{t.From, nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC, nl.CTA_PROTO_SRC_PORT},
		{t.To, nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST, nl.CTA_PROTO_DST_PORT},
	}
	tuple := e.Open(kind)
	if t.From.Addr().IsValid() || t.To.Addr().IsValid() {
		addresses := e.Open(nl.CTA_TUPLE_IP)
		for _, x := range ends {
			switch {
			case x.Addr().Is4():
				e.Bytes(x.v4, x.Addr().AsSlice())
			case x.Addr().Is6():
				e.Bytes(x.v6, x.Addr().AsSlice())
			}
		}
		e.Close(addresses)
	}
	ports := e.Open(nl.CTA_TUPLE_PROTO)
	e.Bytes(nl.CTA_PROTO_NUM, []byte{byte(t.Protocol)})
	for _, x := range ends {
		if x.Port() == 0 {
			continue
		}
		e.Bytes(x.port, binary.BigEndian.AppendUint16(nil, x.Port()))
	}
	e.Close(ports)
	e.Close(tuple)
}

func decodeTuple(tuple []byte) (src, dst netip.AddrPort, protocol model.Protocol) {
	var from, to netip.Addr
	var fromPort, toPort uint16
	nfnetlink.Attributes(nfnetlink.Attribute(tuple, nl.CTA_TUPLE_IP), func(kind uint16, data []byte) {
		switch kind {
		case nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC:
			from, _ = netip.AddrFromSlice(data)
		case nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST:
			to, _ = netip.AddrFromSlice(data)
		}
	})
	nfnetlink.Attributes(nfnetlink.Attribute(tuple, nl.CTA_TUPLE_PROTO), func(kind uint16, data []byte) {
		switch {
		case kind == nl.CTA_PROTO_NUM && len(data) == 1:
			protocol = model.Protocol(data[0])
		case kind == nl.CTA_PROTO_SRC_PORT && len(data) == 2:
			fromPort = binary.BigEndian.Uint16(data)
		case kind == nl.CTA_PROTO_DST_PORT && len(data) == 2:
			toPort = binary.BigEndian.Uint16(data)
		}
	})
	return netip.AddrPortFrom(from, fromPort), netip.AddrPortFrom(to, toPort), protocol
}

func decodeTraffic(counters []byte) Traffic {
	return Traffic{
		nfnetlink.Uint64(counters, nl.CTA_COUNTERS_PACKETS), nfnetlink.Uint64(counters, nl.CTA_COUNTERS_BYTES),
	}
}

func number(data []byte) uint32 {
	if len(data) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(data)
}
