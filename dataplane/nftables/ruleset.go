package nftables

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// From include/uapi/linux/netfilter/nf_tables.h; x/sys/unix lacks them.
const (
	acceptPolicy  = 1    // NF_ACCEPT
	dynsetDelete  = 2    // NFT_DYNSET_OP_DELETE
	setConcat     = 0x80 // NFT_SET_CONCAT: ranges of concatenations
	setDescConcat = 2    // NFTA_SET_DESC_CONCAT
	setFieldLen   = 1    // NFTA_SET_FIELD_LEN
)

// Ids of nft's data types (nftables, include/datatype.h): they tell "nft list" how to print.
const (
	typeIPv4        = 7
	typeIPv6        = 8
	typeInetProto   = 12
	typeInetService = 13
	typeMark        = 19
	typeClassID     = 23
	typeBits        = 6 // of each part of a concatenation
)

// A field is one part of a set's key or of a map's data. In the kernel each part is padded to words
// of four bytes.
type field struct{ kind, size uint32 }

func (f field) words() uint32 { return (f.size + 3) / 4 }

var (
	protocolField = field{typeInetProto, 1}
	portField     = field{typeInetService, 2}
	// The packet's priority carries the pool's number, so both have one type.
	priorityField = field{typeClassID, 4}
	indexField    = field{typeMark, 4}
)

// set is an nf_tables set or map.
type set struct {
	name    string
	id      uint32 // in the transaction that makes it
	flags   uint32
	key     []field
	data    []field // maps only; nil in a verdict map
	maximum uint32  // elements; 0: no limit
}

func size(fields []field) (bytes uint32) {
	for _, f := range fields {
		bytes += f.words() * 4
	}
	return bytes
}

func kind(fields []field) (id uint32) {
	for _, f := range fields {
		id = id<<typeBits | f.kind
	}
	return id
}

func (s *set) interval() bool { return s.flags&unix.NFT_SET_INTERVAL != 0 }

// family is what differs between the two tables.
type family struct {
	name        string // as nft prints it
	number      uint8
	address     field
	source      uint32 // offset of the address in the network header
	destination uint32
	unreachable []unreachable
}

// unreachable is the ICMP error that refuses a protocol; 0 is all other protocols.
type unreachable struct{ protocol, code uint8 }

var (
	ipv4 = family{"ip", unix.NFPROTO_IPV4, field{typeIPv4, 4}, 12, 16, []unreachable{
		// SCTP gives up at once for an unreachable protocol, but not for an unreachable port
		// (RFC 9260, section 10.2).
		{unix.IPPROTO_SCTP, 2}, {0, 3},
	}}
	ipv6 = family{"ip6", unix.NFPROTO_IPV6, field{typeIPv6, 16}, 8, 24, []unreachable{{0, 4}}}
)

// word is the n-th register of 32 bits. Longer values take several in a row.
func word(n uint32) uint32 { return unix.NFT_REG32_00 + n }

func (f family) load(offset, at uint32) expr.Any {
	return &expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: f.address.size, DestRegister: word(at)}
}

// destinationKey loads address, protocol and port of the destination: the key of the frontends.
func (f family) destinationKey() (exprs []expr.Any, next uint32) {
	n := f.address.words()
	return []expr.Any{
		f.load(f.destination, 0),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: word(n)},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: word(n + 1)},
	}, n + 2
}

func (f family) frontendKey() []field { return []field{f.address, protocolField, portField} }
func (f family) backendData() []field { return []field{f.address, portField} }

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

func (f family) sets() []*set {
	const hash, interval, concat = 0, unix.NFT_SET_INTERVAL, setConcat
	sourceKey := append(f.frontendKey(), f.address)
	slotKey, token := []field{priorityField, indexField}, []field{priorityField}
	sets := []*set{
		frontends:         {name: "frontends", flags: unix.NFT_SET_MAP, key: f.frontendKey(), data: token},
		internalFrontends: {name: "internal-frontends", flags: unix.NFT_SET_MAP, key: f.frontendKey(), data: token},
		slots:             {name: "slots", flags: unix.NFT_SET_MAP, key: slotKey, data: f.backendData()},
		choices:           {name: "choices", flags: unix.NFT_SET_MAP, key: slotKey, data: token},
		backends:          {name: "backends", flags: unix.NFT_SET_MAP, key: token, data: f.backendData()},
		classes:           {name: "classes", flags: unix.NFT_SET_MAP, key: token},
		affinity: {
			name: "affinity", flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL,
			key: []field{f.address, priorityField}, data: token, maximum: maxAffinity,
		},
		sources:         {name: "sources", flags: interval | concat, key: sourceKey},
		internalSources: {name: "internal-sources", flags: interval | concat, key: sourceKey},
		hairpin:         {name: "hairpin", flags: hash, key: []field{f.address, f.address}},
		pods:            {name: "pods", flags: interval, key: []field{f.address}},
		rejectAddresses: {name: "reject-addresses", flags: hash, key: []field{f.address}},
		dropAddresses:   {name: "drop-addresses", flags: hash, key: []field{f.address}},
		rejectRanges:    {name: "reject-ranges", flags: interval, key: []field{f.address}},
		dropRanges:      {name: "drop-ranges", flags: interval, key: []field{f.address}},
	}
	for i, s := range sets {
		s.id = uint32(i + 1)
	}
	return sets
}

