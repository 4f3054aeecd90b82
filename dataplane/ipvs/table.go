package ipvs

import (
	"cmp"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// tableName is the name of our table in each family. We own what is in it, and nothing else.
const tableName = "fairlead-ipvs"

// table is what we know of our table of one family in the kernel. Its methods append the steps that
// change the kernel to a transaction and assume that they will be done.
type table struct {
	nft.Table
	elements [numSets]map[string]*element
	former   map[string]bool // records of virtual servers in the table that this one replaces; nil: there is none

	entries  map[any][]entry // what each row needs; by its key
	classes  map[class]*classUse
	classOf  map[model.Key]class // of frontends
	takenIDs map[uint32]bool     // of classes
	foundIDs map[string]uint32   // of those, by name of chain, which nobody has claimed yet
	memories map[uint32]bool     // numbers of pools that have one
}

// element is one in the kernel. Rows may share it.
type element struct {
	data  string
	users int // 0: load found it, and nobody has asked for it
}

// entry is an element that a row needs, as nft.Table wants it.
type entry struct {
	set       int
	key, data string
}

func newTable(f nft.Family, mark uint32, tx *nft.Transaction) *table {
	t := &table{
		Table: nft.Table{
			Family: f, Name: tableName, Mark: mark, Sets: sets(f), Tx: tx,
			FoundSets: map[string]bool{}, Chains: map[string][]string{},
		},
		entries: map[any][]entry{}, classes: map[class]*classUse{}, classOf: map[model.Key]class{},
		takenIDs: map[uint32]bool{}, foundIDs: map[string]uint32{}, memories: map[uint32]bool{},
	}
	t.Own = t.ownSet
	for i := range t.elements {
		t.elements[i] = map[string]*element{}
	}
	return t
}

func newTables(mark uint32, tx *nft.Transaction) (tables []*table) {
	for _, f := range nft.Families {
		tables = append(tables, newTable(f, mark, tx))
	}
	return tables
}

// commit performs the steps, but for a few that the kernel refuses: the error is then dataplane.ErrPartial.
func (p *Plane) commit(t *nft.Transaction) error {
	err := t.Commit(p.conn, func(steps []nft.Step) error { return p.send(t, steps) })
	*t = nft.Transaction{}
	return err
}

// send performs steps as one kernel transaction: all or none of them.
func (p *Plane) send(t *nft.Transaction, steps []nft.Step) error {
	if err := p.config.Inject("nftables commit"); err != nil {
		return err
	}
	err := t.Send(p.conn, steps)
	if err == nil {
		p.own++
	}
	return err
}

// set makes a row need these elements, and no longer those that it needed before.
func (t *table) set(row any, now []entry) {
	old := t.entries[row]
	if t.entries[row] = now; len(now) == 0 {
		delete(t.entries, row)
	}
	had, stays := placesOf(old), placesOf(now)
	gone := slices.DeleteFunc(slices.Clone(old), func(e entry) bool { return stays[e.place()] })
	for _, e := range gone { // a range must not overlap one that is still there
		if t.Sets[e.set].Interval() && t.release(e) {
			t.Tx.Join()
		}
	}
	for _, e := range now {
		t.need(e, had[e.place()])
	}
	for _, e := range gone {
		if !t.Sets[e.set].Interval() {
			t.release(e)
		}
	}
}

// place is where an entry is: in one set there is one of a key.
func (e entry) place() entry { return entry{set: e.set, key: e.key} }

func placesOf(entries []entry) map[entry]bool {
	if len(entries) == 0 {
		return nil
	}
	places := make(map[entry]bool, len(entries))
	for _, e := range entries {
		places[e.place()] = true
	}
	return places
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
		t.Tx.Join()
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
		if t.Sets[i].Interval() != intervals {
			continue
		}
		for key, e := range elements {
			if e.users == 0 && !wanted(i, key) {
				t.element(unix.NFT_MSG_DELSETELEM, entry{i, key, e.data})
				delete(elements, key)
				if intervals {
					t.Tx.Join()
				}
			}
		}
	}
}

func (t *table) element(verb uint16, e entry) { t.Element(verb, e.set, []byte(e.key), []byte(e.data)) }

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
	if err := t.SetChain(t.classChain(c)); err != nil {
		return 0, err
	}
	if id = cmp.Or(t.foundIDs[name], t.freeID()); id > nft.MaxClass {
		return 0, fmt.Errorf("more than %d different ways to treat connections", nft.MaxClass)
	}
	delete(t.foundIDs, name)
	t.takenIDs[id] = true
	t.classes[c] = &classUse{id, 1}
	key := string(nft.Native(uint32(nft.NewToken(id, 0))))
	t.set(c, []entry{{classes, key, name}})
	return id, nil
}

func (t *table) freeID() (id uint32) {
	for id = 1; t.takenIDs[id]; {
		id++
	}
	return id
}

// sweepChains deletes what nobody uses any more: the elements that lead to chains first.
func (t *table) sweepChains(r *rows) {
	for c, u := range t.classes {
		if u.users == 0 {
			t.set(c, nil)
			delete(t.classes, c)
			delete(t.takenIDs, u.id)
		}
	}
	t.sweepSessions(r)
	keep := map[string]bool{}
	for c := range t.classes {
		keep[c.chain()] = true
	}
	for number := range t.memories {
		keep[ownName(recallPrefix, number)], keep[ownName(rememberPrefix, number)] = true, true
	}
	t.SweepChains(keep)
}

// structure makes the chains that do not depend on the rows, but for Pods.Interfaces.
func (t *table) structure() error { return t.Structure(t.constantChains()) }

// foundation makes those that others lead to. What the kernel calls itself comes after the rows: another plane may be
// in force, and until then no packet is refused because its row is not there yet.
func (t *table) foundation() error {
	hooked := func(c nft.Chain) bool { return c.Hook != nil }
	return t.Structure(slices.DeleteFunc(t.constantChains(), hooked))
}
