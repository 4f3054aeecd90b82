package iptables

import (
	"bytes"
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
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/internal/xt"
	"fairlead.dev/fairlead/model"
)

// From include/uapi/linux/netfilter/nf_tables_compat.h; x/sys/unix lacks them.
const (
	compatProtocol    = 1
	compatFlags       = 2
	extensionName     = 1 // of NFTA_MATCH_* and NFTA_TARGET_*
	extensionRevision = 2
	extensionInfo     = 3
)

// chunkSize bounds one kernel transaction, and with it how long the ruleset's lock is held. It is larger than that of
// internal/nft: after each transaction with rules that jump, the kernel checks all jumps of the table anew.
const chunkSize = 2 << 20

// nfTables is the back end nf_tables. Its rules are what iptables-nft makes: comparisons of addresses and
// protocols in nf_tables' own words, matches and targets as extensions of x_tables.
//
// The tables belong to all programs, and a table may have a hundred thousand rules. So the back end uses the steps and
// transactions of internal/nft, but not its Table.Load, which reads a table as a whole and takes it for ours alone.
type nfTables struct {
	*nft.Ruleset
	sets    setIndexes
	serving bool // rules that translate count, as those do that refuse
	// These are what Foreign said at the last begin, at that before the last load, and at that before all was as it should
	// be. Loaded is 0 after a transaction of ours, of which Foreign says nothing.
	began, loaded, clean uint32

	lists [2]*nfnetlink.Socket // of both families, which are read side by side
}

func openNFT(fault func(string) error, serving bool) (*nfTables, error) {
	r, err := nft.Open(fault)
	if err != nil {
		return nil, err
	}
	n := &nfTables{Ruleset: r, serving: serving}
	if _, err := n.Generation(); errors.Is(err, unix.EINVAL) {
		return nil, errors.Join(fmt.Errorf("%w: this kernel has no nf_tables", dataplane.ErrUnsupported), n.close())
	}
	for i := range n.lists {
		if n.lists[i], err = nfnetlink.Dial(); err != nil {
			return nil, errors.Join(err, n.close())
		}
	}
	return n, nil
}

func (n *nfTables) end()                           {}
func (n *nfTables) use(sets setIndexes)            { n.sets = sets }
func (n *nfTables) present(bool) ([]string, error) { return tableNames[:], nil } // one that is not there seems empty

func (n *nfTables) close() error {
	err := n.Close()
	for _, c := range n.lists {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	return err
}

func (n *nfTables) begin(context.Context) (err error) {
	n.began, err = n.Foreign()
	return err
}

func (n *nfTables) settled() { n.clean = n.began }

func (n *nfTables) undisturbed([]tableID) (bool, error) {
	now, err := n.Foreign()
	return err == nil && now == n.clean, err
}

// asLoaded implements backend.
func (n *nfTables) asLoaded([]tableID) (bool, error) {
	now, err := n.Foreign()
	return err == nil && now == n.loaded, err
}

// of is a table as internal/nft knows it.
func (t tableID) of(tx *nft.Transaction) *nft.Table {
	family := nft.Families[0]
	if t.v6 {
		family = nft.Families[1]
	}
	return &nft.Table{Family: family, Name: t.name, Tx: tx}
}

// mark is a hash of what a rule says. It is kept in the rule's user data. iptables does not look at these, and other
// programs do not write rules with them.
func (n *nfTables) mark(_ tableID, r *rule) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(r.String()))
	if n.counted(r) {
		_, _ = h.Write([]byte(" counter"))
	}
	return h.Sum64()
}

// counted reports whether a rule has a counter.
func (n *nfTables) counted(r *rule) bool {
	return r.do.verb == reject || r.do.verb == drop || n.serving && r.do.verb == dnat
}

// counts implements backend.
func (n *nfTables) counts(id tableID, chains []string, f func(string, netip.AddrPort, uint64)) error {
	for _, name := range chains {
		counts, err := n.countsOf(id, name)
		if err != nil {
			return err
		}
		for k, c := range counts {
			if c.Packets > 0 {
				f(name, k.to, c.Packets)
			}
		}
	}
	return nil
}

// countsOf is what the rules of a chain have counted.
func (n *nfTables) countsOf(id tableID, chain string) (map[kept]dataplane.Traffic, error) {
	counts := map[kept]dataplane.Traffic{}
	err := n.lists[0].Dump(id.rulesOf(chain, func() { clear(counts) }, func(attrs []byte) {
		k, c := keptOf(attrs, id.v6)
		counts[k] = counts[k].Plus(c)
	}))
	if err != nil {
		return nil, fmt.Errorf("list chain %s of %s: %w", chain, id, err)
	}
	return counts, nil
}

