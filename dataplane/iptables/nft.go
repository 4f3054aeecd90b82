package iptables

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/xt"
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
	conn  *nfnetlink.Socket
	fault func(string) error
	sets  setIndexes
	// clean is the generation of the ruleset when all was as it should be; own counts our transactions since.
	clean, own uint32
	// began is the generation at the last begin, loaded that at the one before the last load.
	began, loaded uint32
	lists         [2]*nfnetlink.Socket // of both families, which are read side by side
}

func openNFT(fault func(string) error) (*nft, error) {
	c, err := nfnetlink.Dial()
	if err != nil {
		return nil, err
	}
	n := &nft{conn: c, fault: fault}
	if _, err := c.Generation(); errors.Is(err, unix.EINVAL) {
		return nil, errors.Join(fmt.Errorf("%w: this kernel has no nf_tables", dataplane.ErrUnsupported), n.close())
	}
	for i := range n.lists {
		if n.lists[i], err = nfnetlink.Dial(); err != nil {
			return nil, errors.Join(err, n.close())
		}
	}
	return n, nil
}

func (n *nft) end()                           {}
func (n *nft) use(sets setIndexes)            { n.sets = sets }
func (n *nft) present(bool) ([]string, error) { return tableNames[:], nil } // one that is not there seems to be empty

