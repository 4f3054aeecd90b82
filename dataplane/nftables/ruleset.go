package nftables

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// The sets and maps of a table, by index.
const (
	frontends = iota
	internalFrontends
	slots
	choices
	backends
	classes
	affinity
	sources
	internalSources
	hairpin
	pods
	rejectAddresses
	dropAddresses
	rejectRanges
	dropRanges
	numSets
)

// maxAffinity bounds the clients whose backend is remembered, and so the kernel's memory (some
// 120 bytes for each). Beyond it new clients are balanced without being remembered.
const maxAffinity = 1 << 20

func sets(f nf.Family) []*nf.Set {
	const hash, interval = 0, unix.NFT_SET_INTERVAL
	sourceKey := append(f.FrontendKey(), f.Address)
	slotKey, token := []nf.Field{nf.Priority, nf.Index}, []nf.Field{nf.Priority}
	address, backend := []nf.Field{f.Address}, []nf.Field{f.Address, nf.Port}
	return []*nf.Set{
		frontends:         {Name: "frontends", Flags: unix.NFT_SET_MAP, Key: f.FrontendKey(), Data: token},
		internalFrontends: {Name: "internal-frontends", Flags: unix.NFT_SET_MAP, Key: f.FrontendKey(), Data: token},
		slots:             {Name: "slots", Flags: unix.NFT_SET_MAP, Key: slotKey, Data: backend},
		choices:           {Name: "choices", Flags: unix.NFT_SET_MAP, Key: slotKey, Data: token},
		backends:          {Name: "backends", Flags: unix.NFT_SET_MAP, Key: token, Data: backend},
		classes:           {Name: "classes", Flags: unix.NFT_SET_MAP, Key: token},
		affinity: {
			Name: "affinity", Flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL,
			Key: []nf.Field{f.Address, nf.Priority}, Data: token, Maximum: maxAffinity,
		},
		sources:         {Name: "sources", Flags: interval, Key: sourceKey},
		internalSources: {Name: "internal-sources", Flags: interval, Key: sourceKey},
		hairpin:         {Name: "hairpin", Flags: hash, Key: []nf.Field{f.Address, f.Address}},
		pods:            {Name: "pods", Flags: interval, Key: address},
		rejectAddresses: {Name: "reject-addresses", Flags: hash, Key: address},
		dropAddresses:   {Name: "drop-addresses", Flags: hash, Key: address},
		rejectRanges:    {Name: "reject-ranges", Flags: interval, Key: address},
		dropRanges:      {Name: "drop-ranges", Flags: interval, Key: address},
	}
}

// A handle names a backend of a pool with affinity: the pool's sticky number in the upper half, the
// backend's index in it in the lower one.
type handle uint32

const (
	stickyBits = 16
	stickyMask = 0xffffffff << stickyBits & 0xffffffff
	handleBit  = 1 << 31 // set in handles and clear in tokens
	minSticky  = handleBit >> stickyBits
	maxSticky  = 1<<(32-stickyBits) - 1
	maxIndex   = 1<<stickyBits - 1
)

func newHandle(sticky, index uint32) handle { return handle(sticky<<stickyBits | index) }
func (h handle) sticky() uint32             { return uint32(h) >> stickyBits }
func (h handle) index() uint32              { return uint32(h) & maxIndex }

// A class is a way of treating packets that many frontends share; each has one chain.
type class struct {
	verdict  model.Verdict
	slots    int // Forward: how many the pool has
	snat     model.SNAT
	affinity time.Duration
	limited  bool        // to the sources in the sources set …
	scope    model.Scope // … of this scope
}

// chain is the name of the class's chain; it says all of the class.
func (c class) chain() string {
	words := []string{c.verdict.String()}
	switch {
	case c.verdict != model.Forward && !c.limited:
		words = append(words, "all") // a chain named reject or drop cannot be listed by itself
	case c.verdict == model.Forward:
		words = append(words, fmt.Sprint(c.slots), "snat", c.snat.String())
	}
	if c.affinity > 0 {
		words = append(words, "affinity", fmt.Sprintf("%ds", int(c.affinity.Seconds())))
	}
	if c.limited {
		words = append(words, "sources", c.scope.String())
	}
	return strings.Join(words, "-")
}

// constantChains are the chains that do not depend on the rows, but for Pods.Interfaces.
func (t *table) constantChains() []nf.Chain {
	const nat = "nat"
	return append(t.Decisions(t.dispatchInternal()),
		nf.Chain{
			Name: "prerouting", Hook: &nf.Hook{Kind: nat, Number: unix.NF_INET_PRE_ROUTING, Priority: nf.Translation},
			Rules: slices.Concat(t.spoofed(), t.FromPods("pods", nf.GoTo(nf.ChainInternal)),
				[]nf.Rule{nf.NewRule("", nf.GoTo(nf.ChainServices))}),
		},
		nf.Chain{
			Name: "output", Hook: &nf.Hook{Kind: nat, Number: unix.NF_INET_LOCAL_OUT, Priority: nf.Translation},
			Rules: []nf.Rule{nf.NewRule("this node", nf.GoTo(nf.ChainInternal))},
		},
		nf.Chain{
			Name: "postrouting", Hook: &nf.Hook{Kind: nat, Number: unix.NF_INET_POST_ROUTING, Priority: nf.Masquerading},
			Rules: []nf.Rule{t.Masquerade(), t.masqueradeHairpin()},
		},
	)
}

