package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// From include/uapi/linux/netfilter/nf_tables.h and nf_tables_compat.h; x/sys/unix lacks them.
const (
	attrTableUserData = 6
	attrChainUserData = 12
	compatProtocol    = 1
	compatFlags       = 2
	extensionName     = 1 // of NFTA_MATCH_* and NFTA_TARGET_*
	extensionRevision = 2
	extensionInfo     = 3
)

// chunkSize bounds one kernel transaction, and with it how long the ruleset's lock is held.
const chunkSize = 2 << 20

// nft is the back end nf_tables. Its rules are what iptables-nft makes: comparisons of addresses and
// protocols in nf_tables' own words, matches and targets as extensions of x_tables.
type nft struct {
	*conn
	fault func(string) error
	sets  setIndexes
	// clean is the generation of the ruleset when all was as it should be; own counts our transactions since.
	clean, own uint32
}

func openNFT(fault func(string) error) (*nft, error) {
	c, err := dial()
	if err != nil {
		return nil, err
	}
	return &nft{conn: c, fault: fault}, nil
}

func (n *nft) begin(context.Context) error { return nil }
func (n *nft) end()                        {}
func (n *nft) use(sets setIndexes)         { n.sets = sets }

func (n *nft) settled() (err error) {
	n.clean, err = n.generation()
	n.own = 0
	return err
}

func (n *nft) undisturbed([]tableID) (bool, error) {
	now, err := n.generation()
	return err == nil && n.clean != 0 && now == n.clean+n.own, err
}

func nftFamily(v6 bool) uint8 {
	if v6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// mark is a hash of what a rule says. It is kept in the rule's user data, which iptables does not look at,
// and with which nobody else changes a rule.
func (n *nft) mark(_ tableID, r *rule) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(r.String()))
	return h.Sum64()
}

// Types of the items in user data: nft's own for comments, and one that it skips.
const (
	userDataComment = 0
	userDataMark    = 0x46
)

func (n *nft) load(id tableID) (*content, error) {
	have := &content{}
	err := n.dump(request{kind: nftMessage | unix.NFT_MSG_GETCHAIN, family: nftFamily(id.v6), each: func(attrs []byte) {
		name := attributeString(attrs, unix.NFTA_CHAIN_NAME)
		if attributeString(attrs, unix.NFTA_CHAIN_TABLE) == id.name && owned(name) {
			have.chains[name] = nil
		}
	}}, func() { *have = content{chains: map[string][]uint64{}} })
	if err != nil {
		return nil, fmt.Errorf("list chains of %s: %w", id, err)
	}
	var filter encoder
	filter.string(unix.NFTA_RULE_TABLE, id.name)
	names := have.chains
	rules := request{kind: nftMessage | unix.NFT_MSG_GETRULE, family: nftFamily(id.v6), filter: filter.b, each: have.add}
	err = n.dump(rules, func() {
		*have = content{chains: map[string][]uint64{}}
		for name := range names {
			have.chains[name] = nil
		}
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("list rules of %s: %w", id, err)
	}
	return have, nil
}

// add takes a rule as nf_tables lists it.
func (c *content) add(attrs []byte) {
	chain := attributeString(attrs, unix.NFTA_RULE_CHAIN)
	mark := ruleMark(attribute(attrs, unix.NFTA_RULE_USERDATA))
	if owned(chain) {
		c.chains[chain] = append(c.chains[chain], mark)
		return
	}
	if to := verdictChain(attribute(attrs, unix.NFTA_RULE_EXPRESSIONS)); owned(to) {
		handle := binary.BigEndian.Uint64(attribute(attrs, unix.NFTA_RULE_HANDLE))
		c.base = append(c.base, foundRule{chain: chain, id: handle, mark: mark, to: to, base: isBase(chain)})
	}
}

func isBase(chain string) bool {
	return slices.Contains([]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}, chain)
}

// ruleMark is the mark in a rule's user data; 0 if the rule is not ours.
func ruleMark(user []byte) uint64 {
	for len(user) >= 2 && len(user) >= 2+int(user[1]) {
		if user[0] == userDataMark && user[1] == 8 {
			return binary.BigEndian.Uint64(user[2:])
		}
		user = user[2+user[1]:]
	}
	return 0
}

