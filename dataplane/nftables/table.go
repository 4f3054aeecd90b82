package nftables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// table is what we know of our table of one family in the kernel. Its methods append the steps that
// change the kernel to a transaction and assume that they will be done.
type table struct {
	family        family
	name          string
	mark          uint32
	podInterfaces []string
	localnet      bool // some frontend is on 127.0.0.0/8
	localnetIsOn  bool

	sets      []*set
	exists    bool
	foreign   bool // made by another version: to be replaced, not taken over
	foundSets map[string]bool
	chains    map[string][]string // by name: the marks of the rules

	rows    map[model.Key]row
	pools   map[model.PoolID]*pool
	classes map[class]*classUse
	byID    map[uint32]class
	members [numSets]members // of the sets that are no maps
	found   found
	spans   [numSets][]string // members of the interval sets that belong to no row

	numbers  ids // of pools
	classIDs ids
	stickies ids // sticky numbers of pools with affinity

	backends map[handle]netip.AddrPort // elements of the map of that name
	stale    []staleHandle
	recheck  bool // the memory of affinity may hold more than stale handles

	tx *transaction
}

// row is a frontend in the kernel.
type row struct {
	token token
	pool  *pool // nil: none
	allow []netip.Prefix
	found bool // by load: only the token is known, and the class does not count it among its users
}

type classUse struct {
	id    uint32
	users int
}

// found is what load saw in the kernel and nobody has claimed yet.
type found struct {
	slots   map[uint32][]netip.AddrPort // by pool number
	choices map[uint32][]handle         // by pool number
	classes map[string]uint32           // id by name of chain
}

// members counts who needs each element of a set, by its encoded key. An element that nobody needs
// any more is deleted at once; one that load found has no user until somebody asks for it.
type members map[string]int

func newTable(f family, mark uint32) *table {
	t := &table{
		family: f, name: tableName, mark: mark, sets: f.sets(),
		foundSets: map[string]bool{}, chains: map[string][]string{},
		rows: map[model.Key]row{}, pools: map[model.PoolID]*pool{},
		classes: map[class]*classUse{}, byID: map[uint32]class{},
		found:    found{map[uint32][]netip.AddrPort{}, map[uint32][]handle{}, map[string]uint32{}},
		numbers:  ids{next: 1, max: maxNumber},
		classIDs: ids{next: 1, max: maxClass},
		stickies: ids{next: 1, max: maxSticky},
		backends: map[handle]netip.AddrPort{},
	}
	for i := range t.members {
		t.members[i] = members{}
	}
	return t
}

// ids hands out numbers. Those given back are handed out again after the next settle, because the
// kernel may hold elements under them until the transaction is done.
type ids struct {
	next, max   uint32
	free, given []uint32
}

var errTooMany = errors.New("too many different pools or ways to treat them")

func (i *ids) take() (uint32, error) {
	if n := len(i.free); n > 0 {
		id := i.free[n-1]
		i.free = i.free[:n-1]
		return id, nil
	}
	if i.next > i.max {
		return 0, errTooMany
	}
	i.next++
	return i.next - 1, nil
}

func (i *ids) give(id uint32) { i.given = append(i.given, id) }

func (i *ids) settle() { i.free, i.given = append(i.free, i.given...), nil }

// reserve marks ids as taken; it is called once, before any take.
func (i *ids) reserve(taken map[uint32]bool) {
	for id := range taken {
		i.next = max(i.next, id+1)
	}
	for id := uint32(1); id < i.next; id++ {
		if !taken[id] {
			i.free = append(i.free, id)
		}
	}
}

// setFrontend makes the kernel hold a frontend. It holds the frontend's pool already.
func (t *table) setFrontend(key model.Key, f model.Frontend, affinity time.Duration) error {
	c := class{verdict: f.Verdict}
	p := t.pools[f.Pool]
	if f.Verdict == model.Forward {
		if p == nil {
			return fmt.Errorf("frontend %s: its pool %s is not in the kernel", key, f.Pool)
		}
		c.slots, c.snat, c.affinity = len(p.slots), f.SNAT, affinity
	}
	if f.Allow != nil {
		c.limited, c.scope = true, key.Scope
	}
	// A source that is new is let in before the frontend asks for it, one that is gone is shut out
	// at once.
	t.replace(sources+int(key.Scope), t.encodeSources(key, t.rows[key].allow), t.encodeSources(key, f.Allow))
	if err := t.setToken(key, c, p); err != nil {
		return err
	}
	r := t.rows[key]
	r.allow = f.Allow
	t.rows[key] = r
	return nil
}

