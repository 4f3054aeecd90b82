package userspace

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
)

// The priorities around IPVS, which looks at packets at 98 and 99 in LOCAL_IN, at -99 and -98 in LOCAL_OUT (ip_vs_ops4
// in the kernel's net/netfilter/ipvs/ip_vs_core.c): first for answers of its backends, which may have the ports of
// answers to the process, then for virtual servers. In LOCAL_OUT that is just after addresses are translated (-100).
const (
	beforeIPVSIn  = 97
	afterIPVSIn   = 100
	beforeIPVSOut = -99
	afterIPVSOut  = -97
)

// pastIPVS are the chains that have packets that the process takes pass IPVS by. There may be a virtual server of the
// same address. It belongs to a data plane that comes, or that goes as soon as its connections have ended. IPVS passes
// none by, whatever its mark is. So for the short way past it the destination is an address without a virtual server.
// The kernel checks no checksum there.
//
//	hide ─ IPVS: no virtual server ─ show
func (t *table) pastIPVS() []nft.Chain {
	if t.redirectAll { // to an address that no virtual server has
		return nil
	}
	at := func(name string, hook uint32, priority int32) nft.Chain {
		return nft.FilterChain(name, hook, priority, t.invert())
	}
	return []nft.Chain{
		at("hide-from-ipvs-in", unix.NF_INET_LOCAL_IN, beforeIPVSIn),
		at("show-in", unix.NF_INET_LOCAL_IN, afterIPVSIn),
		at("hide-from-ipvs-out", unix.NF_INET_LOCAL_OUT, beforeIPVSOut),
		at("show-out", unix.NF_INET_LOCAL_OUT, afterIPVSOut),
	}
}

// invert turns round the first bits of the destination of what the process takes; twice, and they are as they were.
func (t *table) invert() nft.Rule {
	const all = 0xffffffff
	address := expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: t.Family.Destination, Len: 4}
	read, write := address, address
	read.DestRegister = nft.Word(0)
	write.OperationType, write.SourceRegister = expr.PayloadWrite, nft.Word(0)
	return nft.NewRule("past IPVS",
		nft.LoadMeta(expr.MetaKeyMARK, 0), nft.Bits(0, t.Mark, 0), nft.Differs(nft.Native(0)),
		&read, nft.Bits(0, all, all), &write)
}

// ofIPVS leaves alone the connections that IPVS goes on with. To connection tracking their destination is not
// translated, but it awaits answers from a backend, which no row is.
func (t *table) ofIPVS() nft.Rule {
	n := t.Family.Address.Words()
	return nft.NewRule("translated by IPVS",
		nft.Tuple{Key: t.Family.CtSource, Register: nft.Word(0), Reply: true}, nft.LoadMeta(expr.MetaKeyL4PROTO, n),
		nft.Tuple{Key: expr.CtKeyPROTOSRC, Register: nft.Word(n + 1), Reply: true},
		nft.NotIn(t.Sets[frontends].Name), nft.NotIn(t.Sets[internalFrontends].Name), nft.Accept())
}