// verdictChain is the chain to which one of a rule's expressions leads.
func verdictChain(expressions []byte) (chain string) {
	attributes(expressions, func(_ uint16, e []byte) {
		if attributeString(e, unix.NFTA_EXPR_NAME) == "immediate" {
			data := attribute(attribute(e, unix.NFTA_EXPR_DATA), unix.NFTA_IMMEDIATE_DATA)
			chain = attributeString(attribute(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CHAIN)
		}
	})
	return chain
}

// transaction gathers messages. Units are the places where it may be divided.
type transaction struct {
	encoder
	family uint8
	table  string
	seq    uint32
	units  []unit
	steps  []step
}

// unit is where some messages end that belong together.
type unit struct{ bytes, steps int }

// step says what a message is about.
type step struct {
	chain string
	rule  *rule
}

func (s step) String() string {
	if s.rule != nil {
		return fmt.Sprintf("-A %s %s", s.chain, s.rule)
	}
	return "chain " + s.chain
}

func (t *transaction) begin(verb, flags uint16, s step) int {
	t.steps = append(t.steps, s)
	t.seq++
	return t.message(unix.NlMsghdr{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | verb, Flags: flags, Seq: t.seq}, t.family, 0)
}

func (t *transaction) unit() { t.units = append(t.units, unit{len(t.b), len(t.steps)}) }

// write implements backend, as one transaction if it is not too large: all or nothing for packets, too. A
// large one is divided so that packets find their way after each part.
func (n *nft) write(changes []*change) error {
	t := &transaction{seq: n.seq}
	for _, c := range changes {
		t.in(c.table)
		t.prepare(c)
	}
	for _, c := range changes {
		t.in(c.table)
		for _, name := range c.chains() {
			t.chainRules(name, c.set[name], n.sets)
		}
	}
	for _, c := range changes {
		t.in(c.table)
		t.finishChange(c, n.sets)
	}
	n.seq = t.seq
	return n.commit(t)
}

func (t *transaction) in(id tableID) { t.family, t.table = nftFamily(id.v6), id.name }

// hooks of the kernel's chains in which we have rules.
type hook struct {
	kind     string
	number   uint32
	priority int32
}

func hookOf(table, chain string) hook {
	h := hook{kind: table}
	switch chain {
	case "PREROUTING":
		h.number, h.priority = unix.NF_INET_PRE_ROUTING, -100
	case "INPUT":
		h.number = unix.NF_INET_LOCAL_IN
	case "FORWARD":
		h.number = unix.NF_INET_FORWARD
	case "OUTPUT":
		h.number = unix.NF_INET_LOCAL_OUT
		if table == "nat" {
			h.priority = -100
		}
	case "POSTROUTING":
		h.number, h.priority = unix.NF_INET_POST_ROUTING, 100
	}
	return h
}

// prepare makes the table, and all chains before there are rules that lead to them.
func (t *transaction) prepare(c *change) {
	if len(c.set) > 0 || len(c.add) > 0 {
		m := t.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, step{chain: c.table.name})
		t.string(unix.NFTA_TABLE_NAME, t.table)
		t.attr(attrTableUserData, ours())
		t.finish(m)
	}
	made := map[string]bool{}
	for _, b := range c.add {
		if !made[b.chain] {
			made[b.chain] = true
			t.newBaseChain(b.chain)
		}
	}
	for name := range c.set {
		if !c.known[name] {
			t.chainMessage(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, name)
		}
	}
	t.unit()
}

// ours is user data that says that we have made an object.
func ours() []byte { return []byte{userDataMark, 1, 1} }

func (t *transaction) newBaseChain(name string) {
	m := t.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, step{chain: name})
	t.string(unix.NFTA_CHAIN_TABLE, t.table)
	t.string(unix.NFTA_CHAIN_NAME, name)
	hook := hookOf(t.table, name)
	h := t.open(unix.NFTA_CHAIN_HOOK)
	t.uint32(unix.NFTA_HOOK_HOOKNUM, hook.number)
	t.uint32(unix.NFTA_HOOK_PRIORITY, uint32(hook.priority))
	t.close(h)
	t.string(unix.NFTA_CHAIN_TYPE, hook.kind)
	t.attr(attrChainUserData, ours())
	t.finish(m)
}

func (t *transaction) chainMessage(verb, flags uint16, name string) {
	m := t.begin(verb, flags, step{chain: name})
	t.string(unix.NFTA_CHAIN_TABLE, t.table)
	t.string(unix.NFTA_CHAIN_NAME, name)
	t.finish(m)
}