// kept tells which rule of a chain takes over what another one has counted: the one that translates to the same
// backend, or else the same one.
type kept struct {
	mark uint64
	to   netip.AddrPort
}

func (w writer) keptBy(r *rule) kept {
	if r.do.verb == dnat {
		return kept{to: r.do.to}
	}
	return kept{mark: w.mark(w.table, r)}
}

// keptOf decodes a rule that the kernel lists.
func keptOf(attrs []byte, v6 bool) (k kept, n dataplane.Traffic) {
	expressions := nfnetlink.Attribute(attrs, unix.NFTA_RULE_EXPRESSIONS)
	n, _ = nft.CountIn(expressions)
	nfnetlink.Attributes(expressions, func(_ uint16, e []byte) {
		data := nfnetlink.Attribute(e, unix.NFTA_EXPR_DATA)
		if nfnetlink.Text(e, unix.NFTA_EXPR_NAME) == "target" {
			k.to = backendOf(nfnetlink.Text(data, extensionName), nfnetlink.Attribute(data, extensionInfo), v6)
		}
	})
	if b := nft.RuleMark(attrs); len(b) == 8 && !k.to.IsValid() {
		k.mark = binary.BigEndian.Uint64(b)
	}
	return k, n
}

// load implements backend. Another program may change the table meanwhile. Each chain is read as it is at one moment,
// and the next audit sees that the ruleset is no longer the one at begin.
func (n *nfTables) load(id tableID) (*content, error) {
	if id.v6 {
		return list(n.lists[1], id)
	}
	n.loaded = n.began
	return list(n.lists[0], id)
}

// list reads a table chain by chain: the kernel, asked for all of its rules at once, begins with the first one for each
// part of its answer.
func list(conn *nfnetlink.Socket, id tableID) (*content, error) {
	var names []string
	table := id.of(nil)
	chains := table.Listing(unix.NFT_MSG_GETCHAIN, func() { names = nil }, func(attrs []byte) {
		names = append(names, nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME))
	})
	if err := conn.Dump(chains); err != nil {
		return nil, fmt.Errorf("list chains of %s: %w", id, err)
	}
	have := &content{chains: make(map[string][]uint64, len(names))}
	for _, name := range names {
		part := &content{}
		reset := func() { *part = content{chains: map[string][]uint64{}} }
		if err := conn.Dump(id.rulesOf(name, reset, func(attrs []byte) { part.add(attrs) })); err != nil {
			return nil, fmt.Errorf("list chain %s of %s: %w", name, id, err)
		}
		if have.base = append(have.base, part.base...); owned(name) {
			have.chains[name] = part.chains[name]
		}
	}
	return have, nil
}

// rulesOf asks for the rules of a chain.
func (t tableID) rulesOf(chain string, reset func(), each func(attrs []byte)) nfnetlink.Request {
	rules := t.of(nil).Listing(unix.NFT_MSG_GETRULE, reset, each)
	rules.Filter.Text(unix.NFTA_RULE_CHAIN, chain)
	return rules
}

// add takes a rule as nf_tables lists it.
func (c *content) add(attrs []byte) {
	chain := nfnetlink.Text(attrs, unix.NFTA_RULE_CHAIN)
	mark := uint64(0) // that of a rule of another program
	if b := nft.RuleMark(attrs); len(b) == 8 {
		mark = binary.BigEndian.Uint64(b)
	}
	if owned(chain) {
		c.chains[chain] = append(c.chains[chain], mark)
		return
	}
	if to := nfnetlink.VerdictChain(nfnetlink.Attribute(attrs, unix.NFTA_RULE_EXPRESSIONS)); owned(to) {
		entry := slices.Contains(xt.HookNames[:], chain) && to != chainMark
		handle := nfnetlink.Uint64(attrs, unix.NFTA_RULE_HANDLE)
		c.base = append(c.base, foundRule{chain: chain, id: handle, mark: mark, to: to, entry: entry})
	}
}

// writer turns a change of a table into steps. It writes rules itself, without a structure for each expression as
// internal/nft has them: with 10,000 Services of ten endpoints there are more than 100,000 rules, of several
// expressions each.
//
// The order of the steps is such that packets find their way after each run of joined ones, whatever becomes of the
// rest:
//
//	new chains, empty ─► the rules of each chain, those first to which others lead ─► the kernel's chains lead there
//	                                                        ─► rules of chains that go ─► these chains
type writer struct {
	*nft.Table
	*change
	*nfTables
}