// setToken leads packets for key to the chain of a class, with the number of a pool.
func (t *table) setToken(key model.Key, c class, p *pool) error {
	id, err := t.use(c)
	if err != nil {
		return fmt.Errorf("frontend %s: %w", key, err)
	}
	now := newToken(id, 0)
	if p != nil {
		now = newToken(id, p.number)
	}
	old, replaces := t.rows[key]
	t.rows[key] = row{token: now, pool: p, allow: old.allow}
	old.unlink(key, p)
	t.unuse(old)
	switch {
	case old.token == now:
		return nil
	case replaces:
		t.element(unix.NFT_MSG_DELSETELEM, frontends+int(key.Scope), encodeKey(key), nil)
		t.tx.join()
	}
	t.element(unix.NFT_MSG_NEWSETELEM, frontends+int(key.Scope), encodeKey(key), native(uint32(now)))
	return nil
}

// unlink moves the key of a row from the users of its old pool to those of the new one.
func (r row) unlink(key model.Key, now *pool) {
	if r.pool == now {
		return
	}
	if r.pool != nil {
		r.pool.users = slices.DeleteFunc(r.pool.users, func(k model.Key) bool { return k == key })
	}
	if now != nil {
		now.users = append(now.users, key)
	}
}

func (t *table) deleteFrontend(key model.Key) {
	old, ok := t.rows[key]
	if !ok {
		return
	}
	t.element(unix.NFT_MSG_DELSETELEM, frontends+int(key.Scope), encodeKey(key), nil)
	t.replace(sources+int(key.Scope), t.encodeSources(key, old.allow), nil)
	old.unlink(key, nil)
	t.unuse(old)
	delete(t.rows, key)
}

// use finds or makes the chain of a class, and counts one more user.
func (t *table) use(c class) (id uint32, err error) {
	if u := t.classes[c]; u != nil {
		u.users++
		return u.id, nil
	}
	name := c.chain()
	id, adopted := t.found.classes[name]
	if !adopted {
		if id, err = t.classIDs.take(); err != nil {
			return 0, err
		}
	}
	delete(t.found.classes, name)
	if err := t.setChain(t.classChain(c)); err != nil {
		return 0, err
	}
	if !adopted {
		t.classElement(unix.NFT_MSG_NEWSETELEM, id, name)
	}
	t.classes[c] = &classUse{id: id, users: 1}
	t.byID[id] = c
	return id, nil
}

// unuse counts one user of a row's class less.
func (t *table) unuse(r row) {
	if c, ok := t.byID[r.token.class()]; ok && !r.found {
		t.classes[c].users--
	}
}

// maxSpare is how many classes without users are kept. A pool that comes back to a former size finds
// its class there. To make one anew is cheap for us but not for the kernel, which examines all
// elements of a map when a chain refers to it for the first time (nf_tables_bind_set in the kernel's
// net/netfilter/nf_tables_api.c): some 50 ns for each.
const maxSpare = 256

// sweepClasses deletes the chains of classes that nobody uses any more, if there are too many.
func (t *table) sweepClasses() {
	if len(t.classes)+len(t.found.classes) <= maxSpare {
		return
	}
	for c, u := range t.classes {
		if u.users == 0 {
			t.deleteClass(u.id, c.chain())
			delete(t.classes, c)
			delete(t.byID, u.id)
		}
	}
	for name, id := range t.found.classes {
		t.deleteClass(id, name)
	}
	clear(t.found.classes)
}

func (t *table) deleteClass(id uint32, name string) {
	t.classElement(unix.NFT_MSG_DELSETELEM, id, name)
	t.deleteChain(name)
	t.classIDs.give(id)
}

func (t *table) classElement(verb uint16, id uint32, chain string) {
	t.beginElement(verb, classes, native(uint32(newToken(id, 0))), nil)
	if verb == unix.NFT_MSG_NEWSETELEM {
		data := t.tx.open(unix.NFTA_SET_ELEM_DATA)
		verdict := t.tx.open(unix.NFTA_DATA_VERDICT)
		t.tx.uint32(unix.NFTA_VERDICT_CODE, uint32(0xffffffff&int64(unix.NFT_GOTO)))
		t.tx.string(unix.NFTA_VERDICT_CHAIN, chain)
		t.tx.close(verdict)
		t.tx.close(data)
	}
	t.endElement()
}

// need counts one more user of an element, and adds it if it is the first.
func (t *table) need(s int, key string) {
	n, ok := t.members[s][key]
	t.members[s][key] = n + 1
	if !ok {
		t.member(unix.NFT_MSG_NEWSETELEM, s, key)
	}
}

