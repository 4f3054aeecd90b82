package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// The kernel objects of a row depend on its scope. An address can have one virtual server, but a frontend of scope
// Internal has a pool of its own at the same address. So packets for it get a mark, which selects another one:
//
//	frontend, scope Any      ─► virtual server of the address ─► real servers of its pool
//	frontend, scope Internal ─► token: number of the pool ─► mark ─► virtual server of the mark, one for each pool

// rows are those of the State that the plane has programmed, and what follows from them.
type rows struct {
	frontends     map[model.Key]model.Frontend
	pools         map[model.PoolID]*poolUse
	wanted        map[ipvs.Key]model.PoolID // virtual servers
	numbers       [2]numbers                // even ones, which are those of UDP, and odd ones
	pastAddresses pastAddresses             // the plane's
}

// numbers are those that pools may have. That of a pool tells whether it is one of UDP, so that the virtual server of a
// mark does: after a restart there may be no other record.
type numbers struct {
	next uint32   // the lowest that no pool has had
	free []uint32 // those of pools that are gone
}

// poolUse is a pool with the frontends that forward to it.
type poolUse struct {
	row       model.Pool
	number    uint32 // 0: it is not needed
	numbers   *numbers
	keys      map[model.Key]struct{}
	internals int // how many of the keys are of scope Internal; they share the virtual server of a mark
}

func newRows() *rows {
	return &rows{
		frontends: map[model.Key]model.Frontend{},
		pools:     map[model.PoolID]*poolUse{},
		wanted:    map[ipvs.Key]model.PoolID{},
		numbers:   [2]numbers{{next: 2}, {next: 1}},
	}
}

// forwards reports whether a frontend has a virtual server. IPVS does not send packets from loopback addresses
// anywhere (crosses_local_route_boundary in the kernel's net/netfilter/ipvs/ip_vs_xmit.c); they are refused
// unless the wrapper localhost serves them.
func forwards(key model.Key, f model.Frontend) bool {
	return f.Verdict == model.Forward && !key.Addr.IsLoopback()
}

// changes are what of the rows is to be programmed.
type changes struct {
	frontends map[model.Key]struct{}
	pools     map[model.PoolID]struct{}
	servers   map[ipvs.Key]struct{}
	guards    []netip.Prefix
	health    []netip.AddrPort
	pods      bool
	whole     bool // all of a State
	forget    bool // affinity may hold backends that are gone
}

func newChanges() *changes {
	return &changes{
		frontends: map[model.Key]struct{}{}, pools: map[model.PoolID]struct{}{}, servers: map[ipvs.Key]struct{}{},
	}
}

// take takes over a change that leads to s, and finds what it touches.
func (r *rows) take(s *model.State, c model.Change) (*changes, error) {
	w := newChanges()
	for _, key := range c.Frontends.Delete {
		r.drop(key, w)
	}
	for key := range c.Frontends.Set.All() {
		r.drop(key, w)
	}
	for _, row := range slices.SortedFunc(slices.Values(c.Frontends.Set), byKey) {
		r.add(row.Key, row.Value, s, w)
	}
	for id, p := range c.Pools.Set.All() {
		r.setPool(id, p, w)
	}
	for id := range w.pools {
		if use := r.pools[id]; use != nil && len(use.keys) == 0 {
			r.dropPool(id, w)
		}
	}
	w.guards = slices.AppendSeq(slices.Clone(c.Guards.Delete), c.Guards.Set.Keys())
	w.health = slices.AppendSeq(slices.Clone(c.Health.Delete), c.Health.Set.Keys())
	w.pods = c.Pods != nil
	if max(r.numbers[0].next, r.numbers[1].next) > nft.MaxNumber {
		return w, fmt.Errorf("more than %d pools of UDP or of others with affinity or for clients of this node",
			nft.MaxNumber/2)
	}
	return w, nil
}

func byKey(a, b model.Row[model.Key, model.Frontend]) int { return a.Key.Compare(b.Key) }

func (r *rows) drop(key model.Key, w *changes) {
	w.frontends[key] = struct{}{}
	f, ok := r.frontends[key]
	if !ok {
		return
	}
	delete(r.frontends, key)
	if !forwards(key, f) {
		return
	}
	r.notePastAddress(key, f)
	use := r.pools[f.Pool]
	server := use.server(key)
	w.servers[server] = struct{}{}
	w.pools[f.Pool] = struct{}{}
	delete(use.keys, key)
	if use.internals -= int(key.Scope); key.Scope == model.Any || use.internals == 0 {
		delete(r.wanted, server)
	}
}

