package service

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Table holds the objects and keeps a State that says what they mean for this node. Its State after any chain of
// Updates is that of a new Table which is told all objects at once. The Table also remembers a Node that was deleted,
// what Learn has told, and which endpoints are new. It is for one goroutine.
type Table struct {
	options    Options
	configured bool // anew, since the last Update, or others have changed
	own        ownNode
	addrs      []netip.Addr
	cidrs      []netip.Prefix        // Service CIDRs
	guarded    map[netip.Prefix]bool // these, but for the node's own addresses, and others in modes ebpf and userspace
	view       View

	entries  map[Name]*entry
	slices   map[Name]*Slice
	contests map[claim]*contest // addresses and ports that several Services want
	rowless  map[claim]*entry   // owners of claims that are left to routing
	reported map[Name][]Problem // that Compile found in Services and their slices
	barriers map[Name]barrier   // of Services with the annotation

	judged   int                  // Services that have outcomes looked at, by their annotation
	others   map[netip.Addr]int   // ClusterIPs of Services that other proxies handle: how many have each
	shared   map[netip.Addr]int   // ClusterIPs of several Services: how many more than one have each
	withheld map[netip.Addr]int   // ClusterIPs that have no guard: how many Services have each
	networks map[netip.Prefix]int // how many endpoints are in each /24 and /120

	entryShares, listenerShares, tableShares shares

	ports   map[model.PoolID]portHealth       // with backends that have failed, or are new
	present map[model.PoolID][]netip.AddrPort // ready endpoints of Services with the annotation slow-start, sorted
	decided []named                           // Services about whose backends something was decided since the last Update

	ceased []string // objects of which a problem ceased with the last Update

	state     *model.State
	frontends changeTracker[model.Key, model.Frontend]
	pools     changeTracker[model.PoolID, model.Pool]
	guards    changeTracker[netip.Prefix, model.Verdict]
	health    changeTracker[netip.AddrPort, model.Health]

	update // what the Update at hand has found so far
}

// update lives for one call of Update.
type update struct {
	dirty     []named                  // Services to compile
	fresh     int                      // Services that were not there
	moved     map[netip.Addr]*standing // ClusterIPs that came or went, or at which endpoints did
	contested map[claim][]*entry       // to settle when all Services are compiled, and which want it since this Update
	compiled  map[*entry]*Rows         // of those that take part
	spare     *compiler                // memory for temporary rows
	left      []model.PoolID           // to which a Frontend does not lead any more
	problems  []Problem
}

// entry is what the Table knows of one Service. There are many, so it has nothing that can be found elsewhere.
type entry struct {
	service *Service  // nil: only slices are known yet
	slices  []*Slice  // in the order of their names
	claims  []claimed // sorted
	dirty   bool
}

// named is an entry and its key.
type named struct {
	*entry
	name Name
}

// NewTable makes a Table without objects. Its error names the option that is wrong, and its flag.
func NewTable(o Options) (*Table, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	s := model.NewState()
	t := &Table{
		options:        o,
		configured:     true,
		entries:        map[Name]*entry{},
		slices:         map[Name]*Slice{},
		contests:       map[claim]*contest{},
		rowless:        map[claim]*entry{},
		reported:       map[Name][]Problem{},
		barriers:       map[Name]barrier{},
		others:         map[netip.Addr]int{},
		shared:         map[netip.Addr]int{},
		withheld:       map[netip.Addr]int{},
		guarded:        map[netip.Prefix]bool{},
		entryShares:    newShares(sharedEntries),
		listenerShares: newShares(sharedListeners),
		tableShares:    newShares(sharedTables),
		networks:       map[netip.Prefix]int{},
		ports:          map[model.PoolID]portHealth{},
		present:        map[model.PoolID][]netip.AddrPort{},
		state:          s,
		frontends:      newChangeTracker(&s.Frontends, model.Frontend.Equal),
		pools:          newChangeTracker(&s.Pools, model.Pool.Equal),
		guards:         newChangeTracker(&s.Guards, equal[model.Verdict]),
		health:         newChangeTracker(&s.Health, equal[model.Health]),
	}
	t.view = t.look()
	s.Pods = t.view.Pods
	return t, nil
}

func equal[V comparable](a, b V) bool { return a == b }

