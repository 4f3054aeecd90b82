package nftables

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
)

// A flowtable forwards open connections between devices of the node. Their packets are translated where a device
// receives them, and pass no hook but that one.
//
//	backend answers ─► hook forward: chain offload ─ translated by a frontend, not hooked? ─► flowtable "open"
//	later packets ──► hook of a device ─ in the flowtable? ─► device of the route
//
// Only a packet of the backend lets a connection in: ResetOrphans finds one whose backend is gone.
const (
	chainOffload = "offload"
	flowtable    = "open"
)

// offload is the chain that lets connections into the flowtable. It comes after the filters of others: what they drop
// lets no connection in.
func (t *table) offload() nft.Chain {
	const assured, translated, offloaded = 1 << 2, 1 << 5, 1 << 14 // IPS_ASSURED, IPS_DST_NAT, IPS_OFFLOAD
	destination, n := expr.CtKey(20), t.Family.Address.Words()     // NFT_CT_DST_IP
	if t.Family.V6() {
		destination = 22 // NFT_CT_DST_IP6
	}
	hook := &nft.Hook{Kind: "filter", Number: unix.NF_INET_FORWARD, Priority: 300}
	return nft.Chain{Name: chainOffload, Hook: hook, Rules: []nft.Rule{nft.NewRule(
		"open connections of frontends",
		&expr.Ct{Key: expr.CtKeySTATUS, Register: nft.Word(0)},
		nft.Bits(0, assured|translated|offloaded, 0), nft.Equals(nft.Native(assured|translated)),
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: nft.Word(0)}, nft.Equals([]byte{1}),
		nft.Tuple{Key: destination, Register: nft.Word(0)},
		nft.LoadMeta(expr.MetaKeyL4PROTO, n),
		nft.Tuple{Key: expr.CtKeyPROTODST, Register: nft.Word(n + 1)},
		nft.NotIn("hooked"), nft.Find("frontends", 0), nft.Differs(nft.Native(0)),
		&expr.FlowOffload{Name: flowtable})}}
}

// knownChains are all that a table of this version may have always.
func (t *table) knownChains() []nft.Chain { return append(t.constantChains(), t.offload()) }

// setOffload makes the chain and its flowtable, if they are wanted.
func (t *table) setOffload() error {
	if !t.offloads {
		return nil
	}
	if len(t.Chains[chainOffload]) == 0 {
		t.NewFlowtable(flowtable, nil)
	}
	return t.SetChain(t.offload())
}

// flows is what the plane needs to keep flowtables.
type flows struct {
	network namespace.Namespace
	changes *os.File // of devices
	routes  *netlink.Handle
	devices []device // of the flowtables
}

type device struct {
	name   string
	number int
}

// watchDevices is for the network namespace of the calling thread.
func watchDevices() (f *flows, err error) {
	const buffer = 1 << 16
	f = &flows{}
	if f.network, err = namespace.Here(); err != nil {
		return nil, err
	}
	if f.changes, err = nfnetlink.Subscribe(unix.NETLINK_ROUTE, 0, buffer, unix.RTNLGRP_LINK); err == nil {
		f.routes, err = netlink.NewHandle(unix.NETLINK_ROUTE)
	}
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

// changed reports whether the kernel has told of devices since it was called last.
func (f *flows) changed() (heard bool) {
	var b [1]byte // of each message; the rest goes with it
	for {
		_, _, err := unix.Recvfrom(int(f.changes.Fd()), b[:], unix.MSG_DONTWAIT)
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return heard
		}
		heard = true
	}
}

// list returns the devices whose packets the node forwards. Those of a bridge or a bond forward by it: what filters
// between them sees all packets.
func (f *flows) list() (devices []device, err error) {
	links, err := f.routes.LinkList()
	for _, l := range links {
		if a := l.Attrs(); a.Flags&net.FlagLoopback == 0 && a.MasterIndex == 0 {
			devices = append(devices, device{a.Name, a.Index})
		}
	}
	return devices, err
}

func (f *flows) close() (err error) {
	if f == nil {
		return nil
	}
	if f.routes != nil {
		f.routes.Close()
	}
	if f.changes != nil {
		err = f.changes.Close()
	}
	return errors.Join(err, f.network.Close())
}

// renew puts empty flowtables in the place of those that are not right any more: backends have left, rows are hooked,
// or devices have come or gone. A connection cannot be taken out alone. Those that go on come back with their next
// packets. A flow of UDP leaves before, when connection tracking forgets it.
func (p *Plane) renew() error {
	if p.flows == nil || p.tables == nil || !p.tables[0].offloads {
		return nil
	}
	p.stale = p.stale || slices.ContainsFunc(p.tables, func(t *table) bool { return t.left })
	changed := p.flows.changed()
	if !p.stale && !changed {
		return nil
	}
	devices, err := p.flows.list()
	if err != nil {
		p.stale = true
		return fmt.Errorf("%w: devices of flowtables: %w", dataplane.ErrPartial, err)
	}
	if !p.stale && slices.Equal(devices, p.flows.devices) {
		return nil
	}
	p.stale = true
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.name
	}
	tx := &nft.Transaction{}
	for _, t := range p.tables {
		t.Tx, t.left = tx, false
		if err := t.RenewFlowtable(flowtable, names, t.offload()); err != nil {
			return err
		}
	}
	switch err := p.ruleset.Send(tx, tx.Steps); {
	case errors.Is(err, unix.ENOENT): // a device has gone meanwhile, or an audit finds what else has
		return nil
	case err != nil:
		return fmt.Errorf("%w: flowtables: %w", dataplane.ErrPartial, err)
	}
	p.stale, p.flows.devices = false, devices
	return nil
}

// wantsFlowtable reports whether open connections are to go past the hooks, as far as the ruleset decides that.
func (p *Plane) wantsFlowtable() (bool, error) {
	if p.flows == nil || p.config.Flowtable == dataplane.FlowtableAlways {
		return p.flows != nil, nil
	}
	filtered, err := p.filtered()
	return !filtered, err
}

// filtered reports whether another program looks at packets of open connections that the node forwards.
func (p *Plane) filtered() (found bool, err error) {
	err = p.flows.network.Do(func() error {
		for _, name := range []string{"ip_tables_names", "ip6_tables_names"} { // of iptables legacy
			names, err := os.ReadFile("/proc/thread-self/net/" + name)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			found = found || slices.ContainsFunc(strings.Fields(string(names)), func(n string) bool { return n != "nat" })
		}
		return nil
	})
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		if found || err != nil {
			return found, err
		}
		err = p.ruleset.Dump(nfnetlink.Request{
			Kind: nfnetlink.NFTables | unix.NFT_MSG_GETCHAIN, Family: family, Reset: func() { found = false },
			Each: func(attrs []byte) { found = found || filters(attrs) },
		})
	}
	return found, err
}

// filters reports whether a chain that the kernel lists is another program's, and sees those packets.
func filters(attrs []byte) bool {
	const accept = 1
	hook := nfnetlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK)
	passed := []uint32{unix.NF_INET_PRE_ROUTING, unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}
	return hook != nil && slices.Contains(passed, nfnetlink.Uint32(hook, unix.NFTA_HOOK_HOOKNUM)) &&
		nfnetlink.Text(attrs, unix.NFTA_CHAIN_TYPE) != "nat" &&
		!strings.HasPrefix(nfnetlink.Text(attrs, unix.NFTA_CHAIN_TABLE), tableName) &&
		(nfnetlink.Uint32(attrs, unix.NFTA_CHAIN_USE) > 0 || nfnetlink.Uint32(attrs, unix.NFTA_CHAIN_POLICY) != accept)
}