// A token is what the frontends map holds for a destination: its class in the upper bits, the
// number of its pool in the lower ones. The packet's priority carries it to the class's chain.
type token uint32

const (
	poolBits  = 20
	poolMask  = 1<<poolBits - 1
	maxClass  = 1<<(31-poolBits) - 1 // the highest bit tells tokens from handles
	maxNumber = poolMask
)

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

func newToken(class, pool uint32) token { return token(class<<poolBits | pool) }
func (t token) class() uint32           { return uint32(t) >> poolBits }
func (t token) pool() uint32            { return uint32(t) & poolMask }

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

// chain is an nf_tables chain with its rules.
type chain struct {
	name  string
	hook  *hook // base chains only
	rules []rule
}

type hook struct {
	kind     string
	number   uint32
	priority int32
}

// rule is an nf_tables rule; the comment is what "nft list" shows behind it.
type rule struct {
	comment string
	exprs   []expr.Any
}

// mark is a hash of the rule. It is kept in the rule's user data, where nft does not look, and tells
// whether a rule found in the kernel is the one we want.
func (r rule) mark(f family) (body, mark []byte, err error) {
	hash := fnv.New64a()
	for _, x := range r.exprs {
		b, err := expr.Marshal(f.number, x)
		if err != nil {
			return nil, nil, fmt.Errorf("encode rule %q: %w", r.comment, err)
		}
		e := nfnetlink.Encoder{B: body}
		e.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
		body = e.B
	}
	hash.Write(body)
	hash.Write([]byte(r.comment))
	return body, hash.Sum(nil), nil
}

func all(exprs ...expr.Any) []expr.Any { return exprs }

func jump(c string) expr.Any  { return &expr.Verdict{Kind: expr.VerdictJump, Chain: c} }
func goTo(c string) expr.Any  { return &expr.Verdict{Kind: expr.VerdictGoto, Chain: c} }
func back() expr.Any          { return &expr.Verdict{Kind: expr.VerdictReturn} }
func drop() expr.Any          { return &expr.Verdict{Kind: expr.VerdictDrop} }
func in(s string) expr.Any    { return &expr.Lookup{SourceRegister: word(0), SetName: s} }
func notIn(s string) expr.Any { return &expr.Lookup{SourceRegister: word(0), SetName: s, Invert: true} }

// find looks up the key that starts at word 0 and puts the map's data there.
func find(s string) expr.Any {
	return &expr.Lookup{SourceRegister: word(0), DestRegister: word(0), IsDestRegSet: true, SetName: s}
}

func equals(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: word(0), Data: data} }
func differs(data []byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpNeq, Register: word(0), Data: data}
}

// bits makes word 0 what it is, and mask, exclusive or xor.
func bits(mask, xor uint32) expr.Any { return maskBytes(native(mask), native(xor)) }

func maskBytes(mask, xor []byte) expr.Any {
	return &expr.Bitwise{SourceRegister: word(0), DestRegister: word(0), Len: 4, Mask: mask, Xor: xor}
}

func loadMeta(k expr.MetaKey, at uint32) expr.Any { return &expr.Meta{Key: k, Register: word(at)} }
func storeMeta(k expr.MetaKey) expr.Any {
	return &expr.Meta{Key: k, Register: word(0), SourceRegister: true}
}

// The priorities of base chains: those of nft's dstnat and srcnat, the first one later by one. The kernel
// asks no further chain about a connection that one has translated, so that kube-proxy, whose chains have
// -100, goes first as long as its rules are there. So when it comes back and Fairlead is gone,
// changes of Services that have endpoints are followed, whatever Fairlead has left in the kernel. Where
// kube-proxy has no rule, as for a Service that was deleted or (but in its mode nftables) has no endpoints
// any more, what was left, and nobody brings up to date, still answers, until fairlead clean has run.
const (
	translation  = -99
	masquerading = 100
)

// The names of the constant chains.
const (
	chainServices       = "services"
	chainInternal       = "internal"
	chainReject         = "refuse"
	chainMark           = "mark"
	chainMarkOffCluster = "mark-off-cluster"
)