func (t *transaction) flush(name string) {
	m := t.begin(unix.NFT_MSG_DELRULE, 0, step{chain: name})
	t.string(unix.NFTA_RULE_TABLE, t.table)
	t.string(unix.NFTA_RULE_CHAIN, name)
	t.finish(m)
}

// chainRules makes a chain hold these rules, whatever it held.
func (t *transaction) chainRules(name string, rules []rule, sets setIndexes) {
	t.flush(name)
	for i := range rules {
		t.newRule(unix.NLM_F_APPEND, name, &rules[i], sets)
	}
	t.unit()
}

// finishChange lets the kernel's chains lead to ours when these are complete, and takes away what nothing
// leads to any more.
func (t *transaction) finishChange(c *change, sets setIndexes) {
	for i := range c.add {
		t.newRule(0, c.add[i].chain, &c.add[i].rule, sets)
	}
	for _, f := range c.remove {
		m := t.begin(unix.NFT_MSG_DELRULE, 0, step{chain: f.chain})
		t.string(unix.NFTA_RULE_TABLE, t.table)
		t.string(unix.NFTA_RULE_CHAIN, f.chain)
		t.attr(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, f.id))
		t.finish(m)
	}
	t.unit()
	for _, name := range c.gone {
		t.flush(name)
		t.unit()
	}
	for _, name := range c.gone {
		t.chainMessage(unix.NFT_MSG_DELCHAIN, 0, name)
		t.unit()
	}
}

func (t *transaction) newRule(flags uint16, chain string, r *rule, sets setIndexes) {
	m := t.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, step{chain, r})
	t.string(unix.NFTA_RULE_TABLE, t.table)
	t.string(unix.NFTA_RULE_CHAIN, chain)
	x := t.open(unix.NFTA_RULE_EXPRESSIONS)
	t.expressions(r, sets)
	t.close(x)
	if r.protocol != 0 {
		c := t.open(unix.NFTA_RULE_COMPAT)
		t.uint32(compatProtocol, uint32(r.protocol))
		t.uint32(compatFlags, 0)
		t.close(c)
	}
	user := []byte{userDataMark, 8}
	user = binary.BigEndian.AppendUint64(user, (*nft)(nil).mark(tableID{}, r))
	if r.comment != "" {
		comment := r.comment[:min(len(r.comment), 128)]
		user = append(user, userDataComment, byte(len(comment)+1))
		user = append(append(user, comment...), 0)
	}
	t.attr(unix.NFTA_RULE_USERDATA, user)
	t.finish(m)
}

// expression encloses the attributes of an expression.
func (t *transaction) expression(name string, attrs func()) {
	e := t.open(unix.NFTA_LIST_ELEM)
	t.string(unix.NFTA_EXPR_NAME, name)
	d := t.open(unix.NFTA_EXPR_DATA)
	attrs()
	t.close(d)
	t.close(e)
}

func (t *transaction) v6() bool { return t.family == unix.NFPROTO_IPV6 }

func (t *transaction) expressions(r *rule, sets setIndexes) {
	source, destination := uint32(12), uint32(16)
	if t.v6() {
		source, destination = 8, 24
	}
	if r.chance != 0 { // the others cost nothing if it decides against the rule
		t.extension("match", statisticMatch(r.chance))
	}
	if r.dst.IsValid() {
		t.prefix(destination, r.dst, false)
	}
	if r.src.IsValid() {
		t.prefix(source, r.src, r.notSrc)
	}
	if r.in != "" {
		t.meta(unix.NFT_META_IIFNAME)
		name, wild := strings.CutSuffix(r.in, "*")
		data := []byte(name)
		if !wild {
			data = append(data, 0)
		}
		t.compare(r.notIn, data)
	}
	if r.protocol != 0 {
		t.meta(unix.NFT_META_L4PROTO)
		t.compare(false, []byte{byte(r.protocol)})
	}
	for _, m := range r.matches(sets) {
		if m.name != "statistic" {
			t.extension("match", m)
		}
	}
	t.target(r.do, sets)
}

