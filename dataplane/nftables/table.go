package nftables

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// tableName is the name of our table in each family. We own what is in it, and nothing else.
const tableName = "fairlead"

// table is what we know of our table of one family in the kernel. Its methods append the steps that
// change the kernel to a transaction and assume that they will be done.
type table struct {
	nft.Table
	internals      int  // frontends of scope Internal
	localnet       bool // some frontend is on 127.0.0.0/8
	localnetIsOn   bool
	localnetWasOff bool // and it was another plane that set it

	rows    map[model.Key]row
	pools   map[model.PoolID]*pool
	sizes   map[size]bool              // that have their chains
	leads   [numSets]map[uint32]string // of the verdict maps: where they lead
	byName  map[uint32]model.PoolID    // by number, for people; made when first asked
	members [numSets]members           // of the sets that are no maps
	found   found
	spans   [numSets][]string // members of the interval sets that belong to no row

	numbers  ids // of pools
	stickies ids // of the names of pools

	backends map[handle]netip.AddrPort // elements of the map of that name
	stale    []staleHandle
	surplus  []surplus
	recheck  bool // the memory of affinity may hold more than stale handles
}

// row is a frontend in the kernel.
type row struct {
	token token
	class class // not by load
	pool  *pool // nil: none
	allow []netip.Prefix
	found bool // by load: only the token is known
}

// found is what load saw in the kernel and nobody has claimed yet.
type found struct {
	sources map[model.Key][]string      // keys of elements, by frontend
	slots   map[uint32][]netip.AddrPort // by pool number
	choices map[uint32][]handle         // by pool number, or handle of a block
}

func newTable(f nft.Family, mark uint32, tx *nft.Transaction) *table {
	t := &table{
		Table: nft.Table{
			Family: f, Name: tableName, Mark: mark, Sets: sets(f), Tx: tx,
			FoundSets: map[string]bool{}, Chains: map[string][]string{}, Serve: chainServe,
		},
		rows: map[model.Key]row{}, pools: map[model.PoolID]*pool{}, sizes: map[size]bool{},
		found:    found{map[model.Key][]string{}, map[uint32][]netip.AddrPort{}, map[uint32][]handle{}},
		numbers:  ids{next: 1, max: poolMask},
		stickies: ids{next: minSticky, first: minSticky, max: maxSticky},
		backends: map[handle]netip.AddrPort{},
	}
	for i := range t.members {
		t.members[i], t.leads[i] = members{}, map[uint32]string{}
	}
	t.Own, t.Describe, t.Row = t.ownSet, t.describe, t.row
	return t
}

func (t *table) structure() error {
	if err := t.Structure(t.constantChains()); err != nil {
		return err
	}
	for _, c := range allClasses() {
		t.lead(classes, c.id(), c.chain())
	}
	return nil
}

// ids hands out numbers. Those given back are handed out again after the next settle, because the
// kernel may hold elements under them until the transaction is done.
type ids struct {
	first, next uint32
	max         uint32
	free, given []uint32
}

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

// left is how many can be taken.
func (i *ids) left() int { return len(i.free) + int(i.max+1-i.next) }

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
func (t *table) setFrontend(key model.Key, f model.Frontend) error {
	c, p := classOf(key, f), t.pools[f.Pool]
	if f.Verdict == model.Forward && p == nil {
		return fmt.Errorf("frontend %s: its pool %s is not in the kernel", key, f.Pool)
	}
	// Sources are let in before the frontend asks for them, and go when it does not ask any more.
	old, set := t.sourcesOf(key), sources+int(key.Scope)
	if c.limited {
		t.replace(set, old, nft.EncodeSources(key, f.Allow))
	}
	t.setToken(key, c, p)
	if !c.limited {
		t.replace(set, old, nil)
	}
	r := t.rows[key]
	r.allow = f.Allow
	t.rows[key] = r
	return nil
}

// setToken leads packets for key to the chain of a class, and to a slot of a pool, if there is one.
func (t *table) setToken(key model.Key, c class, p *pool) {
	now := token(c.id())
	if p != nil {
		now = newToken(c, p.size, p.number)
	}
	old, replaces := t.rows[key]
	if !replaces {
		t.internals += int(key.Scope)
	}
	t.rows[key] = row{token: now, class: c, pool: p, allow: old.allow}
	old.unlink(key, p)
	switch {
	case old.token == now:
		return
	case replaces:
		t.Element(unix.NFT_MSG_DELSETELEM, frontends+int(key.Scope), nft.EncodeKey(key), nil)
		t.Tx.Join()
	}
	t.Element(unix.NFT_MSG_NEWSETELEM, frontends+int(key.Scope), nft.EncodeKey(key), nft.Native(uint32(now)))
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
	t.Element(unix.NFT_MSG_DELSETELEM, frontends+int(key.Scope), nft.EncodeKey(key), nil)
	t.replace(sources+int(key.Scope), t.sourcesOf(key), nil)
	old.unlink(key, nil)
	t.internals -= int(key.Scope)
	delete(t.rows, key)
}