// release counts one user less, and deletes the element if it was the last.
func (t *table) release(s int, key string) {
	if t.members[s][key]--; t.members[s][key] <= 0 {
		t.member(unix.NFT_MSG_DELSETELEM, s, key)
		delete(t.members[s], key)
	}
}

// sweepMembers deletes the elements that load found and nobody needs.
func (t *table) sweepMembers() {
	for s := range t.members {
		for key, n := range t.members[s] {
			if n == 0 {
				t.member(unix.NFT_MSG_DELSETELEM, s, key)
				delete(t.members[s], key)
			}
		}
	}
}

// member adds or deletes an element of a set that is no map. In interval sets the key holds the
// first and the last address of the range, in the others it is the element's key.
func (t *table) member(verb uint16, s int, key string) {
	k := []byte(key)
	if !t.sets[s].interval() {
		t.element(verb, s, k, nil)
		return
	}
	n := int(t.family.address.size)
	first, last := k[:len(k)-n], k[len(k)-n:]
	if t.sets[s].flags&setConcat != 0 {
		t.beginElement(verb, s, first, append(slices.Clone(first[:len(first)-n]), last...))
		t.endElement()
		return
	}
	t.element(verb, s, first, nil)
	end, _ := netip.AddrFromSlice(last)
	if end = end.Next(); end.IsValid() { // a range that reaches the last address has no end element
		t.tx.join()
		t.beginElement(verb, s, end.AsSlice(), nil)
		t.tx.uint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
		t.endElement()
	}
}

// element appends a step for one element; data may be nil.
func (t *table) element(verb uint16, s int, key, data []byte) {
	t.beginElement(verb, s, key, nil)
	if data != nil {
		d := t.tx.open(unix.NFTA_SET_ELEM_DATA)
		t.tx.attr(unix.NFTA_DATA_VALUE, data)
		t.tx.close(d)
	}
	t.endElement()
}

// beginElement opens a step for one element of which more attributes follow. keyEnd is the upper end
// of a concatenated range.
func (t *table) beginElement(verb uint16, s int, key, keyEnd []byte) {
	var flags uint16
	if verb == unix.NFT_MSG_NEWSETELEM {
		flags = unix.NLM_F_CREATE
	}
	t.tx.begin(verb, flags, t)
	t.tx.steps[len(t.tx.steps)-1].set = t.sets[s]
	t.tx.open(unix.NFTA_LIST_ELEM)
	k := t.tx.open(unix.NFTA_SET_ELEM_KEY)
	t.tx.attr(unix.NFTA_DATA_VALUE, key)
	t.tx.close(k)
	if keyEnd != nil {
		k = t.tx.open(attrKeyEnd)
		t.tx.attr(unix.NFTA_DATA_VALUE, keyEnd)
		t.tx.close(k)
	}
}

func (t *table) endElement() {
	t.tx.close(t.tx.steps[len(t.tx.steps)-1].from)
	t.tx.end()
}

// encodeSources are the keys of the elements that allow sources to reach a frontend.
func (t *table) encodeSources(key model.Key, allow []netip.Prefix) (keys []string) {
	for _, p := range allow {
		if p.Addr().Is6() == key.Addr.Is6() {
			keys = append(keys, string(encodeKey(key))+interval(p))
		}
	}
	return keys
}

// interval is the first and the last address of a prefix, encoded.
func interval(p netip.Prefix) string {
	first := p.Masked().Addr().AsSlice()
	last := slices.Clone(first)
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return string(append(first, last...))
}

// replace makes some members of a set take the place of others. What is gone goes first, and in the
// same kernel transaction: a range must not overlap one that is still there.
func (t *table) replace(s int, old, now []string) {
	for _, key := range old {
		if !slices.Contains(now, key) {
			t.release(s, key)
			t.tx.join()
		}
	}
	for _, key := range now {
		if t.members[s][key] == 0 || !slices.Contains(old, key) {
			t.need(s, key)
		}
	}
}

// setSpans makes a set consist of these ranges.
func (t *table) setSpans(s int, now []string) {
	t.replace(s, t.spans[s], now)
	t.spans[s] = now
}