// constantChains are the chains that do not depend on the rows, but for Pods.Interfaces.
func (t *table) constantChains() []chain {
	f := t.family
	return []chain{
		t.rejectChain(),
		{name: chainMark, rules: []rule{{"", t.setMark()}}},
		{name: chainMarkOffCluster, rules: append(t.fromPods("pods keep their address", back()), rule{"", t.setMark()})},
		{name: chainServices, rules: append([]rule{t.dispatch(frontends)},
			rule{"guards: addresses", all(f.load(f.destination, 0), in("drop-addresses"), drop())},
			rule{"", all(f.load(f.destination, 0), in("reject-addresses"), goTo(chainReject))},
			rule{"guards: ranges", all(f.load(f.destination, 0), in("drop-ranges"), drop())},
			rule{"", all(f.load(f.destination, 0), in("reject-ranges"), goTo(chainReject))},
		)},
		{name: chainInternal, rules: append(t.dispatchInternal(), rule{"", all(goTo(chainServices))})},
		{
			name: "prerouting", hook: &hook{"nat", unix.NF_INET_PRE_ROUTING, translation},
			rules: slices.Concat(t.spoofed(), t.fromPods("pods", goTo(chainInternal)), []rule{{"", all(goTo(chainServices))}}),
		},
		{
			name: "output", hook: &hook{"nat", unix.NF_INET_LOCAL_OUT, translation},
			rules: []rule{{"this node", all(goTo(chainInternal))}},
		},
		{
			name: "postrouting", hook: &hook{"nat", unix.NF_INET_POST_ROUTING, masquerading},
			rules: []rule{t.masquerade(), t.masqueradeHairpin()},
		},
	}
}

// spoofed drops what comes from elsewhere for or from 127.0.0.0/8, as the kernel does unless route_localnet
// is set. (IPv6 has no such switch.)
func (t *table) spoofed() []rule {
	if t.v6() {
		return nil
	}
	loopback := binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_LOOPBACK)
	var rules []rule
	for _, address := range []uint32{t.family.destination, t.family.source} {
		rules = append(rules, rule{"not from elsewhere", all(
			t.family.load(address, 0), maskBytes([]byte{255, 0, 0, 0}, native(0)), equals([]byte{127, 0, 0, 0}),
			loadMeta(expr.MetaKeyIIFTYPE, 0), differs(loopback),
			drop())})
	}
	return rules
}

// dispatch finds the token of the destination and goes to the chain of its class. The token travels
// in the packet's priority because nft cannot print a rule that uses what one map says as the key of
// the next. Only the first packet of a connection comes here; translate resets its priority.
func (t *table) dispatch(m int) rule {
	exprs, _ := t.family.destinationKey()
	return rule{"token, then class", append(exprs,
		find(t.sets[m].name), storeMeta(expr.MetaKeyPRIORITY),
		loadMeta(expr.MetaKeyPRIORITY, 0), bits(^uint32(poolMask), 0),
		&expr.Lookup{SourceRegister: word(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: "classes"})}
}

// dispatchInternal spares packets a look into a map that is empty on most nodes.
func (t *table) dispatchInternal() []rule {
	if t.internals == 0 {
		return nil
	}
	return []rule{t.dispatch(internalFrontends)}
}

// fromPods are the rules that send packets of pods to a verdict.
func (t *table) fromPods(comment string, verdict expr.Any) []rule {
	rules := []rule{{comment, all(t.family.load(t.family.source, 0), in("pods"), verdict)}}
	for _, name := range t.podInterfaces {
		rules = append(rules, rule{comment, all(
			loadMeta(expr.MetaKeyIIFNAME, 0), equals(interfacePattern(name)), verdict)})
	}
	return rules
}

// interfacePattern is the name as the kernel compares it: whole, or the bytes before a final *.
func interfacePattern(name string) []byte {
	if prefix, wild := strings.CutSuffix(name, "*"); wild {
		return []byte(prefix)
	}
	return append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
}

// setMark is in the constant chains only: classes that nobody uses at the moment stay in the kernel, and
// must not keep the mark of a former configuration.
func (t *table) setMark() []expr.Any {
	return all(loadMeta(expr.MetaKeyMARK, 0), bits(^t.mark, t.mark), storeMeta(expr.MetaKeyMARK))
}

func (t *table) masquerade() rule {
	return rule{"replace the source address, clear the mark", all(
		loadMeta(expr.MetaKeyMARK, 0), bits(t.mark, 0), equals(native(t.mark)),
		loadMeta(expr.MetaKeyMARK, 0), bits(^uint32(0), t.mark), storeMeta(expr.MetaKeyMARK),
		&expr.Masq{FullyRandom: true})}
}

func (t *table) masqueradeHairpin() rule {
	f := t.family
	const destinationTranslated = 1 << 5 // IPS_DST_NAT
	return rule{"backends that reach themselves", all(
		&expr.Ct{Key: expr.CtKeySTATUS, Register: word(0)}, bits(destinationTranslated, 0),
		differs(native(0)),
		f.load(f.source, 0), f.load(f.destination, f.address.words()), in("hairpin"),
		&expr.Masq{FullyRandom: true})}
}

func (t *table) rejectChain() chain {
	protocol := loadMeta(expr.MetaKeyL4PROTO, 0)
	c := chain{name: chainReject, rules: []rule{{"", all(
		protocol, equals([]byte{unix.IPPROTO_TCP}), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST})}}}
	for _, u := range t.family.unreachable {
		var exprs []expr.Any
		if u.protocol != 0 {
			exprs = all(protocol, equals([]byte{u.protocol}))
		}
		c.rules = append(c.rules, rule{"", append(exprs, &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: u.code})})
	}
	return c
}