func (t *transaction) target(do target, sets setIndexes) {
	if x, ok := do.extension(t.v6(), sets); ok {
		t.extension("target", x)
		return
	}
	var code int32
	switch do.verb {
	case jump:
		code = unix.NFT_JUMP
	case goTo:
		code = unix.NFT_GOTO
	case back:
		code = unix.NFT_RETURN
	case accept:
		code = 1
	}
	t.expression("immediate", func() {
		t.uint32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		d := t.open(unix.NFTA_IMMEDIATE_DATA)
		v := t.open(unix.NFTA_DATA_VERDICT)
		t.uint32(unix.NFTA_VERDICT_CODE, uint32(code))
		if do.name != "" {
			t.string(unix.NFTA_VERDICT_CHAIN, do.name)
		}
		t.close(v)
		t.close(d)
	})
}

func (t *transaction) extension(kind string, x extension) {
	t.expression(kind, func() {
		t.string(extensionName, x.name)
		t.uint32(extensionRevision, uint32(x.revision))
		t.attr(extensionInfo, x.info)
	})
}

// prefix compares the first bits of an address.
func (t *transaction) prefix(offset uint32, p netip.Prefix, differs bool) {
	address, bits := p.Addr().AsSlice(), p.Bits()
	t.expression("payload", func() {
		t.uint32(unix.NFTA_PAYLOAD_DREG, unix.NFT_REG_1)
		t.uint32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER)
		t.uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
		t.uint32(unix.NFTA_PAYLOAD_LEN, uint32(len(address)))
	})
	if bits < 8*len(address) {
		mask := make([]byte, len(address))
		for i := range bits {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		t.expression("bitwise", func() {
			t.uint32(unix.NFTA_BITWISE_SREG, unix.NFT_REG_1)
			t.uint32(unix.NFTA_BITWISE_DREG, unix.NFT_REG_1)
			t.uint32(unix.NFTA_BITWISE_LEN, uint32(len(address)))
			t.value(unix.NFTA_BITWISE_MASK, mask)
			t.value(unix.NFTA_BITWISE_XOR, make([]byte, len(address)))
		})
	}
	t.compare(differs, address)
}

func (t *transaction) value(kind uint16, data []byte) {
	v := t.open(kind)
	t.attr(unix.NFTA_DATA_VALUE, data)
	t.close(v)
}

func (t *transaction) meta(key uint32) {
	t.expression("meta", func() {
		t.uint32(unix.NFTA_META_DREG, unix.NFT_REG_1)
		t.uint32(unix.NFTA_META_KEY, key)
	})
}

func (t *transaction) compare(differs bool, data []byte) {
	t.expression("cmp", func() {
		t.uint32(unix.NFTA_CMP_SREG, unix.NFT_REG_1)
		op := uint32(unix.NFT_CMP_EQ)
		if differs {
			op = unix.NFT_CMP_NEQ
		}
		t.uint32(unix.NFTA_CMP_OP, op)
		t.value(unix.NFTA_CMP_DATA, data)
	})
}

// commit sends the transaction, in parts if it is large.
func (n *nft) commit(t *transaction) error {
	from := unit{}
	for i, u := range t.units {
		last := i == len(t.units)-1
		if u.bytes > from.bytes && (last || t.units[i+1].bytes-from.bytes > n.chunk) {
			if err := n.transact(t, from, u); err != nil {
				return err
			}
			from = u
		}
	}
	return nil
}

// probe implements backend. What the rules are made of must be there as extensions of nf_tables' compatibility.
func (n *nft) probe(v6 bool) error {
	id := tableID{v6, tableNames[nat]}
	t := &transaction{seq: n.seq}
	t.in(id)
	address := netip.IPv4Unspecified()
	if v6 {
		address = netip.IPv6Unspecified()
	}
	rules := []rule{
		{unmarked: 1, notState: stateDNAT, do: target{verb: orMark, mark: 1}},
		{protocol: model.TCP, ports: ports{1, 2}, chance: 1, do: target{verb: dnat, to: netip.AddrPortFrom(address, 1)}},
		{do: target{verb: masquerade}},
	}
	const chain = "KUBE-SVC-PROBE"
	t.prepare(&change{table: id, set: map[string][]rule{chain: rules}})
	t.chainRules(chain, rules, nil)
	first, last, err := n.batch(t, unit{}, t.units[len(t.units)-1], false)
	if err != nil {
		return err
	}
	return n.verdict(first, last, t.steps)
}

