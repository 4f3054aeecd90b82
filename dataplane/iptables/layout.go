package iptables

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/localnet"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// The names of the chains of which there is one.
const (
	chainIn        = "KUBE-PROXY-IN"  // what arrives
	chainOut       = "KUBE-PROXY-OUT" // what this node sends
	chainServices  = "KUBE-SERVICES"
	chainInternal  = "KUBE-INTERNAL"
	chainGuards    = "KUBE-UNUSED-PORTS"
	chainRanges    = "KUBE-UNUSED-IPS"
	chainReject    = "KUBE-REJECT" // no endpoints
	chainNoLocal   = "KUBE-DROP-NO-LOCAL"
	chainOthers    = "KUBE-DROP-SOURCES" // that a row does not allow
	chainNoRow     = "KUBE-REJECT-UNUSED"
	chainNoRowDrop = "KUBE-DROP-UNUSED"
	chainMark      = "KUBE-MARK-MASQ"
	chainOffNode   = "KUBE-MARK-OFF-CLUSTER"
	chainPost      = "KUBE-PROXY-POST"
	chainHairpin   = "KUBE-HAIRPIN"
	hairpinPrefix  = "KUBE-HP-"
	chainForward   = "KUBE-PROXY-FORWARD"
	chainHealth    = "KUBE-HEALTH-CHECKS"
	chainLocalnet  = "KUBE-LOCALNET-WAS-OFF"
	loopbackDevice = "lo"
)

// How the names of the chains begin that a pool has. They are not kube-proxy's KUBE-SVC- and KUBE-SEP-: of these it
// deletes, in one transaction with all else, those that it does not know, which fails where others lead to them. Nor
// are the chains for postrouting and forwarding: a kube-proxy in another mode first removes what leads to its own.
const (
	kindPods     = "KUBE-PODS-"
	kindLocal    = "KUBE-LOCAL-"
	kindAffinity = "KUBE-STICK-"
	kindKnown    = "KUBE-KNOWN-"
	kindLimit    = "KUBE-ALLOW-"
)

// layout is how the rows of one address family are laid out in chains of the tables nat and filter. It
// remembers what it needs to tell which chains a change touches.
//
//	nat:    dispatch, by scope ─► entry: mark the packet? ─► chooser: affinity, or a share for each backend ─► DNAT
//	filter: dispatch, by scope ─► refuse;  guards: the same for addresses without a row;  ranges: for prefixes
//
// Each part is made anew as a whole when something changes that it depends on. It gives its chains to an edit: keep for
// those that there shall be, leave for those that there were. A chain that is left and kept stays, so a part need not
// compare both.
type layout struct {
	v6          bool
	mark        uint32
	relayMark   uint32 // the mark of packets that are not for us
	keepInvalid bool
	localnets   int  // frontends on 127.0.0.1
	recorded    bool // a chain says that it was we who allowed them

	localnetWasOn bool // they were allowed before
	pods          model.Pods
	health        []rule // of chainHealth

	nat, filter   [2]*dispatch // by scope
	guards        *dispatch
	hairpin       tree
	hairpinLeaves []leaf
	frontends     map[model.Key]model.Frontend
	entries       map[entry]int     // in use by so many frontends
	limits        [2]map[string]int // chains in nat and filter, by how many frontends
	pools         map[model.PoolID]model.Pool
	parts         map[partsOf][]string // chains below the entries of a pool
	sets          map[string]setUse
	locals        map[netip.Addr]int // local backends, by how many pools
	edits         [2]*edit           // changes of tables nat and filter that take has not returned yet
}

// entry is a chain in which frontends of a pool meet.
type entry struct {
	pool     model.PoolID
	protocol model.Protocol
	snat     model.SNAT
}

type partsOf struct {
	pool     model.PoolID
	protocol model.Protocol
}