func (n *nft) close() error {
	err := n.conn.Close()
	for _, c := range n.lists {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	return err
}

func (n *nft) begin(context.Context) (err error) {
	n.began, err = n.conn.Generation()
	return err
}

func (n *nft) settled() (err error) {
	n.clean, err = n.conn.Generation()
	n.own = 0
	return err
}

func (n *nft) undisturbed([]tableID) (bool, error) {
	now, err := n.conn.Generation()
	return err == nil && n.clean != 0 && now == n.clean+n.own, err
}

// asLoaded implements backend.
func (n *nft) asLoaded([]tableID) (bool, error) {
	now, err := n.conn.Generation()
	return err == nil && now == n.loaded, err
}

func nftFamily(v6 bool) uint8 {
	if v6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// mark is a hash of what a rule says. It is kept in the rule's user data. iptables does not look at these, and other
// programs do not write rules with them.
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

// listing asks for objects of one kind.
func listing(verb uint16, id tableID, reset func(), each func(attrs []byte)) nfnetlink.Request {
	return nfnetlink.Request{Kind: nfnetlink.NFTables | verb, Family: nftFamily(id.v6), Reset: reset, Each: each}
}

// maxLoads is how often a table is read anew because another process has changed the ruleset meanwhile.
const maxLoads = 20

// load implements backend.
func (n *nft) load(id tableID) (*content, error) {
	conn := n.lists[0]
	if id.v6 {
		conn = n.lists[1]
	} else {
		n.loaded = n.began
	}
	for range maxLoads {
		before, err := conn.Generation()
		if err != nil {
			return nil, err
		}
		have, err := list(conn, id)
		if err != nil {
			return nil, err
		}
		if now, err := conn.Generation(); err != nil || now == before {
			return have, err
		}
	}
	return nil, fmt.Errorf("list %s: %w", id, nfnetlink.ErrInterrupted)
}

// list reads a table chain by chain: the kernel, asked for all of its rules at once, begins with the first one for each
// part of its answer.
func list(conn *nfnetlink.Socket, id tableID) (*content, error) {
	var names []string
	chains := listing(unix.NFT_MSG_GETCHAIN, id, func() { names = nil }, func(attrs []byte) {
		if nfnetlink.Text(attrs, unix.NFTA_CHAIN_TABLE) == id.name {
			names = append(names, nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME))
		}
	})
	if err := conn.Dump(chains); err != nil {
		return nil, fmt.Errorf("list chains of %s: %w", id, err)
	}
	have := &content{chains: make(map[string][]uint64, len(names))}
	for _, name := range names {
		part := &content{}
		reset := func() { *part = content{chains: map[string][]uint64{}} }
		rules := listing(unix.NFT_MSG_GETRULE, id, reset, func(attrs []byte) { part.add(attrs) })
		rules.Filter.Text(unix.NFTA_RULE_TABLE, id.name)
		rules.Filter.Text(unix.NFTA_RULE_CHAIN, name)
		if err := conn.Dump(rules); err != nil {
			return nil, fmt.Errorf("list chain %s of %s: %w", name, id, err)
		}
		if have.base = append(have.base, part.base...); owned(name) {
			have.chains[name] = part.chains[name]
		}
	}
	return have, nil
}

// add takes a rule as nf_tables lists it.
func (c *content) add(attrs []byte) {
	chain := nfnetlink.Text(attrs, unix.NFTA_RULE_CHAIN)
	mark := ruleMark(nfnetlink.Attribute(attrs, unix.NFTA_RULE_USERDATA))
	if owned(chain) {
		c.chains[chain] = append(c.chains[chain], mark)
		return
	}
	if to := nfnetlink.VerdictChain(nfnetlink.Attribute(attrs, unix.NFTA_RULE_EXPRESSIONS)); owned(to) {
		handle := nfnetlink.Uint64(attrs, unix.NFTA_RULE_HANDLE)
		c.base = append(c.base, foundRule{chain: chain, id: handle, mark: mark, to: to, base: isBase(chain)})
	}
}

func isBase(chain string) bool {
	return slices.Contains(xt.HookNames[:], chain)
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

// transaction gathers messages. It writes them itself, without a structure for each expression as internal/nft has
// them: with 10,000 Services of ten endpoints there are more than 100,000 rules, of several expressions each.
//
// Units are the places where it may be divided. The order of the messages is such that packets find their way after
// each unit, whatever becomes of the rest:
//
//	new chains, empty ─► the rules of each chain, those first to which others lead ─► the kernel's chains lead there
//	                                                        ─► rules of chains that go ─► these chains
type transaction struct {
	nfnetlink.Encoder
	family uint8
	table  string
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
	return t.Message(nfnetlink.NFTables|verb, flags, t.family)
}

func (t *transaction) unit() { t.units = append(t.units, unit{len(t.B), len(t.steps)}) }

// write implements backend, as one transaction if it is not too large: all or nothing for packets, too. A
// large one is divided so that packets find their way after each part, and no part is kept when it was sent.
func (n *nft) write(changes []*change) error {
	t := &transaction{}
	for _, c := range changes {
		t.in(c.table)
		t.prepare(c)
	}
	// The largest one comes first: what is small is in one transaction then, mostly the last one.
	bySize := slices.Clone(changes)
	slices.SortStableFunc(bySize, func(a, b *change) int { return cmp.Compare(b.rules(), a.rules()) })
	for _, c := range bySize {
		t.in(c.table)
		for _, name := range c.chains() {
			if err := n.commitLarge(t); err != nil {
				return err
			}
			t.chainRules(name, c.set[name], n.sets)
		}
	}
	for _, c := range changes {
		t.in(c.table)
		t.finishChange(c, n.sets)
	}
	return n.commit(t)
}

// rules is how many rules the chains of a change have.
func (c *change) rules() (n int) {
	for _, of := range c.set {
		n += len(of)
	}
	return n
}

func (t *transaction) in(id tableID) { t.family, t.table = nftFamily(id.v6), id.name }

// prepare makes the table, and all chains before there are rules that lead to them.
func (t *transaction) prepare(c *change) {
	if len(c.set) > 0 || len(c.add) > 0 {
		m := t.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, step{chain: c.table.name})
		t.Text(unix.NFTA_TABLE_NAME, t.table)
		t.Bytes(attrTableUserData, ours())
		t.Finish(m)
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

// newBaseChain makes a chain of the kernel's own, as iptables-nft does, which numbers hooks as the kernel does.
func (t *transaction) newBaseChain(name string) {
	priority := int32(0)
	switch {
	case t.table == tableNames[nat] && name == "POSTROUTING":
		priority = 100
	case t.table == tableNames[nat]:
		priority = -100
	}
	m := t.about(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME, step{chain: name})
	h := t.Open(unix.NFTA_CHAIN_HOOK)
	t.Uint32(unix.NFTA_HOOK_HOOKNUM, uint32(slices.Index(xt.HookNames[:], name)))
	t.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(priority))
	t.Close(h)
	t.Text(unix.NFTA_CHAIN_TYPE, t.table)
	t.Bytes(attrChainUserData, ours())
	t.Finish(m)
}

// about begins a message about a chain, or about rules of one, of which the name is another attribute.
func (t *transaction) about(verb, flags, name uint16, s step) int {
	m := t.begin(verb, flags, s)
	t.Text(unix.NFTA_RULE_TABLE, t.table) // it has this number in all messages
	t.Text(name, s.chain)
	return m
}

func (t *transaction) chainMessage(verb, flags uint16, name string) {
	t.Finish(t.about(verb, flags, unix.NFTA_CHAIN_NAME, step{chain: name}))
}

func (t *transaction) flush(name string) {
	t.Finish(t.about(unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, step{chain: name}))
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
		m := t.about(unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, step{chain: f.chain})
		t.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, f.id))
		t.Finish(m)
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
	m := t.about(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, unix.NFTA_RULE_CHAIN, step{chain, r})
	x := t.Open(unix.NFTA_RULE_EXPRESSIONS)
	t.expressions(r, sets)
	t.Close(x)
	if r.protocol != 0 {
		c := t.Open(unix.NFTA_RULE_COMPAT)
		t.Uint32(compatProtocol, uint32(r.protocol))
		t.Uint32(compatFlags, 0)
		t.Close(c)
	}
	user := []byte{userDataMark, 8}
	user = binary.BigEndian.AppendUint64(user, (*nft)(nil).mark(tableID{}, r))
	if r.comment != "" {
		comment := r.comment[:min(len(r.comment), 128)]
		user = append(user, userDataComment, byte(len(comment)+1))
		user = append(append(user, comment...), 0)
	}
	t.Bytes(unix.NFTA_RULE_USERDATA, user)
	t.Finish(m)
}