// add notes a frontend, and which pool and virtual server it changes. A pool gets a number when affinity or a row of
// scope Internal needs one.
func (r *rows) add(key model.Key, f model.Frontend, s *model.State, w *changes) {
	r.frontends[key] = f
	if !forwards(key, f) {
		return
	}
	use := r.pools[f.Pool]
	if use != nil && len(use.keys) == 0 && use.numbers != r.numbersOf(key) { // the port has another protocol now
		r.dropPool(f.Pool, w)
		use = nil
	}
	if use == nil {
		use = &poolUse{row: s.Pools[f.Pool], numbers: r.numbersOf(key), keys: map[model.Key]struct{}{}}
		r.pools[f.Pool] = use
	}
	use.keys[key] = struct{}{}
	use.internals += int(key.Scope)
	if use.number == 0 && (key.Scope == model.Internal || use.row.Affinity > 0) {
		use.number = use.numbers.take()
	}
	w.pools[f.Pool] = struct{}{}
	server := use.server(key)
	w.servers[server] = struct{}{}
	r.wanted[server] = f.Pool
}

// server is the virtual server of a frontend of the pool.
func (u *poolUse) server(key model.Key) ipvs.Key {
	if key.Scope == model.Internal {
		return ipvs.Key{Mark: markBits | u.number, V6: key.Addr.Is6()}
	}
	return addressKey(key)
}

func (r *rows) setPool(id model.PoolID, p model.Pool, w *changes) {
	use := r.pools[id]
	if use == nil {
		return
	}
	w.pools[id] = struct{}{}
	w.forget = w.forget || use.row.Affinity > 0 && loses(use.row, p)
	if use.row.Affinity != p.Affinity { // the class of its frontends is another one
		if use.number == 0 {
			use.number = use.numbers.take()
		}
		maps.Copy(w.frontends, use.keys)
	}
	use.row = p
	for key := range use.keys {
		w.servers[use.server(key)] = struct{}{}
	}
}

// loses reports whether a backend does not take connections any more.
func loses(before, now model.Pool) bool {
	return slices.ContainsFunc(before.Serving(), func(b model.Backend) bool { return !serves(now, b.AddrPort()) })
}

func (r *rows) dropPool(id model.PoolID, w *changes) {
	use := r.pools[id]
	w.forget = w.forget || use.row.Affinity > 0
	if use.number != 0 {
		use.numbers.free = append(use.numbers.free, use.number)
	}
	delete(r.pools, id)
}

// numbersOf are those that the pool of a frontend may have.
func (r *rows) numbersOf(key model.Key) *numbers {
	if key.Protocol == model.UDP {
		return &r.numbers[0]
	}
	return &r.numbers[1]
}

func (n *numbers) take() uint32 {
	if last := len(n.free) - 1; last >= 0 {
		number := n.free[last]
		n.free = n.free[:last]
		return number
	}
	n.next += 2
	return n.next - 2
}

// adopt gives the pools of s the numbers under which the kernel holds them, as the tokens of their
// frontends tell. It comes before anything else.
func (r *rows) adopt(s *model.State, tables []*table) {
	taken := map[uint32]bool{}
	for _, key := range slices.SortedFunc(maps.Keys(s.Frontends), model.Key.Compare) {
		f := s.Frontends[key]
		if !forwards(key, f) || r.pools[f.Pool] != nil {
			continue
		}
		n := tables[index(key.Addr.Is6())].token(key).Pool()
		numbers := r.numbersOf(key)
		if n == 0 || n%2 != numbers.next%2 || taken[n] || s.Pools[f.Pool].Affinity == 0 && key.Scope == model.Any {
			continue
		}
		taken[n] = true
		numbers.next = max(numbers.next, n+2)
		keys := map[model.Key]struct{}{}
		r.pools[f.Pool] = &poolUse{row: s.Pools[f.Pool], number: n, numbers: numbers, keys: keys}
	}
	for i := range r.numbers {
		numbers := &r.numbers[i]
		for n := 2 - uint32(i); n < numbers.next; n += 2 {
			if !taken[n] {
				numbers.free = append(numbers.free, n)
			}
		}
	}
}