func newLayout(v6 bool, mark uint32, o Options) *layout {
	l := &layout{
		v6: v6, mark: mark, relayMark: dataplane.Config{Mark: mark}.RelayMark(), keepInvalid: o.KeepInvalid,
		guards:    newDispatch(v6, chainGuards, "KUBE-UP-"),
		frontends: map[model.Key]model.Frontend{},
		entries:   map[entry]int{},
		limits:    [2]map[string]int{{}, {}},
		pools:     map[model.PoolID]model.Pool{},
		parts:     map[partsOf][]string{},
		sets:      map[string]setUse{},
		locals:    map[netip.Addr]int{},
		edits:     [2]*edit{newEdit(), newEdit()},
	}
	for scope, names := range [2][2]string{{chainServices, "KUBE-IP-"}, {chainInternal, "KUBE-INT-"}} {
		l.nat[scope], l.filter[scope] = newDispatch(v6, names[0], names[1]), newDispatch(v6, names[0], names[1])
	}
	prefix := hairpinPrefix
	if v6 {
		prefix += "6-"
	}
	l.hairpin = addressTree(v6, prefix, func(p netip.Prefix) rule { return rule{src: p} })
	return l
}

func (l *layout) mine(a netip.Addr) bool { return a.Is6() == l.v6 }

// take returns what the calls since the last one make of the chains of both tables.
func (l *layout) take() (taken [2]*edit) {
	for i := range l.edits {
		taken[i], l.edits[i] = l.edits[i].settle(), newEdit()
	}
	return taken
}

// all lays out a State from nothing.
func (l *layout) all(s *model.State) {
	l.apply(s, s.Whole())
	lay := func(t *tree, e *edit, root string, leaves []leaf) {
		(&walk{tree: t, changed: []key{}, emit: e.keep}).chains(root, leaves)
	}
	for i, d := range []*dispatch{nat: l.nat[model.Any], filter: l.filter[model.Any]} {
		lay(&d.addresses, l.edits[i], chainServices, d.leaves)
	}
	lay(&l.guards.addresses, l.edits[filter], chainGuards, l.guards.leaves)
	lay(&l.hairpin, l.edits[nat], chainHairpin, l.hairpinLeaves)
	l.ranges(s)
	l.constants()
}

// quickly lays out the chains of both tables that need no look at pools, as they are: those that find rows, and the
// constant ones.
func (l *layout) quickly(s *model.State) [2]map[string][]rule {
	for scope := range l.nat {
		l.nat[scope].emit(l.edits[nat].keep)
		l.filter[scope].emit(l.edits[filter].keep)
	}
	l.guards.emit(l.edits[filter].keep)
	(&walk{tree: &l.hairpin, emit: l.edits[nat].keep}).chains(chainHairpin, l.hairpinLeaves)
	l.ranges(s)
	l.constants()
	edits := l.take()
	return [2]map[string][]rule{edits[nat].set, edits[filter].set}
}

// apply lays out a change that leads to s.
func (l *layout) apply(s *model.State, c model.Change) {
	internals := l.internals()
	if c.Pods != nil {
		l.pods = *c.Pods
		for id := range l.pools {
			l.makePool(id)
		}
	}
	l.setPools(c)
	l.setFrontends(c)
	l.setGuards(s, c)
	healthChanged := !c.Health.Empty() && l.setHealth(s)
	if c.Pods != nil || internals != l.internals() || healthChanged {
		l.constants()
	}
}

// setHealth makes the rules for clients of health checks, which this process answers. It reports whether they change.
func (l *layout) setHealth(s *model.State) bool {
	before, of := l.health, map[uint16]string{}
	for a, h := range s.Health {
		if other, ok := of[a.Port()]; l.mine(a.Addr()) && (!ok || h.Service < other) {
			of[a.Port()] = h.Service
		}
	}
	l.health = nil
	for _, port := range slices.Sorted(maps.Keys(of)) {
		l.health = append(l.health, rule{
			protocol: model.TCP, ports: ports{port, port}, do: target{verb: accept}, comment: of[port],
		})
	}
	return !slices.Equal(before, l.health)
}

func (l *layout) internals() [2]bool {
	return [2]bool{!l.nat[model.Internal].empty(), !l.filter[model.Internal].empty()}
}