// setAddress makes an address a member of a set or not.
func (t *table) setAddress(s int, a netip.Addr, want bool) {
	key := string(a.AsSlice())
	switch n, ok := t.members[s][key]; {
	case want && n == 0:
		t.need(s, key)
	case !want && ok:
		t.release(s, key)
	}
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
	if exists && slices.Equal(have, marks) {
		return nil
	}
	if exists {
		t.flushChain(c.name)
	} else {
		t.newChain(c)
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
	t.tx.string(unix.NFTA_CHAIN_TABLE, t.name)
	t.tx.string(unix.NFTA_CHAIN_NAME, c.name)
	if c.hook != nil {
		h := t.tx.open(unix.NFTA_CHAIN_HOOK)
		t.tx.uint32(unix.NFTA_HOOK_HOOKNUM, c.hook.number)
		t.tx.uint32(unix.NFTA_HOOK_PRIORITY, uint32(c.hook.priority))
		t.tx.close(h)
		t.tx.string(unix.NFTA_CHAIN_TYPE, c.hook.kind)
	}
	t.tx.end()
}

func (t *table) flushChain(name string) {
	t.tx.begin(unix.NFT_MSG_DELRULE, 0, t)
	t.tx.string(unix.NFTA_RULE_TABLE, t.name)
	t.tx.string(unix.NFTA_RULE_CHAIN, name)
	t.tx.end()
}

func (t *table) deleteChain(name string) {
	t.flushChain(name)
	t.tx.join()
	t.tx.begin(unix.NFT_MSG_DELCHAIN, 0, t)
	t.tx.string(unix.NFTA_CHAIN_TABLE, t.name)
	t.tx.string(unix.NFTA_CHAIN_NAME, name)
	t.tx.end()
	delete(t.chains, name)
}

// Types of the items in a rule's user data: nft's own for the comment, and one that it skips.
const (
	userDataComment = 0
	userDataMark    = 0x46
)

func (t *table) newRule(chain string, r rule, body []byte, mark string) {
	user := []byte{userDataMark, byte(len(mark))}
	user = append(user, mark...)
	if r.comment != "" {
		user = append(user, userDataComment, byte(len(r.comment)+1))
		user = append(append(user, r.comment...), 0)
	}
	t.tx.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, t)
	t.tx.string(unix.NFTA_RULE_TABLE, t.name)
	t.tx.string(unix.NFTA_RULE_CHAIN, chain)
	t.tx.attr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, body)
	t.tx.attr(unix.NFTA_RULE_USERDATA, user)
	t.tx.end()
}

// ruleMark is the mark in a rule's user data; empty if the rule is not ours.
func ruleMark(user []byte) string {
	for len(user) >= 2 && len(user) >= 2+int(user[1]) {
		if user[0] == userDataMark {
			return string(user[2 : 2+user[1]])
		}
		user = user[2+user[1]:]
	}
	return ""
}

func (t *table) newTable() {
	t.tx.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, t)
	t.tx.string(unix.NFTA_TABLE_NAME, t.name)
	t.tx.end()
}

func (t *table) deleteTable() {
	t.tx.begin(unix.NFT_MSG_DELTABLE, 0, t)
	t.tx.string(unix.NFTA_TABLE_NAME, t.name)
	t.tx.end()
}

func (t *table) newSet(s *set) {
	t.tx.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, t)
	t.tx.string(unix.NFTA_SET_TABLE, t.name)
	t.tx.string(unix.NFTA_SET_NAME, s.name)
	t.tx.uint32(unix.NFTA_SET_FLAGS, s.flags)
	t.tx.uint32(unix.NFTA_SET_KEY_TYPE, kind(s.key))
	t.tx.uint32(unix.NFTA_SET_KEY_LEN, size(s.key))
	t.tx.uint32(unix.NFTA_SET_ID, s.id)
	switch {
	case s.data != nil:
		t.tx.uint32(unix.NFTA_SET_DATA_TYPE, kind(s.data))
		t.tx.uint32(unix.NFTA_SET_DATA_LEN, size(s.data))
	case s.flags&unix.NFT_SET_MAP != 0:
		t.tx.uint32(unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT)
	}
	desc := t.tx.open(unix.NFTA_SET_DESC)
	if s.maximum > 0 {
		t.tx.uint32(unix.NFTA_SET_DESC_SIZE, s.maximum)
	}
	if s.flags&setConcat != 0 {
		t.concatenation(s.key)
	}
	t.tx.close(desc)
	t.tx.end()
}

// concatenation describes the parts of the key to sets that look up ranges.
func (t *table) concatenation(key []field) {
	c := t.tx.open(setDescConcat)
	for _, f := range key {
		e := t.tx.open(unix.NFTA_LIST_ELEM)
		t.tx.uint32(setFieldLen, f.size)
		t.tx.close(e)
	}
	t.tx.close(c)
}

// structure makes the table, its sets and its constant chains.
func (t *table) structure() error {
	if !t.exists {
		t.newTable()
		t.exists = true
	}
	for _, s := range t.sets {
		if !t.foundSets[s.name] {
			t.newSet(s)
			t.foundSets[s.name] = true
		}
	}
	for _, c := range t.constantChains() {
		if err := t.setChain(c); err != nil {
			return err
		}
	}
	return nil
}

