package ipvs

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// tableName is the name of our table in each family. We own what is in it, and nothing else.
const tableName = "fairlead-ipvs"

// From include/uapi/linux/netfilter/nf_tables.h; x/sys/unix lacks them.
const (
	acceptPolicy  = 1    // NF_ACCEPT
	dynsetDelete  = 2    // NFT_DYNSET_OP_DELETE
	setConcat     = 0x80 // NFT_SET_CONCAT: ranges of concatenations
	setDescConcat = 2    // NFTA_SET_DESC_CONCAT
	setFieldLen   = 1    // NFTA_SET_FIELD_LEN
)

// table is what we know of our table of one family in the kernel. Its methods append the steps that
// change the kernel to a transaction and assume that they will be done.
type table struct {
	family        family
	name          string
	mark          uint32
	podInterfaces []string
	sets          []*set

	exists    bool
	foreign   bool // made by another version: to be replaced, not taken over
	foundSets map[string]bool
	chains    map[string][]string // by name: the marks of the rules
	elements  [numSets]map[string]*element
	former    map[string]bool // records of virtual servers in the table that this one replaces; nil: there is none

	entries  map[any][]entry // what each row needs; by its key
	classes  map[class]*classUse
	classOf  map[model.Key]class // of frontends
	takenIDs map[uint32]bool     // of classes
	foundIDs map[string]uint32   // of those, by name of chain, which nobody has claimed yet
	constant []string            // names of chains

	tx *transaction
}

// element is one in the kernel. Rows may share it.
type element struct {
	data  string
	users int // 0: load found it, and nobody has asked for it
}

// entry is an element that a row needs. Key and data are encoded; data is the name of a chain in a
// verdict map. The key of an interval is its first and last value.
type entry struct {
	set       int
	key, data string
}

func newTable(f family, mark uint32, tx *transaction) *table {
	t := &table{
		family: f, name: tableName, mark: mark, sets: f.sets(), tx: tx,
		foundSets: map[string]bool{}, chains: map[string][]string{},
		entries: map[any][]entry{}, classes: map[class]*classUse{}, classOf: map[model.Key]class{},
		takenIDs: map[uint32]bool{}, foundIDs: map[string]uint32{},
	}
	for i := range t.elements {
		t.elements[i] = map[string]*element{}
	}
	return t
}

// A step is one thing to do to the kernel: one element to add to or delete from a set, or the
// attributes of any other nf_tables message.
type step struct {
	verb     uint16 // NFT_MSG_*
	flags    uint16
	table    *table
	set      *set // elements only
	from, to int  // its attributes in the transaction's bytes
	joined   bool // the next step must be in the same kernel transaction
}

// transaction gathers steps in the order in which the kernel shall perform them.
type transaction struct {
	nfnetlink.Encoder
	steps []step
}

func (t *transaction) begin(verb, flags uint16, table *table) {
	t.steps = append(t.steps, step{verb: verb, flags: flags, table: table, from: len(t.B)})
}

func (t *transaction) end() { t.steps[len(t.steps)-1].to = len(t.B) }

// join ties the last step to the one that follows.
func (t *transaction) join() { t.steps[len(t.steps)-1].joined = true }

const (
	// chunkSize bounds one kernel transaction, and with it how long the ruleset's lock is held.
	chunkSize = 512 << 10
	// maxAttribute is the most that one list of elements may hold: its length is a uint16.
	maxAttribute = 1<<16 - 512
)

// commit performs the steps in as few kernel transactions as their size allows.
func (p *Plane) commit(t *transaction) error {
	size := min(chunkSize, p.conn.Room/2) // the other half is more than the headers of messages need
	for steps := t.steps; len(steps) > 0; {
		if err := p.fault("nftables commit"); err != nil {
			return err
		}
		n := t.chunk(steps, size)
		t.encode(p.conn.Begin(), steps[:n])
		if err := p.conn.Commit(); err != nil {
			return fmt.Errorf("change table %s: %w", tableName, err)
		}
		p.own++
		steps = steps[n:]
	}
	*t = transaction{}
	return nil
}

// chunk is how many of the steps make up the next kernel transaction.
func (t *transaction) chunk(steps []step, size int) int {
	for n := range steps {
		if steps[n].to-steps[0].from > size && n > 0 && !steps[n-1].joined {
			return n
		}
	}
	return len(steps)
}

func (t *transaction) encode(e *nfnetlink.Encoder, steps []step) {
	for i := 0; i < len(steps); {
		s := &steps[i]
		start := e.Message(nfnetlink.NFTables|s.verb, s.flags, s.table.family.number)
		if s.set == nil {
			e.B = append(e.B, t.B[s.from:s.to]...)
			i++
		} else {
			i += t.encodeElements(e, steps[i:])
		}
		e.Finish(start)
	}
}