func (n *nfTables) writer(tx *nft.Transaction, c *change) writer {
	return writer{c.table.of(tx), c, n}
}

// write implements backend, as one transaction if it is not too large: all or nothing for packets, too. A
// large one is divided so that packets find their way after each part, and no part is kept when it was sent.
func (n *nfTables) write(changes []*change) error {
	tx := &nft.Transaction{}
	var writers []writer
	for _, c := range changes {
		w := n.writer(tx, c)
		w.prepare()
		writers = append(writers, w)
	}
	// The largest one comes first: what is small is in one transaction then, mostly the last one.
	bySize := slices.Clone(writers)
	slices.SortStableFunc(bySize, func(a, b writer) int { return cmp.Compare(b.rules(), a.rules()) })
	for _, w := range bySize {
		for _, name := range w.chains() {
			if len(tx.B) >= chunkSize {
				if err := n.commit(tx); err != nil {
					return err
				}
			}
			if err := w.chainRules(name); err != nil {
				return err
			}
		}
	}
	for _, w := range writers {
		w.finish()
	}
	return n.commit(tx)
}

// rules is how many rules the chains of a change have.
func (c *change) rules() (n int) {
	for _, of := range c.set {
		n += len(of)
	}
	return n
}

// prepare makes the table, and all chains before there are rules that lead to them.
func (w writer) prepare() {
	if len(w.set) > 0 || len(w.add) > 0 {
		w.Object(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, "")
		w.Tx.Bytes(nft.TableUserData, nft.OurData())
		w.Tx.End()
	}
	made := map[string]bool{}
	for _, b := range w.add {
		if !made[b.chain] {
			made[b.chain] = true
			w.NewChain(nft.Chain{Name: b.chain, Hook: hook(w.Name, b.chain), UserData: nft.OurData()})
		}
	}
	for name := range w.set {
		if !w.known[name] {
			w.NewChain(nft.Chain{Name: name})
		}
	}
}

// hook is where a chain of the kernel's own hangs, as iptables-nft makes it, which numbers hooks as the kernel does.
func hook(table, chain string) *nft.Hook {
	h := &nft.Hook{Kind: table, Number: uint32(slices.Index(xt.HookNames[:], chain))}
	if table == tableNames[nat] {
		h.Priority = map[string]int32{"PREROUTING": -100, "OUTPUT": -100, "POSTROUTING": 100}[chain]
	}
	return h
}

// chainRules makes a chain hold its rules, whatever it held. Counts between the listing and the transaction are lost.
func (w writer) chainRules(name string) (err error) {
	var counts map[kept]dataplane.Traffic
	rules := w.set[name]
	if w.known[name] && slices.ContainsFunc(rules, func(r rule) bool { return w.counted(&r) }) {
		if counts, err = w.countsOf(w.table, name); err != nil {
			return err
		}
	}
	w.Flush(name)
	for i := range rules {
		by := w.keptBy(&rules[i])
		w.Tx.Join()
		w.newRule(unix.NLM_F_APPEND, name, &rules[i], counts[by])
		delete(counts, by) // of rules that say the same, one takes over all
	}
	return nil
}

// finish lets the kernel's chains lead to ours when these are complete, and takes away what nothing leads to any more.
// Jumps from the kernel's chains change at once.
func (w writer) finish() {
	for i := range w.add {
		w.Tx.Join()
		w.newRule(0, w.add[i].chain, &w.add[i].rule, dataplane.Traffic{})
	}
	for _, f := range w.remove {
		w.Tx.Join()
		w.Object(unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, f.chain)
		w.Tx.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, f.id))
		w.Tx.End()
	}
	for _, name := range w.gone {
		w.Flush(name)
	}
	for _, name := range w.gone {
		w.deleteChain(name)
	}
}

// deleteChain deletes an empty one.
func (w writer) deleteChain(name string) {
	w.Object(unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name)
	w.Tx.End()
}

// maxComment is how much of a comment nft prints.
const maxComment = 128