// Configure replaces the options, but for NodeName, which stays. The next Update, even one with an
// empty Batch, takes them into account. After an error, which is NewTable's, the old ones hold.
func (t *Table) Configure(o Options) error {
	if err := o.validate(); err != nil {
		return err
	}
	o.NodeName = t.options.NodeName
	t.options, t.configured = o, true
	return nil
}

// Update takes in a Batch. It returns the State, which the Table goes on patching, the Change that led to it, and the
// problems that newly arose, with those of the Batch. Its cost depends on the number of changes, unless the node, its
// addresses or the Service CIDRs changed.
func (t *Table) Update(b Batch) (*model.State, model.Change, []Problem) {
	t.ceased = nil
	t.update = update{
		dirty:     make([]named, 0, len(b.Services)),
		contested: map[claim][]*entry{},
		compiled:  map[*entry]*Rows{},
		problems:  slices.Clone(b.Problems),
	}
	t.expectObjects(&b)
	for _, e := range t.decided {
		if t.entries[e.name] == e.entry {
			t.touch(e.entry, e.name)
		}
	}
	t.decided = nil
	for name, s := range b.Slices.All() {
		t.setSlice(name, s)
	}
	for name, s := range b.Services.All() {
		t.setService(name, s)
	}
	pods := t.environment(&b)
	t.findMoved()
	t.share()
	t.expectRows()
	for _, e := range t.dirty {
		t.compile(e)
	}
	for c, fresh := range t.contested {
		t.settle(c, fresh)
	}
	for _, rows := range t.compiled {
		t.setPools(rows)
	}
	t.dropPools()
	before := t.pools.before // close makes another one
	change := model.Change{
		Frontends:   t.frontends.close(),
		Pools:       t.pools.close(),
		Guards:      t.guards.close(),
		Health:      t.health.close(),
		Pods:        pods,
		PoolsBefore: before,
	}
	problems := t.problems
	t.update = update{}
	slices.SortFunc(problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Object, b.Object), cmp.Compare(a.Field, b.Field), cmp.Compare(a.Reason, b.Reason))
	})
	return t.state, change, slices.Compact(problems)
}

// setService replaces a Service, or removes it if s is nil.
func (t *Table) setService(name Name, s *Service) {
	e := t.entry(name)
	t.touch(e, name)
	old := e.service
	e.service = s
	if old == nil && s != nil {
		t.fresh++
	}
	t.countClusterIPs(s, +1)
	t.countClusterIPs(old, -1)
	t.countOthers(s, +1)
	t.countOthers(old, -1)
	t.countJudged(s, +1)
	t.countJudged(old, -1)
	t.forgetPresent(old, s)
}

// entry finds or makes the entry of a Service.
func (t *Table) entry(name Name) *entry {
	e := t.entries[name]
	if e == nil {
		e = &entry{}
		t.entries[name] = e
	}
	return e
}

// touch has an entry compiled.
func (t *Table) touch(e *entry, name Name) {
	if !e.dirty {
		e.dirty = true
		t.dirty = append(t.dirty, named{e, name})
	}
}

// expectObjects makes room at once for many objects that are probably new.
func (t *Table) expectObjects(b *Batch) {
	t.slices = roomy(t.slices, len(b.Slices), 0)
	t.entries = roomy(t.entries, max(len(b.Services), len(b.Slices)), 0)
	t.guards.expect(max(0, len(b.Services)-len(*t.guards.rows)), len(t.entries))
}

// expectRows makes room at once for what many new Services bring, and those of which only slices are known yet.
func (t *Table) expectRows() {
	t.frontends.expect(t.fresh, len(t.entries))
	t.pools.expect(t.fresh, len(t.entries))
}

// setSlice replaces a slice, or removes it if s is nil.
func (t *Table) setSlice(name Name, s *Slice) {
	if old := t.slices[name]; old != nil {
		t.countEndpoints(old, -1)
		owner := Name{Namespace: name.Namespace, Name: old.Service}
		e := t.entry(owner)
		t.touch(e, owner)
		if i, ok := e.find(name); ok {
			e.slices = slices.Delete(e.slices, i, i+1)
		}
		delete(t.slices, name)
	}
	if s == nil {
		return
	}
	t.countEndpoints(s, +1)
	owner := Name{Namespace: name.Namespace, Name: s.Service}
	e := t.entry(owner)
	if e.service != nil { // else there is nothing to compile yet
		t.touch(e, owner)
	}
	i, _ := e.find(name)
	e.slices = slices.Insert(e.slices, i, s)
	t.slices[name] = s
}