// encodeElements appends the attributes of one message for as many of the steps as belong in it, and
// returns how many.
func (t *transaction) encodeElements(e *nfnetlink.Encoder, steps []step) (n int) {
	e.Text(unix.NFTA_SET_ELEM_LIST_TABLE, steps[0].table.name)
	e.Text(unix.NFTA_SET_ELEM_LIST_SET, steps[0].set.name)
	list := e.Open(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	for n < len(steps) && steps[n].verb == steps[0].verb && steps[n].set == steps[0].set &&
		len(e.B)-list+steps[n].to-steps[n].from <= maxAttribute {
		e.B = append(e.B, t.B[steps[n].from:steps[n].to]...)
		n++
	}
	e.Close(list)
	return n
}

// set makes a row need these elements, and no longer those that it needed before.
func (t *table) set(row any, now []entry) {
	old := t.entries[row]
	if t.entries[row] = now; len(now) == 0 {
		delete(t.entries, row)
	}
	same := func(e entry) func(entry) bool {
		return func(o entry) bool { return e.set == o.set && e.key == o.key }
	}
	gone := slices.DeleteFunc(slices.Clone(old), func(e entry) bool { return slices.ContainsFunc(now, same(e)) })
	for _, e := range gone { // a range must not overlap one that is still there
		if t.sets[e.set].interval() && t.release(e) {
			t.tx.join()
		}
	}
	for _, e := range now {
		t.need(e, slices.ContainsFunc(old, same(e)))
	}
	for _, e := range gone {
		if !t.sets[e.set].interval() {
			t.release(e)
		}
	}
}

// need counts one more user of an element, if it is one more, and makes the kernel hold it.
func (t *table) need(e entry, counted bool) {
	have := t.elements[e.set][e.key]
	switch {
	case have == nil:
		t.elements[e.set][e.key] = &element{e.data, 1}
		t.element(unix.NFT_MSG_NEWSETELEM, e)
		return
	case have.data != e.data:
		t.element(unix.NFT_MSG_DELSETELEM, e)
		t.tx.join()
		t.element(unix.NFT_MSG_NEWSETELEM, e)
		have.data = e.data
	}
	if !counted {
		have.users++
	}
}

// release counts one user less, and deletes the element if it was the last.
func (t *table) release(e entry) (deleted bool) {
	have := t.elements[e.set][e.key]
	if have == nil {
		return false
	}
	if have.users--; have.users > 0 {
		return false
	}
	t.element(unix.NFT_MSG_DELSETELEM, e)
	delete(t.elements[e.set], e.key)
	return true
}

// sweep deletes the elements that load found and that none of these rows needs; of interval sets at once,
// so that they are out of the way, of the others when all rows have theirs.
func (t *table) sweep(intervals bool, wanted func(set int, key string) bool) {
	for i, elements := range t.elements {
		if t.sets[i].interval() != intervals {
			continue
		}
		for key, e := range elements {
			if e.users == 0 && !wanted(i, key) {
				t.element(unix.NFT_MSG_DELSETELEM, entry{i, key, e.data})
				delete(elements, key)
				if intervals {
					t.tx.join()
				}
			}
		}
	}
}

// element appends the steps for an element.
func (t *table) element(verb uint16, e entry) {
	s := t.sets[e.set]
	key := []byte(e.key)
	if !s.interval() {
		t.keyed(verb, e.set, elementKey{first: key}, func() { t.data(verb, s, e.data) })
		return
	}
	n := int(t.family.address.size)
	first, last := key[:len(key)-n], key[len(key)-n:]
	if s.flags&setConcat != 0 {
		t.keyed(verb, e.set, elementKey{first, append(slices.Clone(first[:len(first)-n]), last...)}, func() {})
		return
	}
	t.keyed(verb, e.set, elementKey{first: first}, func() {})
	end, _ := netip.AddrFromSlice(last)
	if end = end.Next(); end.IsValid() { // a range that reaches the last address has no end element
		t.tx.join()
		t.keyed(verb, e.set, elementKey{first: end.AsSlice()}, func() {
			t.tx.Uint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
		})
	}
}

// elementKey is an element's key; end is the upper end of a concatenated range, else nil.
type elementKey struct{ first, end []byte }

// keyed appends a step for one element.
func (t *table) keyed(verb uint16, s int, k elementKey, rest func()) {
	var flags uint16
	if verb == unix.NFT_MSG_NEWSETELEM {
		flags = unix.NLM_F_CREATE | unix.NLM_F_EXCL // what is there already is not what we think
	}
	t.tx.begin(verb, flags, t)
	t.tx.steps[len(t.tx.steps)-1].set = t.sets[s]
	whole := t.tx.Open(unix.NFTA_LIST_ELEM)
	value := func(kind uint16, b []byte) {
		k := t.tx.Open(kind)
		t.tx.Bytes(unix.NFTA_DATA_VALUE, b)
		t.tx.Close(k)
	}
	value(unix.NFTA_SET_ELEM_KEY, k.first)
	if k.end != nil {
		value(nf.KeyEnd, k.end)
	}
	rest()
	t.tx.Close(whole)
	t.tx.end()
}

func (t *table) data(verb uint16, s *set, data string) {
	if verb != unix.NFT_MSG_NEWSETELEM || s.flags&unix.NFT_SET_MAP == 0 {
		return
	}
	d := t.tx.Open(unix.NFTA_SET_ELEM_DATA)
	if s.verdicts() {
		verdict := t.tx.Open(unix.NFTA_DATA_VERDICT)
		t.tx.Uint32(unix.NFTA_VERDICT_CODE, uint32(0xffffffff&int64(unix.NFT_GOTO)))
		t.tx.Text(unix.NFTA_VERDICT_CHAIN, data)
		t.tx.Close(verdict)
	} else {
		t.tx.Bytes(unix.NFTA_DATA_VALUE, []byte(data))
	}
	t.tx.Close(d)
}

// classUse is a class that the kernel has chains for.
type classUse struct {
	id    uint32
	users int // frontends
}

// use finds or makes the chains of a class, and counts one more user.
func (t *table) use(c class) (id uint32, err error) {
	if u := t.classes[c]; u != nil {
		u.users++
		return u.id, nil
	}
	name := c.chain()
	if err := t.setChain(t.classChain(c)); err != nil {
		return 0, err
	}
	if c.affinity > 0 {
		if err := t.setChain(t.learnerChain(c)); err != nil {
			return 0, err
		}
	}
	if id = cmp.Or(t.foundIDs[name], t.freeID()); id > maxClass {
		return 0, fmt.Errorf("more than %d different ways to treat connections", maxClass)
	}
	delete(t.foundIDs, name)
	t.takenIDs[id] = true
	t.classes[c] = &classUse{id, 1}
	key := string(native(uint32(newToken(id, 0))))
	entries := []entry{{classes, key, name}}
	if c.affinity > 0 {
		entries = append(entries, entry{learners, key, c.learner()})
	}
	t.set(c, entries)
	return id, nil
}

func (t *table) freeID() (id uint32) {
	for id = 1; t.takenIDs[id]; {
		id++
	}
	return id
}

// sweepClasses deletes what nobody uses any more: the elements that lead to chains first.
func (t *table) sweepClasses() {
	for c, u := range t.classes {
		if u.users == 0 {
			t.set(c, nil)
			delete(t.classes, c)
			delete(t.takenIDs, u.id)
		}
	}
	known := map[string]bool{}
	for _, name := range t.constant {
		known[name] = true
	}
	for c := range t.classes {
		known[c.chain()] = true
		known[c.learner()] = true
	}
	for name := range t.chains {
		if !known[name] {
			t.deleteChain(name)
		}
	}
}

// structure makes the table, its sets and its constant chains.
func (t *table) structure() error {
	if !t.exists {
		t.tx.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, t)
		t.tx.Text(unix.NFTA_TABLE_NAME, t.name)
		t.tx.end()
		t.exists = true
	}
	for _, s := range t.sets {
		if !t.foundSets[s.name] {
			t.newSet(s)
			t.foundSets[s.name] = true
		}
	}
	constant := t.constantChains()
	t.constant = t.constant[:0]
	for _, c := range constant { // before the rules that lead to them
		t.constant = append(t.constant, c.name)
		if _, exists := t.chains[c.name]; !exists {
			t.newChain(c)
			t.chains[c.name] = nil
		}
	}
	for _, c := range constant {
		if err := t.setChain(c); err != nil {
			return err
		}
	}
	return nil
}

