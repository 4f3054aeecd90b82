package nftables

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// The sets and maps of a table, by their numbers, after those that all planes have.
const (
	frontends = nft.NumCommon + iota
	internalFrontends
	choices
	backends
	classes
	choosers
	memories
	hairpin
	served
	hooked
	slots // the first of table.shards
)

// sets are those of every table. For keys of 32 bits, and a size that is known, the kernel has a table that is faster
// (nft_hash_lookup_fast in its net/netfilter/nft_set_hash.c).
func sets(f nft.Family) []*nft.Set {
	number, backend := []nft.Field{nft.Priority}, []nft.Field{f.Address, nft.Port}
	all := append(f.CommonSets(),
		&nft.Set{Name: "frontends", Flags: unix.NFT_SET_MAP, Key: f.FrontendKey(), Data: number},
		&nft.Set{Name: "internal-frontends", Flags: unix.NFT_SET_MAP, Key: f.FrontendKey(), Data: number},
		&nft.Set{Name: "choices", Flags: unix.NFT_SET_MAP, Key: slotFields(), Data: number},
		&nft.Set{Name: "backends", Flags: unix.NFT_SET_MAP, Key: number, Data: backend},
		&nft.Set{Name: "classes", Flags: unix.NFT_SET_MAP, Key: number, Jump: true, Maximum: 2 << classBits},
		&nft.Set{Name: "choosers", Flags: unix.NFT_SET_MAP, Key: number, Jump: true, Maximum: leastShards << sizeBits},
		&nft.Set{Name: "memories", Flags: unix.NFT_SET_MAP, Key: number},
		f.Hairpins(),
		&nft.Set{Name: "served", Key: number},
		&nft.Set{Name: "hooked", Key: f.FrontendKey(), Shared: true},
	)
	for shard := range leastShards {
		all = append(all, shardSet(f, shard))
	}
	return all
}

// A handle names a backend of a pool with affinity: the number of the pool's names in the upper half, an index in the
// lower one.
type handle uint32

const (
	affinityBits = 16
	affinityMask = 0xffffffff << affinityBits & 0xffffffff
	handleBit    = 1 << 31                                              // set in handles and clear in tokens
	minAffinity  = handleBit>>affinityBits + 1<<(poolBits-affinityBits) // no handle is handleBit and some number of a pool
	maxAffinity  = 1<<(32-affinityBits) - 1
	maxIndex     = 1<<affinityBits - 1
)

func newHandle(affinity, index uint32) handle { return handle(affinity<<affinityBits | index) }
func (h handle) affinity() uint32             { return uint32(h) >> affinityBits }
func (h handle) index() uint32                { return uint32(h) & maxIndex }

// A class is what is done with packets before a backend is chosen, if one is. The classes are always there; a token has
// the number of one.
type class struct {
	verdict model.Verdict
	snat    model.SNAT
	limited bool        // to the sources in the sources set …
	scope   model.Scope // … of this scope
}

func allClasses() (all []class) {
	sources := []class{{}, {limited: true, scope: model.Any}, {limited: true, scope: model.Internal}}
	for _, s := range sources {
		for _, verdict := range []model.Verdict{model.Reject, model.Drop} {
			all = append(all, class{verdict, model.Never, s.limited, s.scope})
		}
		for _, snat := range []model.SNAT{model.Never, model.OffCluster, model.Always} {
			all = append(all, class{model.Forward, snat, s.limited, s.scope})
		}
	}
	return all
}

func classOf(key model.Key, f model.Frontend) class {
	c := class{verdict: f.Verdict, snat: f.SNAT}
	if f.Allow != nil {
		c.limited, c.scope = true, key.Scope
	}
	if f.Verdict != model.Forward {
		c.snat = model.Never
	}
	return c
}

// number is the class in tokens.
func (c class) number() uint32 {
	n := 1 + uint32(c.snat)
	if c.verdict != model.Forward {
		n = forwarding - uint32(model.Forward) + uint32(c.verdict)
	}
	if c.limited {
		n += kinds * (1 + uint32(c.scope))
	}
	return n
}

// The classes of each kind of source are kinds, of which the first ones forward.
const (
	kinds      = 5
	forwarding = 3
)

// id is the key of the class's chain.
func (c class) id() uint32 { return c.number() << poolBits }

// chain is the name of the class's chain; it says all of the class.
func (c class) chain() string {
	words := []string{c.verdict.String()}
	switch {
	case c.verdict == model.Forward:
		words = append(words, "snat", c.snat.String())
	case !c.limited:
		words = append(words, "all") // a chain named reject or drop cannot be listed by itself
	}
	if c.limited {
		words = append(words, "sources", c.scope.String())
	}
	return strings.Join(words, "-")
}

// Chains that are always there.
const (
	chainServe = "serve"
	chainKnown = "known"
)

