package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// tableName is the name of our table in each family. We own what is in it, and nothing else.
const tableName = "fairlead"

// table is what we know of our table of one family in the kernel. Its methods append the steps that
// change the kernel to a transaction and assume that they will be done.
type table struct {
	nft.Table
	detail         dataplane.Detail
	offloads       bool // there is a flowtable …
	left           bool // … which may have connections that do not belong there any more
	internals      int  // frontends of scope Internal
	localnet       bool // some frontend is on 127.0.0.0/8
	localnetIsOn   bool
	localnetWasOff bool // and it was another plane that set it

	rows   map[model.Key]row
	pools  map[model.PoolID]*pool
	sizes  map[size]bool           // that have their chains
	byName map[uint32]model.PoolID // by number, for people; made when first asked
	found  found

	shards   int // maps of slots; see shard.go
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
}

// found is what load saw of pools in the kernel and no pool has claimed yet.
type found struct {
	slots   map[uint32]packed   // by pool number
	choices map[uint32][]handle // by pool number, or handle of a block
}

func newTable(f nft.Family, mark uint32, tx *nft.Transaction) *table {
	t := &table{
		Table: nft.NewTable(nft.Table{Family: f, Name: tableName, Mark: mark, Sets: sets(f), Tx: tx}),
		rows:  map[model.Key]row{}, pools: map[model.PoolID]*pool{}, sizes: map[size]bool{},
		found:    found{map[uint32]packed{}, map[uint32][]handle{}},
		shards:   leastShards,
		numbers:  ids{next: 1, max: poolMask},
		stickies: ids{next: minAffinity, first: minAffinity, max: maxAffinity},
		backends: map[handle]netip.AddrPort{},
	}
	t.Serve, t.Form, t.Row = chainServe, t.ownSet, t.row
	return t
}

func (t *table) structure() error {
	if err := errors.Join(t.Structure(t.constantChains()), t.setOffload()); err != nil {
		return err
	}
	for _, c := range allClasses() {
		t.lead(classes, c.id(), c.chain())
	}
	return nil
}

// ids hands out numbers. Those given back are handed out again after the next settle, because the
// kernel may hold elements under them until the transaction is done. If a transaction fails, the Table is read anew,
// and with it the numbers.
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
	var needs []nft.Entry
	if c.limited {
		needs = nft.SourcesOf(key, f)
	}
	if f.Hooked {
		t.left = true
		needs = append(needs, nft.Entry{Set: hooked, Key: string(nft.EncodeKey(key))})
	}
	if len(needs) > 0 {
		t.Own(key, needs...)
	}
	t.setToken(key, c, p)
	if len(needs) == 0 && t.Owns(key) {
		t.Own(key)
	}
	return nil
}

// setToken leads packets for key to the chain of a class, and to a slot of a pool, if there is one. An element of a map
// cannot be changed: it is deleted and added in one kernel transaction, and no packet finds it missing.
func (t *table) setToken(key model.Key, c class, p *pool) {
	now := token(c.id())
	if p != nil {
		now = newToken(c, p.size, p.number)
	}
	old, replaces := t.rows[key]
	if !replaces {
		t.internals += int(key.Scope)
	}
	t.rows[key] = row{token: now, class: c, pool: p}
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
	t.Own(key)
	old.unlink(key, nil)
	t.internals -= int(key.Scope)
	delete(t.rows, key)
}
