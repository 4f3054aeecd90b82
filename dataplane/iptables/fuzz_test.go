package iptables

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nfnetlink/nfnetlinktest"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/xtables"
)

var fuzzedChange = change{
	set: map[string][]rule{
		chainIn: {
			{protocol: model.TCP, ports: ports{80, 80}, comment: "default/web:http", do: goes("KUBE-PODS-AAAA")},
			{do: target{verb: back}},
		},
		"KUBE-PODS-AAAA": {{do: target{verb: dnat, to: netip.MustParseAddrPort("10.244.1.2:8080")}, protocol: model.TCP}},
	},
	known: map[string]bool{},
	add:   []baseRule{{"PREROUTING", rule{do: jumpTo(chainIn)}}},
}

// FuzzBlob reads arbitrary bytes as a table of x_tables: no panic, bounded memory, and after the plane has put its
// chains into it the table is one that the plane reads again.
func FuzzBlob(f *testing.F) {
	empty := emptyTable(f, false)
	full, err := empty.after(&fuzzedChange, nil)
	if err != nil {
		f.Fatal(err)
	}
	for _, b := range []*blob{empty, full} {
		f.Add(b.ValidHooks, offsets(b.Hooks), b.raw[xtables.Header:])
	}
	f.Fuzz(func(t *testing.T, valid uint32, hooks, entries []byte) {
		info := xtables.Info{ValidHooks: valid, Size: uint32(len(entries))}
		for h := 0; h < xtables.NumHooks && len(hooks) >= 4*(h+1); h++ {
			info.Hooks[h] = binary.NativeEndian.Uint32(hooks[4*h:])
		}
		allocs.Bound(t, len(entries), func() { changeBlob(t, info, entries) })
	})
}

func offsets(hooks [xtables.NumHooks]uint32) (b []byte) {
	for _, h := range hooks {
		b = binary.NativeEndian.AppendUint32(b, h)
	}
	return b
}

func changeBlob(t *testing.T, info xtables.Info, entries []byte) {
	raw := append(make([]byte, xtables.Header), entries...)
	b, err := parseBlob(tableID{name: "nat"}, info, raw)
	if err != nil {
		return
	}
	_ = b.content()
	if !b.sameUpTo(len(entries), entries) {
		t.Error("a table is not the same as itself")
	}
	c := fuzzedChange
	for _, s := range b.segments { // to go, as all that the plane does not want
		if _, wanted := c.set[s.name]; s.owned && !wanted {
			c.gone = append(c.gone, s.name)
		}
	}
	next, err := b.after(&c, nil)
	if err != nil {
		return
	}
	if _, err := parseBlob(b.id, next.Info, next.raw); err != nil {
		t.Errorf("the plane does not read what it has made: %v", err)
	}
}

// FuzzRules lists arbitrary messages to the plane as a table of iptables-nft: no panic, and bounded memory.
func FuzzRules(f *testing.F) {
	kernel := nfnetlinktest.New(f, nil)
	n := &nft{conn: kernel.Socket, fault: func(string) error { return nil }}
	c := fuzzedChange
	c.table = tableID{name: "nat"}
	if err := n.write([]*change{&c}); err != nil {
		f.Fatal(err)
	}
	have, err := list(nfnetlinktest.New(f, kernel.Sent()).Socket, c.table)
	if err != nil || len(have.chains) != len(c.set) {
		f.Errorf("of its own chains the plane reads %v %v", have, err)
	}
	f.Add(kernel.Sent())
	f.Fuzz(func(t *testing.T, messages []byte) {
		allocs.Bound(t, len(messages), func() {
			n := &nft{conn: nfnetlinktest.New(t, messages).Socket, fault: func(string) error { return nil }}
			if _, err := list(n.conn, c.table); err != nil {
				t.Error(err)
			}
			if err := n.tidy(c.table); err != nil {
				t.Error(err)
			}
		})
	})
}

// FuzzSets lists arbitrary messages to the plane as ipsets: no panic, and bounded memory.
func FuzzSets(f *testing.F) {
	f.Add(ipset("10.244.1.9"))
	f.Add(ipset("fd00::9"))
	f.Fuzz(func(t *testing.T, messages []byte) {
		allocs.Bound(t, len(messages), func() {
			s := &ipsets{conn: nfnetlinktest.New(t, messages).Socket}
			if _, err := s.list(); err != nil {
				t.Error(err)
			}
			if err := s.clients("KUBE-CLIENTS-A", func(netip.Addr, time.Duration) {}); err != nil {
				t.Error(err)
			}
		})
	})
}

// ipset is one with a client as the kernel lists it.
func ipset(client string) []byte {
	var e nfnetlink.Encoder
	m := e.Message(unix.NFNL_SUBSYS_IPSET<<8|nl.IPSET_CMD_LIST, 0, unix.AF_INET)
	e.Text(nl.IPSET_ATTR_SETNAME, "KUBE-CLIENTS-A")
	list := e.Open(nl.IPSET_ATTR_ADT)
	entry := e.Open(nl.IPSET_ATTR_DATA)
	ip := e.Open(nl.IPSET_ATTR_IP)
	e.Bytes(nl.IPSET_ATTR_IPADDR_IPV4, netip.MustParseAddr(client).AsSlice())
	e.Close(ip)
	e.Uint32(nl.IPSET_ATTR_TIMEOUT|unix.NLA_F_NET_BYTEORDER, 60)
	e.Close(entry)
	e.Close(list)
	e.Finish(m)
	return e.B
}