// constantChains are the chains that do not depend on the rows, but for Pods.Interfaces.
func (t *table) constantChains() []nft.Chain {
	const nat = "nat"
	chains := append(t.Decisions(t.dispatchInternal()), t.serve()...)
	for _, c := range allClasses() {
		var from string
		if c.limited {
			from = t.Sets[nft.Sources+int(c.scope)].Name
		}
		chains = append(chains, nft.Chain{Name: c.chain(), Rules: t.Admission(c.verdict, c.snat, from)})
	}
	return append(chains,
		nft.Chain{
			Name: "prerouting", Hook: &nft.Hook{Kind: nat, Number: unix.NF_INET_PRE_ROUTING, Priority: nft.Translation},
			Rules: slices.Concat(t.spoofed(), t.FromPods("pods", nft.GoTo(nft.ChainInternal)),
				[]nft.Rule{nft.NewRule("", nft.GoTo(nft.ChainServices))}),
		},
		nft.Chain{
			Name: "output", Hook: &nft.Hook{Kind: nat, Number: unix.NF_INET_LOCAL_OUT, Priority: nft.Translation},
			Rules: []nft.Rule{nft.NewRule("this node", nft.GoTo(nft.ChainInternal))},
		},
		nft.Chain{
			Name: "postrouting", Hook: &nft.Hook{Kind: nat, Number: unix.NF_INET_POST_ROUTING, Priority: nft.Masquerading},
			Rules: []nft.Rule{t.Masquerade(), t.masqueradeHairpin()},
		},
	)
}

// spoofed drops what comes from elsewhere for or from 127.0.0.0/8, as the kernel does unless route_localnet
// is set. (IPv6 has no such switch.)
func (t *table) spoofed() (rules []nft.Rule) {
	if t.Family.V6() {
		return nil
	}
	loopback := binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_LOOPBACK)
	first := &expr.Bitwise{
		SourceRegister: nft.Word(0), DestRegister: nft.Word(0), Len: 4, Mask: []byte{255, 0, 0, 0}, Xor: nft.Native(0),
	}
	for _, address := range []uint32{t.Family.Destination, t.Family.Source} {
		rules = append(rules, nft.NewRule("not from elsewhere",
			t.Family.Load(address, 0), first, nft.Equals([]byte{127, 0, 0, 0}),
			nft.LoadMeta(expr.MetaKeyIIFTYPE, 0), nft.Differs(loopback), nft.Drop()))
	}
	return rules
}

// dispatchInternal spares packets a look into a map that is empty on most nodes.
func (t *table) dispatchInternal() []nft.Rule {
	if t.internals == 0 {
		return nil
	}
	return []nft.Rule{t.Dispatch(t.Sets[internalFrontends].Name)}
}

func (t *table) masqueradeHairpin() nft.Rule {
	const destinationTranslated = 1 << 5 // IPS_DST_NAT
	return t.MasqueradeHairpin(&expr.Ct{Key: expr.CtKeySTATUS, Register: nft.Word(0)},
		nft.Bits(0, destinationTranslated, 0), nft.Differs(nft.Native(0)))
}

// serve treats a packet whose destination is a frontend: it does what its class says, and chooses a slot of its pool.
// The packet is translated there, or comes back with the handle of a backend, for which a memory may know another one.
//
// One part comes after the other. When the kernel checks a change of rules, it walks all ways that a packet can take.
// So it walks as many as there are parts of each kind, and not all combinations.
func (t *table) serve() []nft.Chain {
	load := nft.LoadMeta(expr.MetaKeyPRIORITY, 0)
	known := nft.NewRule("", t.translate([]any{load, nft.Find("backends", 0)})...)
	return []nft.Chain{
		{Name: chainKnown, Rules: []nft.Rule{known}},
		{Name: chainServe, Rules: slices.Concat(
			[]nft.Rule{nft.NewRule("class", load, nft.Bits(0, classMask, 0), nft.Follow("classes"))},
			t.countPool(load),
			[]nft.Rule{
				nft.NewRule("choose", load, nft.Bits(0, sizeMask|uint32(t.shards-1), 0), nft.Follow("choosers")),
				nft.NewRule("affinity", load, nft.Bits(0, affinityMask, 0), nft.Follow("memories")),
				known,
				nft.NewRule("the chosen backend is gone", nft.Drop()),
			})},
	}
}

// countPool finds the counter of the packet's pool.
func (t *table) countPool(load any) []nft.Rule {
	if t.detail != dataplane.PerPool {
		return nil
	}
	return []nft.Rule{nft.NewRule("count", load, nft.Bits(0, poolMask, 0), nft.In(t.Sets[served].Name))}
}

// translate sends the connection to the backend that exprs put at word 0.
func (t *table) translate(exprs []any) []any {
	exprs = append(exprs, nft.ResetPriority(t.Family.Address.Words()+1)...)
	return append(exprs, t.Family.TranslateTo(0))
}