// describe names the object of a message that is not about elements.
func (t *table) describe(verb uint16, attrs []byte) string {
	text := "table " + t.family.name + " " + t.name
	switch verb {
	case unix.NFT_MSG_NEWSET, unix.NFT_MSG_DELSET:
		return text + ": set " + attributeString(attrs, unix.NFTA_SET_NAME)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		return text + ": chain " + attributeString(attrs, unix.NFTA_CHAIN_NAME)
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		return text + ": rules of chain " + attributeString(attrs, unix.NFTA_RULE_CHAIN)
	}
	return text
}

// describeElement names an element, given its NFTA_LIST_ELEM attribute.
func (t *table) describeElement(s *set, attr []byte) string {
	e := decodeElement(attr[4:])
	text := s.name + " "
	switch s.name {
	case "frontends", "internal-frontends":
		key, _ := decodeKey(e.key, model.Any)
		return fmt.Sprintf("%s %s/%s", text, key.AddrPort(), key.Protocol)
	case "slots", "choices":
		return text + t.describeSlot(e)
	case "backends":
		b, _ := decodeBackend(e.data)
		return fmt.Sprintf("%s %x %s", text, e.key, b)
	case "classes":
		return fmt.Sprintf("%s%d %s", text, token(binary.NativeEndian.Uint32(e.key)).class(), e.chain)
	}
	for n := int(t.family.address.size); len(e.key) >= n; e.key = e.key[n:] {
		a, _ := netip.AddrFromSlice(e.key[:n])
		text += a.String() + " "
	}
	return text[:len(text)-1]
}

func (t *table) describeSlot(e element) string {
	if len(e.key) < 8 {
		return "?"
	}
	number := binary.NativeEndian.Uint32(e.key)
	name := fmt.Sprintf("of pool number %d", number)
	for id, p := range t.pools {
		if p.number == number {
			name = "of pool " + id.String()
		}
	}
	name = fmt.Sprintf("%d %s", binary.NativeEndian.Uint32(e.key[4:]), name)
	if backend, ok := decodeBackend(e.data); ok {
		name += ": " + backend.String()
	}
	return name
}

// element is what the kernel lists of one.
type element struct {
	key, keyEnd, data []byte
	chain             string
	end               bool
}

func decodeElement(b []byte) (e element) {
	attributes(b, func(kind uint16, data []byte) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			e.key = attribute(data, unix.NFTA_DATA_VALUE)
		case attrKeyEnd:
			e.keyEnd = attribute(data, unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			e.data = attribute(data, unix.NFTA_DATA_VALUE)
			e.chain = attributeString(attribute(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CHAIN)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.end = len(data) == 4 && binary.BigEndian.Uint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		}
	})
	return e
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// span is a range of addresses, both ends included.
type span struct{ first, last netip.Addr }

func (s span) encode() string { return string(append(s.first.AsSlice(), s.last.AsSlice()...)) }

// flatten turns nested prefixes, of which the longest wins, into disjoint ranges for each verdict.
func flatten(guards map[netip.Prefix]model.Verdict) map[model.Verdict][]span {
	prefixes := slices.SortedFunc(maps.Keys(guards), func(a, b netip.Prefix) int {
		if c := bytes.Compare([]byte(interval(a)), []byte(interval(b))); c != 0 {
			return c
		}
		return 0
	})
	var starts []netip.Addr
	for _, p := range prefixes {
		s := prefixSpan(p)
		starts = append(starts, s.first)
		if next := s.last.Next(); next.IsValid() {
			starts = append(starts, next)
		}
	}
	slices.SortFunc(starts, netip.Addr.Compare)
	starts = slices.Compact(starts)
	spans := map[model.Verdict][]span{}
	for i, first := range starts {
		best := netip.Prefix{}
		for _, p := range prefixes {
			if p.Contains(first) && (!best.IsValid() || p.Bits() > best.Bits()) {
				best = p
			}
		}
		if !best.IsValid() {
			continue
		}
		last := prefixSpan(best).last
		if i+1 < len(starts) && !last.Less(starts[i+1]) {
			last = starts[i+1].Prev()
		}
		spans[guards[best]] = append(spans[guards[best]], span{first, last})
	}
	return spans
}

func prefixSpan(p netip.Prefix) span {
	b := []byte(interval(p))
	first, _ := netip.AddrFromSlice(b[:len(b)/2])
	last, _ := netip.AddrFromSlice(b[len(b)/2:])
	return span{first, last}
}