func (t *table) deleteTable() {
	t.tx.begin(unix.NFT_MSG_DELTABLE, 0, t)
	t.tx.Text(unix.NFTA_TABLE_NAME, t.name)
	t.tx.end()
}

// setChain makes the kernel hold a chain with exactly these rules.
func (t *table) setChain(c chain) error {
	var marks []string
	var bodies [][]byte
	for _, r := range c.rules {
		body, mark, err := r.mark(t.family)
		if err != nil {
			return err
		}
		marks, bodies = append(marks, string(mark)), append(bodies, body)
	}
	have, exists := t.chains[c.name]
	switch {
	case exists && slices.Equal(have, marks):
		return nil
	case !exists:
		t.newChain(c)
	case len(have) > 0:
		t.flushChain(c.name)
	}
	for i, r := range c.rules {
		t.tx.join() // a chain is never seen without its rules
		t.newRule(c.name, r, bodies[i], marks[i])
	}
	t.chains[c.name] = marks
	return nil
}

func (t *table) newChain(c chain) {
	t.tx.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, t)
	t.tx.Text(unix.NFTA_CHAIN_TABLE, t.name)
	t.tx.Text(unix.NFTA_CHAIN_NAME, c.name)
	if c.hook != nil {
		h := t.tx.Open(unix.NFTA_CHAIN_HOOK)
		t.tx.Uint32(unix.NFTA_HOOK_HOOKNUM, c.hook.number)
		t.tx.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(c.hook.priority))
		t.tx.Close(h)
		t.tx.Text(unix.NFTA_CHAIN_TYPE, c.hook.kind)
	}
	t.tx.end()
	t.tx.join()
}

