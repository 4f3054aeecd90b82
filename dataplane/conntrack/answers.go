package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	attributes "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// Table asks connection tracking about single flows, which costs the same however many there are.
type Table struct{ sockets map[int]*nl.SocketHandle }

// OpenTable is about the network namespace of the calling thread. The caller closes it.
func OpenTable() (*Table, error) {
	socket, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err == nil {
		err = socket.SetReceiveTimeout(&nl.SocketTimeoutTv)
	}
	if err != nil {
		return nil, fmt.Errorf("open conntrack socket: %w", err)
	}
	return &Table{map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: socket}}}, nil
}

// Close gives the socket back.
func (t *Table) Close() { t.sockets[unix.NETLINK_NETFILTER].Close() }

// Answer is who answers on a flow, and the flow's mark.
type Answer struct {
	From netip.AddrPort
	Mark uint32
}

// Answers is who answers a client that has asked `to`; ok is false if nobody tracks that.
func (t *Table) Answers(p model.Protocol, from, to netip.AddrPort) (who Answer, ok bool, err error) {
	tuple, err := tupleOf(p, from, to)
	if err != nil {
		return who, false, err
	}
	header := &nl.Nfgenmsg{NfgenFamily: unix.AF_INET}
	if to.Addr().Is6() {
		header.NfgenFamily = unix.AF_INET6
	}
	// The kernel says that more messages follow, which is so of the acknowledgement only.
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_GET, unix.NLM_F_ACK)
	request.Sockets = t.sockets
	request.AddData(header)
	request.AddRawData(tuple)
	replies, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) { // or it is off
		return who, false, nil
	}
	if err == nil && (len(replies) == 0 || len(replies[0]) < nl.SizeofNfgenmsg) {
		err = errors.New("the answer is too short")
	}
	if err == nil {
		who, err = answering(replies[0][nl.SizeofNfgenmsg:])
	}
	if err != nil {
		return who, false, fmt.Errorf("tracked flow from %s to %s: %w", from, to, err)
	}
	return who, true, nil
}

// tupleOf says which flow it is.
func tupleOf(p model.Protocol, from, to netip.AddrPort) ([]byte, error) {
	source, target := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if to.Addr().Is6() {
		source, target = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	e := attributes.NewAttributeEncoder()
	e.Nested(nl.CTA_TUPLE_ORIG, func(e *attributes.AttributeEncoder) error {
		e.Nested(nl.CTA_TUPLE_IP, func(e *attributes.AttributeEncoder) error {
			e.Bytes(source, from.Addr().AsSlice())
			e.Bytes(target, to.Addr().AsSlice())
			return nil
		})
		e.Nested(nl.CTA_TUPLE_PROTO, func(e *attributes.AttributeEncoder) error {
			e.ByteOrder = binary.BigEndian
			e.Uint8(nl.CTA_PROTO_NUM, uint8(p))
			e.Uint16(nl.CTA_PROTO_SRC_PORT, from.Port())
			e.Uint16(nl.CTA_PROTO_DST_PORT, to.Port())
			return nil
		})
		return nil
	})
	return e.Encode()
}

// answering reads where answers come from.
func answering(flow []byte) (who Answer, err error) {
	var addr netip.Addr
	var port uint16
	if who.Mark, err = markOf(flow); err != nil {
		return who, err
	}
	d, err := attributes.NewAttributeDecoder(flow)
	if err != nil {
		return who, err
	}
	nested(d, func(tuple uint16, d *attributes.AttributeDecoder) {
		if tuple != nl.CTA_TUPLE_REPLY {
			return
		}
		nested(d, func(part uint16, d *attributes.AttributeDecoder) {
			for d.Next() {
				switch kind := d.Type(); {
				case part == nl.CTA_TUPLE_IP && (kind == nl.CTA_IP_V4_SRC || kind == nl.CTA_IP_V6_SRC):
					addr, _ = netip.AddrFromSlice(d.Bytes())
				case part == nl.CTA_TUPLE_PROTO && kind == nl.CTA_PROTO_SRC_PORT:
					port = d.Uint16()
				}
			}
		})
	})
	who.From = netip.AddrPortFrom(addr, port)
	return who, d.Err()
}

func markOf(flow []byte) (mark uint32, err error) {
	d, err := attributes.NewAttributeDecoder(flow)
	if err != nil {
		return 0, err
	}
	d.ByteOrder = binary.BigEndian
	for d.Next() {
		if d.Type() == nl.CTA_MARK {
			mark = d.Uint32()
		}
	}
	return mark, d.Err()
}

// nested reads what attributes have inside.
func nested(d *attributes.AttributeDecoder, read func(kind uint16, inside *attributes.AttributeDecoder)) {
	for d.Next() {
		if kind := d.Type(); d.TypeFlags()&attributes.Nested != 0 {
			d.Nested(func(d *attributes.AttributeDecoder) error {
				d.ByteOrder = binary.BigEndian
				read(kind, d)
				return nil
			})
		}
	}
}