// setFrontends makes the rules for destinations. Chains of former frontends are given up last: others may use them now.
func (l *layout) setFrontends(c model.Change) {
	var forwards, refuses [2]map[model.Key][]rule // by scope
	for scope := range forwards {
		forwards[scope], refuses[scope] = map[model.Key][]rule{}, map[model.Key][]rule{}
	}
	previous := map[model.Key]model.Frontend{}
	forget := func(k model.Key) {
		if old, ok := l.frontends[k]; ok {
			previous[k] = old
			l.localnets -= needsLocalnet(k, old)
			delete(l.frontends, k)
			forwards[k.Scope][k], refuses[k.Scope][k] = nil, nil
		}
	}
	spoofable := l.spoofable()
	for k, f := range c.Frontends.Set.All() {
		if l.mine(k.Addr) {
			forget(k)
			l.localnets += needsLocalnet(k, f)
			l.frontends[k] = f
			forwards[k.Scope][k], refuses[k.Scope][k] = l.natRules(k, f), l.filterRules(k, f)
		}
	}
	for _, k := range c.Frontends.Delete {
		forget(k)
	}
	for scope := range l.nat {
		l.nat[scope].change(forwards[scope], l.edits[nat])
		l.filter[scope].change(refuses[scope], l.edits[filter])
	}
	for table, d := range [2]*dispatch{l.nat[model.Internal], l.filter[model.Internal]} {
		if d.empty() {
			l.edits[table].drop(chainInternal)
		}
	}
	if spoofable != l.spoofable() {
		l.constants()
	}
	for k, old := range previous {
		l.release(k, old)
	}
}

// needsLocalnet is 1 for a row that needs the sysctl route_localnet.
func needsLocalnet(k model.Key, f model.Frontend) int {
	if f.Verdict == model.Forward && localnet.Contains(k.Addr) {
		return 1
	}
	return 0
}

// spoofable reports whether packets from elsewhere may reach 127.0.0.0/8 for our sake.
func (l *layout) spoofable() bool { return !l.v6 && (l.localnets > 0 || l.recorded) }

// match is what a rule asks of a packet for a destination, but for the address.
func match(k model.Key, f model.Frontend) rule {
	return rule{protocol: k.Protocol, ports: ports{k.Port, k.Port}, comment: f.Service}
}

// natRules send connections to a pool. A packet that an Internal row does not forward must not come to the row for Any
// client; the table filter will see it.
func (l *layout) natRules(k model.Key, f model.Frontend) []rule {
	r := match(k, f)
	switch {
	case f.Verdict != model.Forward && k.Scope == model.Internal:
		r.do.verb = accept
	case f.Verdict != model.Forward:
		return nil
	case f.Allow != nil:
		others := rule{do: target{verb: accept}, comment: f.Service + " is not for others"}
		r.do = goes(l.limit(nat, f, l.enter(k, f), others))
	default:
		r.do = goes(l.enter(k, f))
	}
	return []rule{r}
}

// filterRules refuse connections. Those that table nat has forwarded never come here, so that what comes
// to a row with allowed sources is not from one of them.
func (l *layout) filterRules(k model.Key, f model.Frontend) []rule {
	r := match(k, f)
	switch {
	case f.Verdict == model.Reject && f.Allow == nil:
		r.do = goes(chainReject)
	case f.Verdict == model.Drop:
		r.do = goes(chainNoLocal)
	case f.Verdict == model.Forward && f.Allow != nil:
		r.do = goes(chainOthers)
	case f.Verdict == model.Reject: // others are dropped
		r.do = goes(l.limit(filter, f, chainReject, rule{do: goes(chainOthers)}))
	default:
		return nil
	}
	return []rule{r}
}

func entryOf(k model.Key, f model.Frontend) entry { return entry{f.Pool, k.Protocol, f.SNAT} }

func (e entry) id() string {
	return hashed(fmt.Sprintf("%s %t %s", e.pool.Service, e.pool.Local, e.protocol))
}