// transact has the kernel perform messages: all or none of them (nfnetlink_rcv_batch in its
// net/netfilter/nfnetlink.c).
func (n *nft) transact(t *transaction, from, to unit) error {
	if err := n.fault("nf_tables commit"); err != nil {
		return err
	}
	first, last, err := n.batch(t, from, to, true)
	if err == nil {
		err = n.verdict(first, last, t.steps[from.steps:to.steps])
	}
	if err == nil {
		n.own++
	}
	return err
}

// batch sends messages and returns the sequence numbers of its begin and of its last one, which only is asked to
// be acknowledged. A batch that does not end is checked by the kernel and then forgotten.
func (n *nft) batch(t *transaction, from, to unit, end bool) (first, lastSeq uint32, err error) {
	n.drain()
	n.seq++
	first = n.seq
	b := encoder{make([]byte, 0, to.bytes-from.bytes+64)}
	begin := b.message(unix.NlMsghdr{Type: unix.NFNL_MSG_BATCH_BEGIN, Seq: first}, 0, unix.NFNL_SUBSYS_NFTABLES)
	b.finish(begin)
	last := begin
	b.b = append(b.b, t.b[from.bytes:to.bytes]...)
	for at := int(binary.NativeEndian.Uint32(b.b)); at < len(b.b); at += int(binary.NativeEndian.Uint32(b.b[at:])) {
		n.seq++
		binary.NativeEndian.PutUint32(b.b[at+8:], n.seq)
		last = at
	}
	binary.NativeEndian.PutUint16(b.b[last+6:], binary.NativeEndian.Uint16(b.b[last+6:])|unix.NLM_F_ACK)
	if end {
		b.finish(b.message(unix.NlMsghdr{Type: unix.NFNL_MSG_BATCH_END, Seq: n.seq}, 0, unix.NFNL_SUBSYS_NFTABLES))
	}
	return first, n.seq, n.send(b.b)
}

// verdict reads the kernel's answers to a batch. An error for the batch's begin stands for all.
func (n *nft) verdict(first, last uint32, steps []step) error {
	var err error
	for done := false; !done; {
		readErr := n.read(func(h unix.NlMsghdr, body []byte) {
			if h.Type != unix.NLMSG_ERROR || h.Seq < first || h.Seq > last {
				return
			}
			done = done || h.Seq == last || h.Seq == first
			e := errno(body)
			switch {
			case e == 0 || err != nil:
			case h.Seq == first:
				err = fmt.Errorf("nf_tables: %w", e)
			case e == unix.EPERM || e == unix.ENOENT: // not about what was sent
				err = fmt.Errorf("nf_tables: %s: %w", steps[h.Seq-first-1], e)
			default:
				err = &refusedError{fmt.Sprint(steps[h.Seq-first-1]), e}
			}
		})
		if readErr != nil {
			return readErr
		}
	}
	return err
}

// tidy deletes what we made for lack of it: the kernel's chains, if they are empty, and their table.
func (n *nft) tidy(id tableID) error {
	t := &transaction{}
	t.in(id)
	empty, all := []string{}, 0
	err := n.dump(request{kind: nftMessage | unix.NFT_MSG_GETCHAIN, family: t.family, each: func(attrs []byte) {
		if attributeString(attrs, unix.NFTA_CHAIN_TABLE) != id.name {
			return
		}
		all++
		used := binary.BigEndian.Uint32(attribute(attrs, unix.NFTA_CHAIN_USE))
		if used == 0 && string(attribute(attrs, attrChainUserData)) == string(ours()) {
			empty = append(empty, attributeString(attrs, unix.NFTA_CHAIN_NAME))
		}
	}}, func() { empty, all = nil, 0 })
	if err != nil {
		return err
	}
	for _, name := range empty {
		t.chainMessage(unix.NFT_MSG_DELCHAIN, 0, name)
	}
	made := false
	var filter encoder
	filter.string(unix.NFTA_TABLE_NAME, id.name)
	table := func(attrs []byte) { made = string(attribute(attrs, attrTableUserData)) == string(ours()) }
	err = n.ask(request{kind: nftMessage | unix.NFT_MSG_GETTABLE, family: t.family, filter: filter.b, each: table})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if made && all == len(empty) {
		m := t.begin(unix.NFT_MSG_DELTABLE, 0, step{chain: id.name})
		t.string(unix.NFTA_TABLE_NAME, id.name)
		t.finish(m)
	}
	t.unit()
	return n.commit(t)
}