func (w writer) newRule(flags uint16, chain string, r *rule, counted dataplane.Traffic) {
	w.Object(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, unix.NFTA_RULE_CHAIN, chain)
	x := w.Tx.Open(unix.NFTA_RULE_EXPRESSIONS)
	w.expressions(r, counted)
	w.Tx.Close(x)
	if r.protocol != 0 {
		c := w.Tx.Open(unix.NFTA_RULE_COMPAT)
		w.Tx.Uint32(compatProtocol, uint32(r.protocol))
		w.Tx.Uint32(compatFlags, 0)
		w.Tx.Close(c)
	}
	mark := binary.BigEndian.AppendUint64(nil, w.mark(w.table, r))
	w.Tx.Bytes(unix.NFTA_RULE_USERDATA, nft.RuleData(string(mark), r.comment[:min(len(r.comment), maxComment)]))
	w.Tx.End()
}

// expression writes one: attributes that are numbers, in pairs of kind and value, and those that more writes.
func (w writer) expression(name string, more func(), numbers ...uint32) {
	e := w.Tx.Open(unix.NFTA_LIST_ELEM)
	w.Tx.Text(unix.NFTA_EXPR_NAME, name)
	d := w.Tx.Open(unix.NFTA_EXPR_DATA)
	for i := 0; i < len(numbers); i += 2 {
		w.Tx.Uint32(uint16(numbers[i]), numbers[i+1])
	}
	more()
	w.Tx.Close(d)
	w.Tx.Close(e)
}

// expressions encodes a rule as iptables-nft does: addresses, interface and protocol as expressions, other matches as
// extensions of x_tables.
func (w writer) expressions(r *rule, counted dataplane.Traffic) {
	if r.chance != 0 { // the others cost nothing if it decides against the rule
		w.extension("match", statisticMatch(r.chance))
	}
	if r.dst.IsValid() {
		w.prefix(w.Family.Destination, r.dst, false)
	}
	if r.src.IsValid() {
		w.prefix(w.Family.Source, r.src, r.notSrc)
	}
	if r.in != "" {
		w.meta(unix.NFT_META_IIFNAME)
		name, wild := strings.CutSuffix(r.in, "*")
		data := []byte(name)
		if !wild {
			data = append(data, 0)
		}
		w.compare(r.notIn, data)
	}
	if r.protocol != 0 {
		w.meta(unix.NFT_META_L4PROTO)
		w.compare(false, []byte{byte(r.protocol)})
	}
	for _, m := range r.matches(w.sets) {
		if m.name != "statistic" {
			w.extension("match", m)
		}
	}
	if w.counted(r) {
		w.expression("counter", func() {
			w.Tx.Bytes(unix.NFTA_COUNTER_PACKETS, binary.BigEndian.AppendUint64(nil, counted.Packets))
			w.Tx.Bytes(unix.NFTA_COUNTER_BYTES, binary.BigEndian.AppendUint64(nil, counted.Bytes))
		})
	}
	w.target(r.do)
}