// expression encloses the attributes of an expression.
func (t *transaction) expression(name string, attrs func()) {
	e := t.Open(unix.NFTA_LIST_ELEM)
	t.Text(unix.NFTA_EXPR_NAME, name)
	d := t.Open(unix.NFTA_EXPR_DATA)
	attrs()
	t.Close(d)
	t.Close(e)
}

func (t *transaction) v6() bool { return t.family == unix.NFPROTO_IPV6 }

// expressions encodes a rule as iptables-nft does: addresses, interface and protocol as expressions, other matches as
// extensions of x_tables.
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

// target encodes what a rule does with a packet: an extension of x_tables, or a verdict.
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
		t.Uint32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		d := t.Open(unix.NFTA_IMMEDIATE_DATA)
		v := t.Open(unix.NFTA_DATA_VERDICT)
		t.Uint32(unix.NFTA_VERDICT_CODE, uint32(code))
		if do.name != "" {
			t.Text(unix.NFTA_VERDICT_CHAIN, do.name)
		}
		t.Close(v)
		t.Close(d)
	})
}

func (t *transaction) extension(kind string, x extension) {
	t.expression(kind, func() {
		t.Text(extensionName, x.name)
		t.Uint32(extensionRevision, uint32(x.revision))
		t.Bytes(extensionInfo, x.info)
	})
}

// prefix compares the first bits of an address.
func (t *transaction) prefix(offset uint32, p netip.Prefix, differs bool) {
	address, bits := p.Addr().AsSlice(), p.Bits()
	t.expression("payload", func() {
		t.Uint32(unix.NFTA_PAYLOAD_DREG, unix.NFT_REG_1)
		t.Uint32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER)
		t.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
		t.Uint32(unix.NFTA_PAYLOAD_LEN, uint32(len(address)))
	})
	if bits < 8*len(address) {
		mask := make([]byte, len(address))
		for i := range bits {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		t.expression("bitwise", func() {
			t.Uint32(unix.NFTA_BITWISE_SREG, unix.NFT_REG_1)
			t.Uint32(unix.NFTA_BITWISE_DREG, unix.NFT_REG_1)
			t.Uint32(unix.NFTA_BITWISE_LEN, uint32(len(address)))
			t.value(unix.NFTA_BITWISE_MASK, mask)
			t.value(unix.NFTA_BITWISE_XOR, make([]byte, len(address)))
		})
	}
	t.compare(differs, address)
}

func (t *transaction) value(kind uint16, data []byte) {
	v := t.Open(kind)
	t.Bytes(unix.NFTA_DATA_VALUE, data)
	t.Close(v)
}

func (t *transaction) meta(key uint32) {
	t.expression("meta", func() {
		t.Uint32(unix.NFTA_META_DREG, unix.NFT_REG_1)
		t.Uint32(unix.NFTA_META_KEY, key)
	})
}

