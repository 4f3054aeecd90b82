package iptables

import (
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/lab/nfnetlinktest"
	"fairlead.dev/fairlead/model"
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

// FuzzRules lists arbitrary messages to the plane as a table of iptables-nft: no panic, and bounded memory.
func FuzzRules(f *testing.F) {
	kernel := nfnetlinktest.New(f, nil)
	n := &nfTables{Ruleset: nft.Over(kernel.Socket, func(string) error { return nil })}
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
			n := &nfTables{Ruleset: nft.Over(nfnetlinktest.New(t, messages).Socket, func(string) error { return nil })}
			if _, err := list(n.Socket, c.table); err != nil {
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