func (t *table) flushChain(name string) {
	t.tx.begin(unix.NFT_MSG_DELRULE, 0, t)
	t.tx.Text(unix.NFTA_RULE_TABLE, t.name)
	t.tx.Text(unix.NFTA_RULE_CHAIN, name)
	t.tx.end()
}

func (t *table) deleteChain(name string) {
	t.flushChain(name)
	t.tx.join()
	t.tx.begin(unix.NFT_MSG_DELCHAIN, 0, t)
	t.tx.Text(unix.NFTA_CHAIN_TABLE, t.name)
	t.tx.Text(unix.NFTA_CHAIN_NAME, name)
	t.tx.end()
	delete(t.chains, name)
}

func (t *table) newRule(chain string, r rule, body []byte, mark string) {
	t.tx.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, t)
	t.tx.Text(unix.NFTA_RULE_TABLE, t.name)
	t.tx.Text(unix.NFTA_RULE_CHAIN, chain)
	t.tx.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, body)
	t.tx.Bytes(unix.NFTA_RULE_USERDATA, nf.RuleUserData(mark, r.comment))
	t.tx.end()
}

func (t *table) newSet(s *set) {
	t.tx.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, t)
	t.tx.Text(unix.NFTA_SET_TABLE, t.name)
	t.tx.Text(unix.NFTA_SET_NAME, s.name)
	t.tx.Uint32(unix.NFTA_SET_FLAGS, s.flags)
	t.tx.Uint32(unix.NFTA_SET_KEY_TYPE, kind(s.key))
	t.tx.Uint32(unix.NFTA_SET_KEY_LEN, size(s.key))
	t.tx.Uint32(unix.NFTA_SET_ID, s.id)
	switch {
	case s.data != nil:
		t.tx.Uint32(unix.NFTA_SET_DATA_TYPE, kind(s.data))
		t.tx.Uint32(unix.NFTA_SET_DATA_LEN, size(s.data))
	case s.verdicts():
		t.tx.Uint32(unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT)
	}
	desc := t.tx.Open(unix.NFTA_SET_DESC)
	if s.maximum > 0 {
		t.tx.Uint32(unix.NFTA_SET_DESC_SIZE, s.maximum)
	}
	if s.flags&setConcat != 0 {
		t.concatenation(s.key)
	}
	t.tx.Close(desc)
	t.tx.Bytes(unix.NFTA_SET_USERDATA, s.userData())
	t.tx.end()
}

// userData tells nft, which prints them, that single keys and data of ours are in host byte order.
func (s *set) userData() (b []byte) {
	const keyByteOrder, dataByteOrder, host, network = 0, 1, 1, 2
	order := func(kind byte, fields []field) {
		o := byte(network)
		if len(fields) == 1 && fields[0] == priorityField {
			o = host
		}
		b = append(b, kind, 4, o, 0, 0, 0)
	}
	order(keyByteOrder, s.key)
	if s.data != nil {
		order(dataByteOrder, s.data)
	}
	return b
}

// concatenation describes the parts of the key to sets that look up ranges.
func (t *table) concatenation(key []field) {
	c := t.tx.Open(setDescConcat)
	for _, f := range key {
		e := t.tx.Open(unix.NFTA_LIST_ELEM)
		t.tx.Uint32(setFieldLen, f.size)
		t.tx.Close(e)
	}
	t.tx.Close(c)
}

func number(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}