// find is the place of a slice in the entry.
func (e *entry) find(name Name) (int, bool) {
	return slices.BinarySearchFunc(e.slices, name.Name, func(s *Slice, n string) int {
		return cmp.Compare(s.Name.Name, n)
	})
}

// countClusterIPs keeps the guards that refuse unused ports, and notes which addresses begin or
// cease to be those of a Service.
func (t *Table) countClusterIPs(s *Service, by int) {
	for _, a := range s.clusterIPs() {
		t.setOwners(a, t.owners(a)+by)
		if t.networks[network(a)] > 0 || t.view.barred(a) {
			t.move(a)
		}
	}
}

// countOthers notes the ClusterIPs of a Service that another proxy handles.
func (t *Table) countOthers(s *Service, by int) {
	if s == nil || s.Ignored == "" {
		return
	}
	for _, a := range s.ClusterIPs {
		before := t.others[a]
		if t.others[a] += by; t.others[a] == 0 {
			delete(t.others, a)
		}
		t.configured = t.configured || before == 0 || before+by == 0
	}
}

// owners is how many Services have a ClusterIP. Of the many that one Service has, and nothing speaks against, their
// guard alone tells.
func (t *Table) owners(a netip.Addr) int {
	if n := t.withheld[a]; n > 0 {
		return n
	}
	if (*t.guards.rows)[hostPrefix(a)] != model.Reject {
		return 0
	}
	return 1 + t.shared[a]
}

func (t *Table) setOwners(a netip.Addr, n int) {
	if t.withheld[a] > 0 {
		t.withheld[a] = n
		if n == 0 {
			delete(t.withheld, a)
		}
		return
	}
	t.guard(hostPrefix(a), n > 0)
	if t.shared[a] = n - 1; n <= 1 {
		delete(t.shared, a)
	}
}

// withhold takes the guard of a ClusterIP away, or gives it back.
func (t *Table) withhold(a netip.Addr, is bool) {
	n := t.owners(a)
	if n == 0 || is == (t.withheld[a] > 0) {
		return
	}
	t.setOwners(a, 0)
	if is {
		t.withheld[a] = n
	} else {
		t.setOwners(a, n)
	}
}

// clusterIP reports whether an address is one: no other guard refuses.
func (t *Table) clusterIP(a netip.Addr) bool { return (*t.guards.rows)[hostPrefix(a)] == model.Reject }

// guard sets the verdict for packets to a prefix that no Frontend takes. Unused ports of a ClusterIP are refused.
// Packets to unused addresses of a Service CIDR are dropped.
func (t *Table) guard(p netip.Prefix, clusterIP bool) {
	switch {
	case clusterIP:
		t.guards.put(p, model.Reject)
	case t.guarded[p]:
		t.guards.put(p, model.Drop)
	default:
		t.guards.remove(p)
	}
}

// countEndpoints keeps the set of networks that have endpoints. A ClusterIP outside all of them, which is the rule,
// need not be searched for among all endpoints.
func (t *Table) countEndpoints(s *Slice, by int) {
	for i := range s.Endpoints {
		a := s.Endpoints[i].Addr
		n := network(a)
		if t.networks[n] += by; by < 0 && t.networks[n] == 0 {
			delete(t.networks, n)
		}
		if t.options.Manifests && t.owners(a) > 0 {
			t.move(a)
		}
	}
}

// network is the /24 or /120 of an address.
func network(a netip.Addr) netip.Prefix {
	return netip.PrefixFrom(a, a.BitLen()-8).Masked()
}

// standing is the use of an address that is a ClusterIP or was one.
type standing struct {
	owners  []string // namespaces of Services whose ClusterIP it is
	another bool     // a Service of another namespace has an endpoint there
}

// move has the use of an address determined anew.
func (t *Table) move(a netip.Addr) {
	if t.moved == nil {
		t.moved = map[netip.Addr]*standing{}
	}
	t.moved[a] = &standing{}
}