// target encodes what a rule does with a packet: an extension of x_tables, or a verdict.
func (w writer) target(do target) {
	if x, ok := do.extension(w.Family.V6(), w.sets); ok {
		w.extension("target", x)
		return
	}
	codes := [...]int32{jump: unix.NFT_JUMP, goTo: unix.NFT_GOTO, back: unix.NFT_RETURN, accept: 1, drop: 0}
	w.expression("immediate", func() {
		d := w.Tx.Open(unix.NFTA_IMMEDIATE_DATA)
		v := w.Tx.Open(unix.NFTA_DATA_VERDICT)
		w.Tx.Uint32(unix.NFTA_VERDICT_CODE, uint32(codes[do.verb]))
		if do.name != "" {
			w.Tx.Text(unix.NFTA_VERDICT_CHAIN, do.name)
		}
		w.Tx.Close(v)
		w.Tx.Close(d)
	}, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
}

func (w writer) extension(kind string, x extension) {
	w.expression(kind, func() {
		w.Tx.Text(extensionName, x.name)
		w.Tx.Uint32(extensionRevision, uint32(x.revision))
		w.Tx.Bytes(extensionInfo, x.info)
	})
}

// prefix compares the first bits of an address.
func (w writer) prefix(offset uint32, p netip.Prefix, differs bool) {
	address, bits := p.Addr().AsSlice(), p.Bits()
	n := uint32(len(address))
	w.expression("payload", func() {}, unix.NFTA_PAYLOAD_DREG, unix.NFT_REG_1,
		unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER, unix.NFTA_PAYLOAD_OFFSET, offset, unix.NFTA_PAYLOAD_LEN, n)
	if bits < 8*len(address) {
		w.expression("bitwise", func() {
			mask := make([]byte, len(address))
			putMask(mask, bits)
			w.value(unix.NFTA_BITWISE_MASK, mask)
			w.value(unix.NFTA_BITWISE_XOR, make([]byte, len(address)))
		}, unix.NFTA_BITWISE_SREG, unix.NFT_REG_1, unix.NFTA_BITWISE_DREG, unix.NFT_REG_1, unix.NFTA_BITWISE_LEN, n)
	}
	w.compare(differs, address)
}

func (w writer) value(kind uint16, data []byte) {
	v := w.Tx.Open(kind)
	w.Tx.Bytes(unix.NFTA_DATA_VALUE, data)
	w.Tx.Close(v)
}

func (w writer) meta(key uint32) {
	w.expression("meta", func() {}, unix.NFTA_META_DREG, unix.NFT_REG_1, unix.NFTA_META_KEY, key)
}

func (w writer) compare(differs bool, data []byte) {
	op := uint32(unix.NFT_CMP_EQ)
	if differs {
		op = unix.NFT_CMP_NEQ
	}
	w.expression("cmp", func() { w.value(unix.NFTA_CMP_DATA, data) },
		unix.NFTA_CMP_SREG, unix.NFT_REG_1, unix.NFTA_CMP_OP, op)
}

// commit sends the transaction, in parts if it is large, and empties it.
func (n *nfTables) commit(tx *nft.Transaction) error {
	n.loaded = 0
	for steps := range tx.Chunks(n.Socket, chunkSize) {
		if err := explain(n.Send(tx, steps)); err != nil {
			return err
		}
	}
	tx.B, tx.Steps = tx.B[:0], tx.Steps[:0]
	return nil
}

// explain tells apart what is about a rule.
func explain(err error) error {
	var r *nft.Refusal
	switch {
	case !errors.As(err, &r), r.Verb == 0:
		return err
	case !errors.Is(err, unix.ENOENT):
		return judged(r.Step, r.Unwrap())
	case r.Verb == unix.NFT_MSG_NEWRULE: // the chain is there: it was flushed just before
		return &refusedError{r.Step, fmt.Errorf("%w: a chain, or a module for a match or target of it", unix.ENOENT)}
	}
	return err // another program has deleted the object
}

// probe implements backend. The rules' parts must be there as extensions of nf_tables' compatibility.
func (n *nfTables) probe(v6 bool) error {
	address := netip.IPv4Unspecified()
	if v6 {
		address = netip.IPv6Unspecified()
	}
	const chain = "KUBE-SVC-PROBE"
	for _, r := range []rule{
		{unmarked: 1, notState: stateDNAT, do: target{verb: orMark, mark: 1}},
		{protocol: model.TCP, ports: ports{1, 2}, chance: 1, do: target{verb: dnat, to: netip.AddrPortFrom(address, 1)}},
		{do: target{verb: masquerade}},
	} {
		c := newChange(tableID{v6, tableNames[nat]})
		c.set[chain] = []rule{r}
		w := n.writer(&nft.Transaction{}, c)
		w.prepare()
		if err := w.chainRules(chain); err != nil {
			return err
		}
		if err := explain(w.Tx.Check(n.Socket)); err != nil {
			return fmt.Errorf("%s: %w", r, err)
		}
	}
	return nil
}

// tidy deletes what we made for lack of it: the kernel's chains, if they are empty, and their table.
func (n *nfTables) tidy(id tableID) error {
	w := n.writer(&nft.Transaction{}, newChange(id))
	empty, all := []string{}, 0
	reset := func() { empty, all = nil, 0 }
	err := n.Dump(w.Listing(unix.NFT_MSG_GETCHAIN, reset, func(attrs []byte) {
		all++
		used := nfnetlink.Uint32(attrs, unix.NFTA_CHAIN_USE)
		if used == 0 && bytes.Equal(nfnetlink.Attribute(attrs, nft.ChainUserData), nft.OurData()) {
			empty = append(empty, nfnetlink.Text(attrs, unix.NFTA_CHAIN_NAME))
		}
	}))
	if err != nil {
		return err
	}
	for _, name := range empty {
		w.deleteChain(name)
	}
	made := false
	err = n.Get(w.Listing(unix.NFT_MSG_GETTABLE, nil, func(attrs []byte) {
		made = bytes.Equal(nfnetlink.Attribute(attrs, nft.TableUserData), nft.OurData())
	}))
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if made && all == len(empty) {
		w.Delete()
	}
	return n.commit(w.Tx)
}