// avoid gives pools no numbers of virtual servers that are there. A table of another version leads to these.
func (r *rows) avoid(held map[ipvs.Key]*server) {
	for key := range held {
		n := key.Mark & nft.PoolMask
		numbers := &r.numbers[n%2]
		numbers.next, numbers.free = max(numbers.next, n+2), nil
	}
}

// server is what a virtual server should be; nil: it should not be.
func (r *rows) server(key ipvs.Key, o Options) *server {
	id, ok := r.wanted[key]
	if !ok {
		return nil
	}
	return o.want(r.pools[id].row)
}

// index is where the table of an address family is.
func index(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}

// token is what the kernel was found to hold for a frontend; 0: nothing.
func (t *table) token(key model.Key) nft.Token {
	return nft.Token(nft.Number([]byte(t.Found(frontends + int(key.Scope))[string(nft.EncodeKey(key))])))
}

// setFrontend makes the table treat packets as a frontend says; ok is false if there is none.
func (t *table) setFrontend(key model.Key, f model.Frontend, ok bool, use *poolUse) error {
	old, had := t.classOf[key]
	defer func() {
		if had {
			t.classes[old].users--
		}
	}()
	if !ok {
		t.Own(key)
		delete(t.classOf, key)
		return nil
	}
	c := class{verdict: f.Verdict, limited: f.Allow != nil, scope: key.Scope}
	var n uint32
	switch {
	case forwards(key, f):
		c.snat, c.affinity = f.SNAT, use.row.Affinity > 0
		if n = use.number; !c.affinity && key.Scope == model.Any {
			n = 0
		}
	case f.Verdict == model.Forward:
		c.verdict = model.Reject
	}
	id, err := t.use(c)
	if err != nil {
		return fmt.Errorf("frontend %s: %w", key, err)
	}
	t.classOf[key] = c
	k := string(nft.EncodeKey(key))
	entries := nft.SourcesOf(key, f)
	if c.affinity {
		entries = append(entries, nft.Entry{Set: affinityFrontends, Key: k})
	}
	token := string(nft.Native(uint32(nft.NewToken(id, n))))
	t.Own(key, append(entries, nft.Entry{Set: frontends + int(key.Scope), Key: k, Data: token})...)
	return nil
}

// setPool makes the table know the backends that may reach themselves, and remember clients; nil: none.
func (t *table) setPool(id model.PoolID, use *poolUse) error {
	var entries []nft.Entry
	if use != nil {
		for _, b := range use.row.Backends {
			if b.Local {
				a := string(b.Addr.AsSlice())
				entries = append(entries, nft.Entry{Set: hairpin, Key: a + a})
			}
		}
	}
	t.Own(id, slices.Compact(entries)...) // backends are sorted: those of one address are neighbours
	if use == nil || use.row.Affinity == 0 {
		return nil
	}
	return t.setMemory(use.number, use.row.Affinity)
}

// localRow is what an address that is local needs.
type localRow netip.Addr

func (t *table) setLocal(a netip.Addr, want bool) {
	if !want {
		t.Own(localRow(a))
		return
	}
	t.Own(localRow(a), nft.Entry{Set: localAddresses, Key: string(a.AsSlice())})
}

// ownHealth has the table let packets pass to health checks that have changed: at addresses that are local for IPVS.
func (t *table) ownHealth(s *model.State, changed []netip.AddrPort) {
	for _, a := range changed {
		if !t.Family.Mine(a.Addr()) {
			continue
		}
		if _, ok := s.Health[a]; !ok {
			t.Own(a)
			continue
		}
		key := model.Key{Addr: a.Addr(), Port: a.Port(), Protocol: model.TCP}
		t.Own(a, nft.Entry{Set: healthChecks, Key: string(nft.EncodeKey(key))})
	}
}

// record makes the table say which virtual servers are ours; those of marks say it themselves.
func (t *table) record(key ipvs.Key, want bool) {
	if !want {
		t.Own(key)
		return
	}
	t.Own(key, nft.Entry{Set: virtualServers, Key: recordOf(key)})
}

func recordOf(key ipvs.Key) string {
	return string(nft.EncodeKey(model.Key{Addr: key.Addr, Port: key.Port, Protocol: key.Protocol}))
}

// recorded reports whether the kernel was found to have such a record.
func (t *table) recorded(key ipvs.Key) bool {
	_, found := t.Found(virtualServers)[recordOf(key)]
	return found || t.previous[recordOf(key)]
}