// chain is the entry's name, which tells endpoints anywhere from those on this node.
func (e entry) chain() string {
	kind := kindPods
	if e.pool.Local {
		kind = kindLocal
	}
	if e.snat == model.OffCluster {
		return kind + e.id()
	}
	return kind + hashed(e.id()+e.snat.String())
}

// enter is the chain in which a frontend's connections choose their backend.
func (l *layout) enter(k model.Key, f model.Frontend) string {
	e := entryOf(k, f)
	l.entries[e]++
	if l.entries[e] == 1 {
		l.makePool(f.Pool)
	}
	return e.chain()
}

// limit is the chain of a table that lets allowed sources go on to another one, and does something else to others.
func (l *layout) limit(table int, f model.Frontend, to string, others rule) string {
	name := limitName(f, to)
	l.limits[table][name]++
	if l.limits[table][name] == 1 {
		var rules []rule
		for _, p := range f.Allow {
			rules = append(rules, rule{src: p, do: goes(to)})
		}
		l.edits[table].keep(name, append(rules, others))
	}
	return name
}

// releaseLimit gives up the use of such a chain.
func (l *layout) releaseLimit(table int, f model.Frontend, to string) {
	name := limitName(f, to)
	if l.limits[table][name]--; l.limits[table][name] == 0 {
		delete(l.limits[table], name)
		l.edits[table].drop(name)
	}
}

func limitName(f model.Frontend, to string) string {
	return kindLimit + hashed(fmt.Sprint(f.Service, to, f.Allow))
}

// release gives up what a frontend used. The names of the chains derive from the frontend, so it must be the former
// one.
func (l *layout) release(k model.Key, f model.Frontend) {
	if f.Verdict == model.Reject && f.Allow != nil {
		l.releaseLimit(filter, f, chainReject)
	}
	if f.Verdict != model.Forward {
		return
	}
	e := entryOf(k, f)
	if f.Allow != nil {
		l.releaseLimit(nat, f, e.chain())
	}
	if l.entries[e]--; l.entries[e] == 0 {
		delete(l.entries, e)
		l.edits[nat].drop(e.chain())
		l.makeParts(partsOf{e.pool, e.protocol})
	}
}

// setPools takes over pools that are new or changed.
func (l *layout) setPools(c model.Change) {
	changed := map[netip.Addr]bool{}
	for id, p := range c.Pools.Set.All() {
		if id.V6 != l.v6 {
			continue
		}
		l.countLocals(l.pools[id], -1, changed)
		l.countLocals(p, 1, changed)
		l.pools[id] = p
		l.makePool(id)
	}
	for _, id := range c.Pools.Delete {
		if p, ok := l.pools[id]; ok {
			l.countLocals(p, -1, changed)
			delete(l.pools, id)
		}
	}
	l.setHairpin(changed)
}

// countLocals notes the backends on this node, which may meet themselves.
func (l *layout) countLocals(p model.Pool, by int, changed map[netip.Addr]bool) {
	for _, b := range p.Serving() {
		if b.Local {
			a := b.Addr
			l.locals[a] += by
			changed[a] = true
			if l.locals[a] == 0 {
				delete(l.locals, a)
			}
		}
	}
}

// setHairpin masquerades backends that reach themselves. Otherwise the backend would get a packet from its own address,
// and its answer would not come back to the node, which has to translate it. Only backends of this node are listed:
// others reach themselves on their own node.
func (l *layout) setHairpin(addresses map[netip.Addr]bool) {
	if len(addresses) == 0 {
		return
	}
	var changed []leaf
	for a := range addresses {
		c := leaf{key: addressKey(a)}
		if l.locals[a] > 0 {
			c.rules = []rule{{src: host(a), dst: host(a), do: target{verb: masquerade}}}
		}
		changed = append(changed, c)
	}
	l.hairpinLeaves = l.hairpin.change(chainHairpin, l.hairpinLeaves, changed, l.edits[nat])
}

// makePool lays out the chains of a pool, those that are in use. A pool is for all protocols, but the rule that
// translates must name one, because it sets a port.
func (l *layout) makePool(id model.PoolID) {
	for _, protocol := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		l.makeParts(partsOf{id, protocol})
	}
}