// classChain is the chain of a class: who may come in, whose source is replaced, where it goes.
func (t *table) classChain(c class) chain {
	result := chain{name: c.chain()}
	add := func(comment string, exprs ...expr.Any) {
		result.rules = append(result.rules, rule{comment, exprs})
	}
	if c.limited {
		name := t.sets[sources+int(c.scope)].name
		key, next := t.family.destinationKey()
		add("allowed sources", append(key, t.family.load(t.family.source, next), notIn(name), drop())...)
	}
	switch c.verdict {
	case model.Drop:
		add("", drop())
		return result
	case model.Reject:
		add("", goTo(chainReject))
		return result
	}
	switch c.snat {
	case model.OffCluster:
		add("", jump(chainMarkOffCluster))
	case model.Always:
		add("", jump(chainMark))
	}
	if c.affinity == 0 {
		add("", t.translate(choose(c.slots, "slots"))...)
		// Each look-up sees the ruleset as it is at that moment, the chain as it was when the packet
		// came. A slot that is gone meanwhile must not let the packet pass untranslated.
		add("the slot is gone", t.translate(choose(1, "slots"))...)
		add("", drop())
		return result
	}
	result.rules = append(result.rules, t.affinityRules(c)...)
	add("", drop())
	return result
}

// choose puts what a map holds for the token's pool and a random one of n slots at word 0.
func choose(n int, from string) []expr.Any {
	return all(loadMeta(expr.MetaKeyPRIORITY, 0), bits(poolMask, 0),
		&expr.Numgen{Register: word(1), Modulus: uint32(n), Type: unix.NFT_NG_RANDOM}, find(from))
}

// translate sends the connection to the backend that exprs put at word 0, and gives the packet the
// priority back that packets have by default.
func (t *table) translate(exprs []expr.Any) []expr.Any {
	scratch := word(t.family.address.words() + 1)
	return append(exprs,
		&expr.Immediate{Register: scratch, Data: native(0)},
		&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: scratch, SourceRegister: true},
		&expr.NAT{
			Type: expr.NATTypeDestNAT, Family: uint32(t.family.number),
			RegAddrMin: word(0), RegProtoMin: word(t.family.address.words()), Specified: true,
		})
}

// affinityRules choose a backend and remember it for the client, unless one is remembered, whose time
// begins anew (nft_rhash_update in the kernel's net/netfilter/nft_set_hash.c keeps the data of what it
// finds), and go to the remembered one. If the memory is full, that is the one just chosen.
//
// A backend is named by a handle, of which the upper half names its pool: the packet's priority holds
// both the client's key and the choice.
func (t *table) affinityRules(c class) []rule {
	f, n := t.family, t.family.address.words()
	client := all(f.load(f.source, 0), loadMeta(expr.MetaKeyPRIORITY, n),
		&expr.Bitwise{SourceRegister: word(n), DestRegister: word(n), Len: 4, Mask: native(stickyMask), Xor: native(0)})
	update := &expr.Dynset{
		SrcRegKey: word(0), SrcRegData: word(n + 1), SetName: "affinity",
		Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: c.affinity,
	}
	return []rule{
		{"choose", append(choose(c.slots, "choices"), storeMeta(expr.MetaKeyPRIORITY))},
		{"the slot is gone", all(loadMeta(expr.MetaKeyPRIORITY, 0), bits(handleBit, 0), equals(native(0)), drop())},
		{"remember", append(slices.Clone(client), loadMeta(expr.MetaKeyPRIORITY, n+1), update)},
		{"recall", append(slices.Clone(client), find("affinity"), storeMeta(expr.MetaKeyPRIORITY))},
		{"", t.translate(all(loadMeta(expr.MetaKeyPRIORITY, 0), find("backends")))},
		// Normally forget has been here before. The client's next attempt gets another backend.
		{"the backend is gone", append(slices.Clone(client), loadMeta(expr.MetaKeyPRIORITY, n+1), &expr.Dynset{
			SrcRegKey: word(0), SrcRegData: word(n + 1), SetName: "affinity", Operation: dynsetDelete,
		})},
	}
}
