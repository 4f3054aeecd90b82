package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/model"
)

// tableName is the name of our table in each family. We own what is in it, and nothing else.
const tableName = "fairlead"

// table is what we know of our table of one family in the kernel. Its methods append the steps that
// change the kernel to a transaction and assume that they will be done.
type table struct {
	nf.Table
	internals      int  // frontends of scope Internal
	localnet       bool // some frontend is on 127.0.0.0/8
	localnetIsOn   bool
	localnetWasOff bool // and it was another plane that set it

	rows    map[model.Key]row
	pools   map[model.PoolID]*pool
	classes map[class]*classUse
	byID    map[uint32]class
	names   map[uint32]model.PoolID // by number, for people; made when first asked
	members [numSets]members        // of the sets that are no maps
	found   found
	spans   [numSets][]string // members of the interval sets that belong to no row

	numbers  ids // of pools
	classIDs ids
	stickies ids // sticky numbers of pools with affinity

	backends map[handle]netip.AddrPort // elements of the map of that name
	stale    []staleHandle
	surplus  []surplus
	recheck  bool // the memory of affinity may hold more than stale handles
}

// row is a frontend in the kernel.
type row struct {
	token nf.Token
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
	sources map[model.Key][]string      // keys of elements, by frontend
	slots   map[uint32][]netip.AddrPort // by pool number
	choices map[uint32][]handle         // by pool number
	classes map[string]uint32           // id by name of chain
}

func newTable(f nf.Family, mark uint32, tx *nf.Transaction) *table {
	t := &table{
		Table: nf.Table{
			Family: f, Name: tableName, Mark: mark, Sets: sets(f), Tx: tx,
			FoundSets: map[string]bool{}, Chains: map[string][]string{},
		},
		rows: map[model.Key]row{}, pools: map[model.PoolID]*pool{},
		classes: map[class]*classUse{}, byID: map[uint32]class{},
		found:    found{map[model.Key][]string{}, map[uint32][]netip.AddrPort{}, map[uint32][]handle{}, map[string]uint32{}},
		numbers:  ids{next: 1, max: nf.MaxNumber},
		classIDs: ids{next: 1, max: nf.MaxClass},
		stickies: ids{next: minSticky, first: minSticky, max: maxSticky},
		backends: map[handle]netip.AddrPort{},
	}
	for i := range t.members {
		t.members[i] = members{}
	}
	t.Describe, t.Row = t.describe, t.row
	return t
}

func (t *table) structure() error { return t.Structure(t.constantChains()) }

// ids hands out numbers. Those given back are handed out again after the next settle, because the
// kernel may hold elements under them until the transaction is done.
type ids struct {
	first, next uint32
	max         uint32
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
	for id := max(i.first, 1); id < i.next; id++ {
		if !taken[id] {
			i.free = append(i.free, id)
		}
	}
}

// setFrontend makes the kernel hold a frontend. It holds the frontend's pool already.
func (t *table) setFrontend(key model.Key, f model.Frontend, of model.Pool) error {
	c := classOf(key, f, of)
	p := t.pools[f.Pool]
	if f.Verdict == model.Forward {
		if p == nil {
			return fmt.Errorf("frontend %s: its pool %s is not in the kernel", key, f.Pool)
		}
		c.slots = len(p.slots)
	}
	// Sources are let in before the frontend asks for them, and go when it does not ask any more.
	old, set := t.sourcesOf(key), sources+int(key.Scope)
	if c.limited {
		t.replace(set, old, nf.EncodeSources(key, f.Allow))
	}
	if err := t.setToken(key, c, p); err != nil {
		return err
	}
	if !c.limited {
		t.replace(set, old, nil)
	}
	r := t.rows[key]
	r.allow = f.Allow
	t.rows[key] = r
	return nil
}

// classOf is the class of a frontend, but for the number of its slots.
func classOf(key model.Key, f model.Frontend, of model.Pool) class {
	c := class{verdict: f.Verdict, snat: f.SNAT, affinity: of.Affinity}
	if f.Allow != nil {
		c.limited, c.scope = true, key.Scope
	}
	return c
}

// setToken leads packets for key to the chain of a class, with the number of a pool.
func (t *table) setToken(key model.Key, c class, p *pool) error {
	id, err := t.use(c)
	if err != nil {
		return fmt.Errorf("frontend %s: %w", key, err)
	}
	now := nf.NewToken(id, 0)
	if p != nil {
		now = nf.NewToken(id, p.number)
	}
	old, replaces := t.rows[key]
	if !replaces {
		t.internals += int(key.Scope)
	}
	t.rows[key] = row{token: now, pool: p, allow: old.allow}
	old.unlink(key, p)
	t.unuse(old)
	switch {
	case old.token == now:
		return nil
	case replaces:
		t.Element(unix.NFT_MSG_DELSETELEM, frontends+int(key.Scope), nf.EncodeKey(key), nil)
		t.Tx.Join()
	}
	t.Element(unix.NFT_MSG_NEWSETELEM, frontends+int(key.Scope), nf.EncodeKey(key), nf.Native(uint32(now)))
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
	t.Element(unix.NFT_MSG_DELSETELEM, frontends+int(key.Scope), nf.EncodeKey(key), nil)
	t.replace(sources+int(key.Scope), t.sourcesOf(key), nil)
	old.unlink(key, nil)
	t.unuse(old)
	t.internals -= int(key.Scope)
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
	if err := t.SetChain(t.classChain(c)); err != nil {
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
	if c, ok := t.byID[r.token.Class()]; ok && !r.found {
		t.classes[c].users--
	}
}

// maxSpare is how many classes without users are kept. A pool that comes back to a former size finds
// its class there. To make one anew is cheap for us but not for the kernel, which examines all
// elements of a map when a chain refers to it for the first time (nf_tables_bind_set in the kernel's
// net/netfilter/nf_tables_api.c): some 50 ns for each.
const maxSpare = 512

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
	t.DeleteChain(name)
	t.classIDs.give(id)
}

func (t *table) classElement(verb uint16, id uint32, chain string) {
	t.Element(verb, classes, nf.Native(uint32(nf.NewToken(id, 0))), []byte(chain))
}