// makeParts lays out a pool's chains for one protocol anew. The entries for each kind of source NAT share the rules
// that choose a backend.
func (l *layout) makeParts(of partsOf) {
	for _, chain := range l.parts[of] {
		l.edits[nat].drop(chain)
	}
	delete(l.parts, of)
	pool := l.pools[of.pool]
	var c *chooser
	var rules []rule
	for _, snat := range []model.SNAT{model.Never, model.OffCluster, model.Always} {
		e := entry{of.pool, of.protocol, snat}
		if l.entries[e] == 0 {
			continue
		}
		if rules == nil {
			serving := pool.Serving()
			c = newChooser(e.id(), pool, len(serving))
			c.protocol, c.edit = of.protocol, l.edits[nat].keep
			rules = c.choice(serving)
			l.parts[of] = c.chains
		}
		l.edits[nat].keep(e.chain(), append(l.markRules(of.pool, snat), rules...))
	}
}

// markRules say whose source address is to be replaced. That of OffCluster is spelled out where one rule does,
// which the kernel checks sooner than one that leads to others.
func (l *layout) markRules(id model.PoolID, snat model.SNAT) []rule {
	r := rule{comment: poolName(id)}
	switch pods := l.ofPods(target{}); {
	case defect.Is(defect.IPTablesSNAT):
		return nil
	case snat == model.Always:
		r.do = jumpTo(chainMark)
	case snat == model.Never:
		return nil
	case len(pods) == 0:
		r.do = jumpTo(chainMark)
	case len(pods) == 1 && pods[0].src.IsValid():
		r.src, r.notSrc, r.do = pods[0].src, true, target{verb: orMark, mark: l.mark}
	default:
		r.do = jumpTo(chainOffNode)
	}
	return []rule{r}
}

// neededSets are the ipsets to which the rules refer.
func (l *layout) neededSets() map[string]setUse { return setsOf(l.pools, maps.Keys(l.entries)) }

func setsOf(pools map[model.PoolID]model.Pool, entries iter.Seq[entry]) map[string]setUse {
	needed := map[string]setUse{}
	seen := map[partsOf]bool{}
	for e := range entries {
		p, of := pools[e.pool], partsOf{e.pool, e.protocol}
		if p.Affinity == 0 || seen[of] {
			continue
		}
		seen[of] = true
		serving := p.Serving()
		newChooser(e.id(), p, len(serving)).addSets(needed, e.pool, serving)
	}
	return needed
}

// setGuards makes the rules for packets that no frontend takes: single addresses are many, ranges few.
func (l *layout) setGuards(s *model.State, c model.Change) {
	changed := map[model.Key][]rule{}
	ranges := false
	note := func(p netip.Prefix, rules []rule) {
		switch {
		case !l.mine(p.Addr()):
		case p.IsSingleIP():
			changed[model.Key{Addr: p.Addr()}] = rules
		default:
			ranges = true
		}
	}
	for p, v := range c.Guards.Set.All() {
		note(p, []rule{{do: guardTarget(v)}})
	}
	for _, p := range c.Guards.Delete {
		note(p, nil)
	}
	if len(changed) > 0 {
		l.guards.change(changed, l.edits[filter])
	}
	if ranges {
		l.ranges(s)
	}
}

func guardTarget(v model.Verdict) target {
	if v == model.Reject {
		return goes(chainNoRow)
	}
	return goes(chainNoRowDrop)
}

// ranges puts longer prefixes first.
func (l *layout) ranges(s *model.State) {
	var rules []rule
	for p, v := range s.Guards {
		if l.mine(p.Addr()) && !p.IsSingleIP() {
			rules = append(rules, rule{dst: p, do: guardTarget(v)})
		}
	}
	slices.SortFunc(rules, func(x, y rule) int {
		return cmp.Or(cmp.Compare(y.dst.Bits(), x.dst.Bits()), x.dst.Addr().Compare(y.dst.Addr()))
	})
	l.edits[filter].keep(chainRanges, rules)
}
