package ipvs

import (
	"fmt"
	"slices"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// tableName is the name of our table in each family. We own what is in it, and nothing else.
const tableName = "fairlead-ipvs"

// table is what we know of our table of one family in the kernel. Its methods append the steps that
// change the kernel to a transaction and assume that they will be done.
type table struct {
	nft.Table
	previous map[string]bool // records of virtual servers in the table that this one replaces; nil: there is none
	classes  map[class]*classUse
	classOf  map[model.Key]class // of frontends
	takenIDs map[uint32]bool     // of classes
	foundIDs map[string]uint32   // of those, by name of chain, which no row has claimed yet
	memories map[uint32]bool     // numbers of pools that have one
}

func newTable(f nft.Family, mark uint32, tx *nft.Transaction) *table {
	t := &table{
		Table:   nft.NewTable(nft.Table{Family: f, Name: tableName, Mark: mark, Sets: sets(f), Tx: tx}),
		classes: map[class]*classUse{}, classOf: map[model.Key]class{},
		takenIDs: map[uint32]bool{}, foundIDs: map[string]uint32{}, memories: map[uint32]bool{},
	}
	t.Form = t.ownSet
	for _, set := range []int{frontends, internalFrontends} {
		t.Sets[set].Counts = func(data []byte) bool { return refuses(nft.Token(nft.Number(data)).Class()) }
	}
	return t
}

func newTables(mark uint32, tx *nft.Transaction) (tables []*table) {
	for _, f := range nft.Families {
		tables = append(tables, newTable(f, mark, tx))
	}
	return tables
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
	if err := t.SetChain(t.classChain(c)); err != nil {
		return 0, err
	}
	if id = t.foundIDs[name]; id == 0 || c.refuses() != refuses(id) { // none, or that of an earlier version
		id = t.freeID(c)
	}
	if id > nft.MaxClass {
		return 0, fmt.Errorf("more than %d different ways to treat connections", nft.MaxClass)
	}
	if t.foundIDs[name] == id {
		delete(t.foundIDs, name)
	}
	t.takenIDs[id] = true
	t.classes[c] = &classUse{id, 1}
	key := string(nft.Native(uint32(nft.NewToken(id, 0))))
	t.Own(c, nft.Entry{Set: classes, Key: key, Data: name})
	return id, nil
}

// firstRefusal is the least number of classes that refuse all clients: elements that lead to these have a counter.
const firstRefusal = (nft.MaxClass + 1) / 2

func refuses(id uint32) bool { return id >= firstRefusal }

func (t *table) freeID(c class) (id uint32) {
	if id = 1; c.refuses() {
		id = firstRefusal
	}
	for t.takenIDs[id] {
		id++
	}
	return id
}

// sweepChains deletes what no row uses any more: the elements that lead to chains first.
func (t *table) sweepChains(r *rows) {
	for c, u := range t.classes {
		if u.users == 0 {
			t.Own(c)
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

// foundation makes those that others lead to. The chains with hooks come after the rows: another plane may be in force,
// and until then no packet is refused because its row is not there yet.
func (t *table) foundation() error {
	hooked := func(c nft.Chain) bool { return c.Hook != nil }
	return t.Structure(slices.DeleteFunc(t.constantChains(), hooked))
}