// findMoved compiles every Service with an endpoint whose address has become a ClusterIP, or is none any more. In
// manifests no API server gives out ClusterIPs, so one can be the address of another namespace's pod. That pod goes on
// being an endpoint, and its other ports are not refused.
func (t *Table) findMoved() {
	if len(t.moved) == 0 {
		return
	}
	if t.options.Manifests {
		for name, e := range t.entries {
			for _, a := range e.service.clusterIPs() {
				if s := t.moved[a]; s != nil && !slices.Contains(s.owners, name.Namespace) {
					s.owners = append(s.owners, name.Namespace)
				}
			}
		}
	}
	for name, s := range t.slices {
		touched := false
		for i := range s.Endpoints {
			moved := t.moved[s.Endpoints[i].Addr]
			if moved == nil {
				continue
			}
			touched = true
			foreign := func(namespace string) bool { return namespace != name.Namespace }
			moved.another = moved.another || slices.ContainsFunc(moved.owners, foreign)
		}
		if touched {
			owner := Name{Namespace: name.Namespace, Name: s.Service}
			t.touch(t.entry(owner), owner)
		}
	}
	for a, s := range t.moved {
		t.withhold(a, t.view.barred(a) || t.options.Manifests && s.another && !contains(t.cidrs, a))
	}
}

// clusterIPs are those that count.
func (s *Service) clusterIPs() []netip.Addr {
	if s == nil || s.Ignored != "" {
		return nil
	}
	return s.ClusterIPs
}

// environment takes in the node and the Service CIDRs. If they matter, all Services are compiled.
// It returns how pods are recognised if that changed.
func (t *Table) environment(b *Batch) *model.Pods {
	if b.Node == nil && b.Addrs == nil && b.ServiceCIDRs == nil && !t.configured && t.options.mode() == t.view.Mode {
		return nil
	}
	t.configured = false
	if b.Node != nil {
		t.setNode(b.Node)
	}
	if b.Addrs != nil {
		t.addrs = slices.Clone(b.Addrs)
	}
	changed := b.ServiceCIDRs != nil && t.setServiceCIDRs(model.Disjoint(b.ServiceCIDRs))
	old := t.view
	t.view = t.look()
	t.guardCIDRs()
	t.checkPods()
	if changed || !t.view.equal(&old) {
		for name, e := range t.entries {
			t.touch(e, name)
			for _, a := range e.service.clusterIPs() {
				if t.networks[network(a)] > 0 || t.withheld[a] > 0 || t.view.barred(a) {
					t.move(a)
				}
			}
		}
	}
	if t.view.Pods.Equal(old.Pods) {
		return nil
	}
	t.state.Pods = t.view.Pods
	return &model.Pods{Prefixes: t.view.Pods.Prefixes, Interfaces: t.view.Pods.Interfaces}
}

func (t *Table) look() View {
	v := t.options.view(t.own.node, t.addrs, t.cidrs)
	v.ServiceAddress, v.Judge, v.Arrive = t.serviceAddress, t.judge, t.arrive
	return v
}

// setServiceCIDRs reports whether they changed.
func (t *Table) setServiceCIDRs(cidrs []netip.Prefix) bool {
	old := t.cidrs
	t.cidrs = cidrs
	return !slices.Equal(old, cidrs)
}

// guardCIDRs guards the Service CIDRs. An address by which the cluster knows this node, and that is in one by mistake,
// stays reachable, or an administrator could not log in to repair it. Others on its interfaces may well be those of
// Services. Modes ebpf and userspace see a packet before other proxies can translate it, so they leave the addresses
// of these unguarded.
func (t *Table) guardCIDRs() {
	free := slices.Concat(t.options.NodeIPs, t.own.node.IPs)
	if t.view.Mode == "ebpf" || t.view.Mode == "userspace" {
		free = slices.AppendSeq(free, maps.Keys(t.others))
	}
	changed := t.guarded
	t.guarded = map[netip.Prefix]bool{}
	for _, p := range t.cidrs {
		for _, part := range without(p, free) {
			t.guarded[part], changed[part] = true, true
		}
	}
	for p := range changed {
		t.guard(p, (*t.guards.rows)[p] == model.Reject)
	}
}

// without are the largest prefixes in p that have none of the addresses.
func without(p netip.Prefix, addrs []netip.Addr) []netip.Prefix {
	addrs = slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return !p.Contains(a) })
	if len(addrs) == 0 {
		return []netip.Prefix{p}
	}
	if p.IsSingleIP() {
		return nil
	}
	lower := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	b := p.Addr().AsSlice()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	middle, _ := netip.AddrFromSlice(b)
	return append(without(lower, addrs), without(netip.PrefixFrom(middle, p.Bits()+1), addrs)...)
}

// serviceAddress reports whether an address is, or can become, a ClusterIP.
func (t *Table) serviceAddress(a netip.Addr) bool {
	return t.clusterIP(a) || contains(t.cidrs, a)
}