// spoofed drops what comes from elsewhere for or from 127.0.0.0/8, as the kernel does unless route_localnet
// is set. (IPv6 has no such switch.)
func (t *table) spoofed() (rules []nf.Rule) {
	if t.Family.V6() {
		return nil
	}
	loopback := binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_LOOPBACK)
	first := &expr.Bitwise{
		SourceRegister: nf.Word(0), DestRegister: nf.Word(0), Len: 4, Mask: []byte{255, 0, 0, 0}, Xor: nf.Native(0),
	}
	for _, address := range []uint32{t.Family.Destination, t.Family.Source} {
		rules = append(rules, nf.NewRule("not from elsewhere",
			t.Family.Load(address, 0), first, nf.Equals([]byte{127, 0, 0, 0}),
			nf.LoadMeta(expr.MetaKeyIIFTYPE, 0), nf.Differs(loopback), nf.Drop()))
	}
	return rules
}

// dispatchInternal spares packets a look into a map that is empty on most nodes.
func (t *table) dispatchInternal() []nf.Rule {
	if t.internals == 0 {
		return nil
	}
	return []nf.Rule{t.Dispatch(t.Sets[internalFrontends].Name)}
}

func (t *table) masqueradeHairpin() nf.Rule {
	const destinationTranslated = 1 << 5 // IPS_DST_NAT
	return t.MasqueradeHairpin(&expr.Ct{Key: expr.CtKeySTATUS, Register: nf.Word(0)},
		nf.Bits(0, destinationTranslated, 0), nf.Differs(nf.Native(0)))
}

// classChain is the chain of a class: who may come in, whose source is replaced, where it goes.
func (t *table) classChain(c class) nf.Chain {
	var from string
	if c.limited {
		from = t.Sets[sources+int(c.scope)].Name
	}
	rules := t.Admission(c.verdict, c.snat, from)
	switch {
	case c.verdict != model.Forward:
		return nf.Chain{Name: c.chain(), Rules: rules}
	case c.affinity > 0:
		rules = append(rules, t.affinityRules(c)...)
	default:
		rules = append(rules, nf.NewRule("", t.translate(choose(c.slots, "slots"))...),
			// Each look-up sees the ruleset as it is at that moment, the chain as it was when the packet
			// came. A slot that is gone meanwhile must not let the packet pass untranslated.
			nf.NewRule("the slot is gone", t.translate(choose(1, "slots"))...))
	}
	return nf.Chain{Name: c.chain(), Rules: append(rules, nf.NewRule("", nf.Drop()))}
}

// choose puts what a map holds for the token's pool and a random one of n slots at word 0.
func choose(n int, from string) []any {
	return []any{
		nf.LoadMeta(expr.MetaKeyPRIORITY, 0), nf.Bits(0, nf.PoolMask, 0),
		&expr.Numgen{Register: nf.Word(1), Modulus: uint32(n), Type: unix.NFT_NG_RANDOM}, nf.Find(from, 0),
	}
}

// translate sends the connection to the backend that exprs put at word 0.
func (t *table) translate(exprs []any) []any {
	exprs = append(exprs, nf.ResetPriority(t.Family.Address.Words()+1)...)
	return append(exprs, t.Family.TranslateTo(0))
}

// affinityRules choose a backend and remember it for the client, unless one is remembered, whose time
// begins anew (nft_rhash_update in the kernel's net/netfilter/nft_set_hash.c keeps the data of what it
// finds), and go to the remembered one. If the memory is full, that is the one just chosen.
//
// A backend is named by a handle, of which the upper half names its pool: the packet's priority holds
// both the client's key and the choice.
func (t *table) affinityRules(c class) []nf.Rule {
	n := t.Family.Address.Words()
	load, store := nf.LoadMeta(expr.MetaKeyPRIORITY, 0), nf.StoreMeta(expr.MetaKeyPRIORITY, 0)
	client := func(rest ...any) []any {
		key := []any{
			t.Family.Load(t.Family.Source, 0), nf.LoadMeta(expr.MetaKeyPRIORITY, n), nf.Bits(n, stickyMask, 0),
		}
		return append(key, rest...)
	}
	choice := nf.LoadMeta(expr.MetaKeyPRIORITY, n+1)
	memory := func(operation uint32, timeout time.Duration) any {
		return &expr.Dynset{
			SrcRegKey: nf.Word(0), SrcRegData: nf.Word(n + 1), SetName: "affinity", Operation: operation, Timeout: timeout,
		}
	}
	recall := client(nf.Find("affinity", 0), store)
	if defect.Is(defect.NFTablesAffinity) {
		recall = recall[:len(recall)-1]
	}
	return []nf.Rule{
		nf.NewRule("choose", append(choose(c.slots, "choices"), store)...),
		nf.NewRule("the slot is gone", load, nf.Bits(0, handleBit, 0), nf.Equals(nf.Native(0)), nf.Drop()),
		nf.NewRule("remember", client(choice, memory(unix.NFT_DYNSET_OP_UPDATE, c.affinity))...),
		nf.NewRule("recall", recall...),
		nf.NewRule("", t.translate([]any{load, nf.Find("backends", 0)})...),
		// Normally forget has been here before. The client's next attempt gets another backend.
		nf.NewRule("the backend is gone", client(choice, memory(nf.DynsetDelete, 0))...),
	}
}
