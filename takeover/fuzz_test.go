package takeover

import (
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/xt"
	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzTable reads arbitrary bytes as a table of x_tables: no panic, bounded memory, and nothing of kube-proxy's is left
// without its chains.
func FuzzTable(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		f.Add(servicesTable(v6), v6)
	}
	f.Fuzz(func(t *testing.T, raw []byte, v6 bool) {
		allocs.Bound(t, len(raw), func() { readTable(t, raw, v6) })
	})
}

// servicesTable has a chain KUBE-SERVICES, to which PREROUTING jumps.
func servicesTable(v6 bool) []byte {
	layout := xt.LayoutOf(v6)
	base := &xt.Rules{Layout: layout}
	base.Begin()
	base.Verdict(2*(len(base.B)+40) + 64) // to the first rule of KUBE-SERVICES
	base.Begin()
	base.Verdict(xt.Accept)
	services := xt.NewChain(layout, "KUBE-SERVICES")
	services.Begin()
	services.Verdict(xt.Return)
	return slices.Concat(base.B, services.B, xt.NewChain(layout, "ERROR").B)
}

func readTable(t *testing.T, raw []byte, v6 bool) {
	info := xt.Info{ValidHooks: 1, Size: uint32(len(raw))}
	table, err := xt.Parse(xt.LayoutOf(v6), info, append(make([]byte, xt.Header), raw...), nil)
	if err != nil {
		return
	}
	table.Name = "nat"
	_ = forwardOf(table)
	p := planOf(table, false)
	if err := table.Apply(p.change()); err != nil {
		t.Fatalf("the table without kube-proxy's chains: %v", err)
	}
	if rest := planOf(table, false); !rest.empty() {
		t.Errorf("kube-proxy's chains are left: %v", rest)
	}
}

// FuzzReplies reads arbitrary bytes as the kernel's answers about rules of nf_tables and members of ipsets, and as a line
// of IPVS's connections: no panic, and bounded memory.
func FuzzReplies(f *testing.F) {
	chain := nl.NewRtAttr(unix.NFTA_VERDICT_CHAIN, nl.ZeroTerminated("KUBE-SERVICES"))
	verdict := nl.NewRtAttr(unix.NFTA_DATA_VERDICT, chain.Serialize())
	data := nl.NewRtAttr(unix.NFTA_EXPR_DATA, join(nl.NewRtAttr(unix.NFTA_IMMEDIATE_DATA, verdict.Serialize())))
	expression := join(nl.NewRtAttr(unix.NFTA_EXPR_NAME, nl.ZeroTerminated("immediate")), data)
	f.Add(join(nl.NewRtAttr(unix.NFTA_LIST_ELEM, expression)))
	f.Add([]byte("TCP C0000209 C350 0A60000A 0050 0AF40102 1F90 ESTABLISHED     899"))
	f.Fuzz(func(t *testing.T, reply []byte) {
		allocs.Bound(t, len(reply), func() { readReply(t, reply) })
	})
}

func join(attributes ...*nl.RtAttr) (b []byte) {
	for _, a := range attributes {
		b = append(b, a.Serialize()...)
	}
	return b
}

func readReply(t *testing.T, reply []byte) {
	_, _ = nfnetlink.VerdictChain(reply), refusesAll(reply)
	_ = portsIn(reply)
	if x, ok := parseFlow(string(reply)); ok && !x.client.IsValid() {
		t.Errorf("the flow %v has no client", x)
	}
}