// compile brings the rows of one Service up to date. If other Services want the same addresses, they
// are settled later.
func (t *Table) compile(e named) {
	e.dirty = false
	c := t.spare
	if c == nil {
		c = &compiler{}
	}
	t.spare = nil
	rows := t.rows(e.entry, c)
	t.keepBarrier(e, rows)
	if t.claim(e.entry, rows); t.compiled[e.entry] == nil { // all of them are granted
		for i := range rows.Pools {
			t.pools.put(rows.Pools[i].Key, rows.Pools[i].Value)
		}
		t.spare = c
	}
	t.report(e.name, rows.Problems)
	if e.service == nil && len(e.slices) == 0 {
		delete(t.entries, e.name)
	}
}

// report keeps the problems of a Service that it did not have before.
func (t *Table) report(service Name, problems []Problem) {
	reported := t.reported[service]
	for _, p := range reported {
		if !slices.Contains(problems, p) {
			t.ceased = append(t.ceased, p.Object)
		}
	}
	for _, p := range problems {
		if !slices.Contains(reported, p) {
			t.problems = append(t.problems, p)
		}
	}
	if len(problems) > 0 {
		t.reported[service] = problems
	} else if reported != nil {
		delete(t.reported, service)
	}
}

// Ceased are objects of which a problem, which Update had returned, ceased with the last Update, though it did not
// concern the object itself.
func (t *Table) Ceased() []string { return t.ceased }

// Remaining are problems of an object that the Table has found and that last, of those that Update has returned.
func (t *Table) Remaining(object string) (all []Problem) {
	kind, name := ObjectOf(object)
	if s := t.slices[name]; s != nil && kind == "EndpointSlice" {
		name.Name = s.Service
	}
	for _, p := range t.reported[name] {
		if p.Object == object {
			all = append(all, p)
		}
	}
	e := t.entries[name]
	if e == nil || len(all) > 0 || kind != "Service" {
		return all
	}
	for i := range e.claims {
		c := e.claims[i].claim()
		if x := t.contests[c]; x != nil && x.winner != nil && x.winner != e {
			return []Problem{x.loss(c, e, x.winner)}
		}
	}
	return nil
}

// rows are those of a Service without contest. They live in the compiler until it is used again.
func (t *Table) rows(e *entry, c *compiler) *Rows {
	c.begin(&t.view, e.service, current(e.slices))
	c.rows.of = e
	if s := e.service; s != nil {
		if why := t.refusal(s.Name); why != "" {
			c.problem("Service "+s.Name.String(), "spec", Share, why)
			return &c.rows
		}
		c.notListening, c.unhashed = t.listenerShares.refuses(s.Name), t.tableShares.refuses(s.Name)
	}
	c.compile()
	return &c.rows
}

// setPools sets the pools of a Service to which Frontends lead that it was granted.
func (t *Table) setPools(rows *Rows) {
	used := map[model.PoolID]bool{}
	for i := range rows.Frontends {
		f := &rows.Frontends[i]
		used[f.Value.Pool] = used[f.Value.Pool] || t.state.Frontends[f.Key].Pool == f.Value.Pool
	}
	for _, p := range rows.Pools {
		if used[p.Key] {
			t.pools.put(p.Key, p.Value)
		}
	}
}

// dropPools removes the pools to which no Frontend leads any more.
func (t *Table) dropPools() {
	if len(t.left) == 0 {
		return
	}
	used := map[model.PoolID]bool{}
	for _, f := range t.Near(slices.Values(t.left)) {
		used[f.Pool] = true
	}
	for _, id := range t.left {
		if !used[id] {
			t.pools.remove(id)
		}
	}
}

// Near are the Frontends that may lead to some pools: all where their Services want one.
func (t *Table) Near(pools iter.Seq[model.PoolID]) iter.Seq2[model.Key, model.Frontend] {
	return func(yield func(model.Key, model.Frontend) bool) {
		seen := map[Name]bool{}
		for id := range pools {
			owner := rowOwner(id.Service)
			e := t.entries[owner]
			if e == nil || seen[owner] {
				continue
			}
			seen[owner] = true
			for i := range e.claims {
				for _, scope := range []model.Scope{model.Any, model.Internal} {
					key := e.claims[i].claim().key(scope)
					if f, ok := t.state.Frontends[key]; ok && !yield(key, f) {
						return
					}
				}
			}
		}
	}
}