func (t *transaction) compare(differs bool, data []byte) {
	t.expression("cmp", func() {
		t.Uint32(unix.NFTA_CMP_SREG, unix.NFT_REG_1)
		op := uint32(unix.NFT_CMP_EQ)
		if differs {
			op = unix.NFT_CMP_NEQ
		}
		t.Uint32(unix.NFTA_CMP_OP, op)
		t.value(unix.NFTA_CMP_DATA, data)
	})
}

// partSize bounds one kernel transaction.
func (n *nft) partSize() int { return min(chunkSize, n.conn.Room/4) }

// commitLarge sends what is too large to become larger, and empties the transaction then.
func (n *nft) commitLarge(t *transaction) error {
	if len(t.B) < n.partSize() {
		return nil
	}
	err := n.commit(t)
	clear(t.steps)
	t.B, t.steps, t.units = t.B[:0], t.steps[:0], t.units[:0]
	return err
}

// commit sends the transaction, in parts if it is large.
func (n *nft) commit(t *transaction) error {
	size := n.partSize()
	from := unit{}
	for i, u := range t.units {
		last := i == len(t.units)-1
		if u.bytes > from.bytes && (last || t.units[i+1].bytes-from.bytes > size) {
			if err := n.transact(t, from, u); err != nil {
				return err
			}
			from = u
		}
	}
	return nil
}

// probe implements backend. The rules' parts must be there as extensions of nf_tables' compatibility.
func (n *nft) probe(v6 bool) error {
	id := tableID{v6, tableNames[nat]}
	t := &transaction{}
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
	b := n.conn.Begin()
	b.B = append(b.B, t.B...)
	return explain(n.conn.Check(), t.steps)
}

// transact has the kernel perform messages: all or none of them.
func (n *nft) transact(t *transaction, from, to unit) error {
	if err := n.fault("nf_tables commit"); err != nil {
		return err
	}
	b := n.conn.Begin()
	b.B = append(b.B, t.B[from.bytes:to.bytes]...)
	err := explain(n.conn.Commit(), t.steps[from.steps:to.steps])
	if err == nil {
		n.own++
	}
	return err
}

// explain says which step was refused, if one was.
func explain(err error, steps []step) error {
	var r *nfnetlink.Refusal
	switch {
	case !errors.As(err, &r):
		return err
	case r.Message < 0:
		return fmt.Errorf("nf_tables: %w", r.Err)
	}
	step := steps[r.Message]
	switch {
	case r.Err == unix.ENOENT && step.rule != nil: // the chain is there: it was flushed just before
		return &refusedError{step.String(), fmt.Errorf("%w: a chain, or a module for a match or target of it", r.Err)}
	case r.Err == unix.ENOENT: // what was there is gone
		return fmt.Errorf("nf_tables: %s: %w", step, r.Err)
	}
	return judged(step.String(), r.Err)
}

// tidy deletes what we made for lack of it: the kernel's chains, if they are empty, and their table.
func (n *nft) tidy(id tableID) error {
	t := &transaction{}
	t.in(id)
	empty, all := []string{}, 0
	reset := func() { empty, all = nil, 0 }
	err := n.conn.Dump(listing(unix.NFT_MSG_GETCHAIN, id, reset, func(attrs []byte) {
		if nfnetlink.Text(attrs, unix.NFTA_CHAIN_TABLE) != id.name {
			return
		}
		all++
		used := nfnetlink.Uint32(attrs, unix.NFTA_CHAIN_USE)
		if used == 0 && string(nfnetlink.Attribute(attrs, attrChainUserData)) == string(ours()) {
			empty = append(empty, nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME))
		}
	}))
	if err != nil {
		return err
	}
	for _, name := range empty {
		t.chainMessage(unix.NFT_MSG_DELCHAIN, 0, name)
	}
	made := false
	table := listing(unix.NFT_MSG_GETTABLE, id, nil, func(attrs []byte) {
		made = string(nfnetlink.Attribute(attrs, attrTableUserData)) == string(ours())
	})
	table.Filter.Text(unix.NFTA_TABLE_NAME, id.name)
	if err := n.conn.Get(table); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if made && all == len(empty) {
		m := t.begin(unix.NFT_MSG_DELTABLE, 0, step{chain: id.name})
		t.Text(unix.NFTA_TABLE_NAME, id.name)
		t.Finish(m)
	}
	t.unit()
	return n.commit(t)
}
