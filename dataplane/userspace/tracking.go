package userspace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// tracking asks connection tracking where datagrams were going that were redirected: their socket does not know.
type tracking struct {
	mu   sync.Mutex
	conn *nfnetlink.Socket
}

// original is where a flow was going that comes from a client to our own address.
func (t *tracking) original(p model.Protocol, client, own netip.AddrPort) (to netip.AddrPort, err error) {
	r := nfnetlink.Request{
		Kind: unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET, Family: unix.AF_INET,
		Each: func(flow []byte) { to = destinationIn(nfnetlink.Attribute(flow, nl.CTA_TUPLE_ORIG)) },
	}
	source, target := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if own.Addr().Is6() {
		r.Family, source, target = unix.AF_INET6, nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	e := &r.Filter
	tuple := e.Open(nl.CTA_TUPLE_REPLY)
	addresses := e.Open(nl.CTA_TUPLE_IP)
	e.Bytes(source, own.Addr().AsSlice())
	e.Bytes(target, client.Addr().AsSlice())
	e.Close(addresses)
	ports := e.Open(nl.CTA_TUPLE_PROTO)
	e.Bytes(nl.CTA_PROTO_NUM, []byte{byte(p)})
	e.Bytes(nl.CTA_PROTO_SRC_PORT, bigEndian(own.Port()))
	e.Bytes(nl.CTA_PROTO_DST_PORT, bigEndian(client.Port()))
	e.Close(ports)
	e.Close(tuple)
	t.mu.Lock()
	err = t.conn.Get(r)
	t.mu.Unlock()
	if err == nil && !to.IsValid() {
		err = errors.New("connection tracking does not say")
	}
	if err != nil {
		return to, fmt.Errorf("destination of the flow from %s: %w", client, err)
	}
	return to, nil
}

// destinationIn reads that of a tuple.
func destinationIn(tuple []byte) netip.AddrPort {
	addresses, ports := nfnetlink.Attribute(tuple, nl.CTA_TUPLE_IP), nfnetlink.Attribute(tuple, nl.CTA_TUPLE_PROTO)
	address := nfnetlink.Attribute(addresses, nl.CTA_IP_V4_DST)
	if address == nil {
		address = nfnetlink.Attribute(addresses, nl.CTA_IP_V6_DST)
	}
	port := nfnetlink.Attribute(ports, nl.CTA_PROTO_DST_PORT)
	a, ok := netip.AddrFromSlice(address)
	if !ok || len(port) != 2 {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port))
}

func (t *tracking) close() {
	if t != nil && t.conn != nil {
		_ = t.conn.Close() // nothing waits in it
	}
}
