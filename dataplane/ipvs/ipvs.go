// Package ipvs programs the rows into IPVS, the kernel's load balancer, driven by generic netlink. A
// frontend that forwards is a virtual server, and the backends of its pool are the real servers. The kernel has many
// ways to choose among them. One table of nf_tables for each address family does what IPVS cannot: scopes, allowed
// sources, refusals, guards, source NAT and affinity. Its rules do not depend on the rows.
//
//	prerouting, output ─ frontends, internal-frontends ─► class: refuse, drop, or mark for SNAT and let pass
//	      │                     │ not found ─► guards      └─ affinity: a remembered backend? ─► dnat
//	      ▼
//	  local routes ─► input ─► IPVS: virtual server of the address or, for scope Internal, of the pool's mark
//	                             │ real server
//	                             ▼
//	                 output ─► remember it, if the pool has affinity ─► postrouting: masquerade
//
// The table sees the first packet of a connection only. IPVS keeps connections: a real server that leaves takes no new
// ones, and is deleted when it has none left.
package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// Plane is the IPVS data plane.
type Plane struct {
	dataplane.Base
	learned dataplane.Learned
	config  dataplane.Config
	options Options
	ruleset *nft.Ruleset
	client  *client
	sysctls []*sysctl
	locals  *locals
	held    *kernel // nil: the kernel's content is not known
	// deadlines are those of backends that left.
	deadlines deadlines
	// pastAddresses are the addresses that virtual servers of marks had frontends at; nil: nothing was read yet.
	pastAddresses pastAddresses
	clean         uint32    // Ruleset.Foreign when our tables were as they should be; 0: unknown
	timeouts      []timeout // those that the kernel has taken
}

// planned is what leads from what was read to the State.
type planned struct {
	foreign uint32 // of the ruleset, before it was read
	way     way    // of local addresses
	kernel  *kernel
	work    *work
}

// kernel is what we know of the kernel, and the rows that it serves.
type kernel struct {
	*rows
	servers *servers
	tables  []*table // IPv4, IPv6
	tx      *nft.Transaction
	forget  bool                   // affinity may have learnt a backend while that left
	refused map[model.Key]struct{} // frontends whose virtual servers the kernel does not take
}

var (
	_ dataplane.New       = New(Options{})
	_ dataplane.Dataplane = (*Plane)(nil)
)

// Driver has planes with options.
func Driver(o Options) dataplane.Driver {
	d := dataplane.Driver{
		Name: "ipvs", Open: New(o), Prepare: prepare(o), Inspect: inspect, Drain: drainLeft, HandBack: handBack,
	}
	return d.SeenBy(func(c dataplane.Config) (dataplane.Dataplane, error) { return look(c) })
}

// New returns what opens the plane in the network namespace of the calling thread. It needs CAP_NET_ADMIN.
func New(o Options) dataplane.New {
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		c.Mark, c.Log = cmp.Or(c.Mark, dataplane.DefaultMark), c.Logger()
		p := &Plane{config: c, options: o, deadlines: deadlines{}}
		if err := p.open(); err != nil {
			return nil, errors.Join(fmt.Errorf("ipvs: %w", err), p.Close())
		}
		return p, nil
	}
}

func (p *Plane) open() (err error) {
	if p.client, err = openClient(p.config.Inject); err != nil {
		return err
	}
	if p.sysctls, err = openSysctls(p.options); err != nil {
		return err
	}
	if err := p.openQuietly(); err != nil {
		return err
	}
	return p.probe()
}

// openQuietly opens what loads no module of the kernel.
func (p *Plane) openQuietly() (err error) {
	if p.ruleset, err = nft.Open(p.config.Inject); err != nil {
		return err
	}
	p.locals, err = openLocals(p.options, p.config.Log, p.config.Inject)
	return err
}

// probe has the kernel check, but not perform, a transaction with everything the plane may need.
func (p *Plane) probe() error {
	k := p.newKernel()
	for _, t := range k.tables {
		t.Name += "-probe"
		if err := t.structure(); err != nil {
			return err
		}
		for _, c := range []class{
			{verdict: model.Forward, snat: model.OffCluster, affinity: true, limited: true, scope: model.Internal},
			{verdict: model.Reject, limited: true},
		} {
			if _, err := t.use(c); err != nil {
				return err
			}
		}
		if err := t.setMemory(1, time.Second); err != nil {
			return err
		}
	}
	err := k.tx.Check(p.ruleset.Socket)
	if err == nil || errors.Is(err, unix.EPERM) {
		return err
	}
	return fmt.Errorf("%w: %w (Linux 5.13 or newer with nf_tables, NAT, reject and masquerading is needed)",
		dataplane.ErrUnsupported, err)
}

func (p *Plane) newKernel() *kernel {
	tx := &nft.Transaction{}
	return &kernel{
		rows:    newRows(),
		servers: &servers{client: p.client, options: p.options, deadlines: maps.Clone(p.deadlines)},
		tables:  newTables(p.config.Mark, tx),
		tx:      tx,
	}
}

// read finds out what the kernel holds. It leaves correct objects untouched.
func (p *Plane) read(s *model.State) (*kernel, error) {
	k := p.newKernel()
	for i, t := range k.tables {
		if err := p.load(t); err != nil {
			return nil, err
		}
		if t.Foreign {
			k.tables[i] = newTable(t.Family, t.Mark, k.tx)
			k.tables[i].previous = t.previous
			k.tables[i].Delete()
			k.tx.Join()
		}
		k.tables[i].PodInterfaces = s.Pods.Interfaces
	}
	k.adopt(s, k.tables)
	if err := p.locals.loadAll(); err != nil {
		return nil, err
	}
	err := p.readServers(k, s)
	if k.tx.Replaces() {
		k.avoid(k.servers.held)
	}
	return k, err
}

// readServers finds out which virtual servers are ours, as IPVS does not record their owner. They are those with our
// marks and those that the table names. They are also those at addresses that frontends have or that are on the
// interface for such addresses.
func (p *Plane) readServers(k *kernel, s *model.State) error {
	wanted := map[ipvs.Key]bool{}
	for key, f := range s.Frontends {
		if forwards(key, f) && key.Scope == model.Any {
			wanted[addressKey(key)] = true
		}
	}
	return k.servers.load(func(key ipvs.Key) bool {
		if key.Mark != 0 {
			return key.Mark&markMask == markBits
		}
		return wanted[key] || k.tables[index(key.V6)].recorded(key) || p.locals.claimed(key.Addr)
	})
}

// work is what leads from what the kernel holds to a State. Its order is: records of what will be ours, new virtual and
// real servers, the table, routes, and servers and records that are gone.
type work struct {
	servers  plan
	records  nft.Transaction
	table    nft.Transaction
	replaces bool           // table takes the place of one of another version, which serves until then
	add      []netip.Prefix // local routes
	forget   bool
	// takeSessions has the pools remember what other planes do; nil: they do not. The tables are there then. Nothing leads
	// to the pools yet, unless the tables replace others.
	takeSessions func()
}

// plan finds what is to be done for changes.
func (k *kernel) plan(s *model.State, w *changes, l *locals) (*work, error) {
	todo := &work{forget: w.forget}
	k.planServers(w, todo)
	if todo.replaces = k.tx.Replaces(); !todo.replaces {
		todo.records, *k.tx = *k.tx, nft.Transaction{}
	}
	err := k.planTables(s, w)
	todo.add = k.planLocals(l, w)
	todo.table, *k.tx = *k.tx, nft.Transaction{}
	return todo, err
}

func (k *kernel) planServers(w *changes, todo *work) {
	var missing []ipvs.Key
	for key := range w.servers {
		if k.servers.held[key] == nil {
			missing = append(missing, key)
			continue
		}
		k.planServer(key, todo)
	}
	slices.SortFunc(missing, k.servers.client.Compare) // the kernel's time depends on it
	for _, key := range missing {
		k.planServer(key, todo)
	}
}

func (k *kernel) planServer(key ipvs.Key, todo *work) {
	want := k.want(key)
	if key.Mark == 0 && want != nil {
		k.tables[index(key.V6)].record(key, true)
	}
	k.servers.set(key, want, &todo.servers)
}

func (k *kernel) planTables(s *model.State, w *changes) error {
	var errs []error
	for _, t := range k.tables {
		if w.whole {
			errs = append(errs, t.foundation())
		}
		t.OwnGuards(s, slices.Values(w.guards))
		t.ownHealth(s, w.health)
		if w.pods {
			t.OwnPods(s.Pods)
		}
	}
	for id := range w.pools {
		errs = append(errs, k.tables[index(id.V6)].setPool(id, k.pools[id]))
	}
	for key := range w.frontends {
		f, ok := k.frontends[key]
		errs = append(errs, k.tables[index(key.Addr.Is6())].setFrontend(key, f, ok, k.pools[f.Pool]))
	}
	for _, t := range k.tables {
		if w.whole || w.pods {
			errs = append(errs, t.structure())
		}
		if !w.whole { // otherwise what read found goes first
			t.sweepChains(k.rows)
		}
	}
	return errors.Join(errs...)
}

// planLocals finds the addresses that are to be made local, and closes the ports that are not those of
// frontends on them.
func (k *kernel) planLocals(l *locals, w *changes) []netip.Prefix {
	var candidates []netip.Prefix
	for key := range w.frontends {
		candidates = append(candidates, single(key.Addr))
	}
	if len(w.guards) > 0 { // addresses of a range that goes need routes of their own
		candidates = l.all()
	}
	missing := l.missing(candidates)
	slices.SortFunc(missing, netip.Prefix.Compare)
	missing = slices.Compact(missing)
	for _, p := range missing {
		if p.IsSingleIP() {
			k.tables[index(p.Addr().Is6())].setLocal(p.Addr(), true)
		}
	}
	return missing
}

// Sync implements dataplane.Dataplane.
func (p *Plane) Sync(ctx context.Context, s *model.State) error {
	return p.Repair(ctx, s, dataplane.Report{})
}

// Repair implements dataplane.Dataplane.
func (p *Plane) Repair(_ context.Context, s *model.State, r dataplane.Report) error {
	found, _ := r.Plan.(*planned)
	if err := p.sync(s, found); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	return nil
}

// sync plans, performs the plan, and sets the timeouts. The ruleset counts as clean only if the kernel has refused
// none of the plan.
func (p *Plane) sync(s *model.State, found *planned) error {
	p.notePastAddresses()
	p.held, p.clean = nil, 0
	clear(p.client.lacking.names) // a module may have been loaded
	if err := errors.Join(p.configure(), p.locals.claim()); err != nil {
		return err
	}
	before, err := p.ruleset.Foreign()
	if err != nil {
		return err
	}
	k, todo, err := p.planAt(s, before, found)
	if err != nil {
		return err
	}
	p.deadlines = k.servers.deadlines
	todo.takeSessions = func() { p.learned.TakeIn(p.config.Log, p.taker(s, k)) }
	err = p.perform(k, todo)
	switch {
	case err == nil:
		p.clean = before
	case !errors.Is(err, dataplane.ErrPartial):
		return err
	}
	late := p.setTimeouts()
	if !dataplane.Known(late) {
		return late
	}
	return errors.Join(err, late)
}

// configure sets what holds for all virtual servers.
func (p *Plane) configure() error {
	for _, c := range p.sysctls {
		if err := p.config.Inject("sysctl write"); err != nil {
			return err
		}
		if err := c.set(); err != nil {
			return err
		}
	}
	return nil
}

// planAt finds what there is to do, unless an Audit has just done so, of this ruleset and as many virtual servers. The
// next Audits find other changes that were made meanwhile.
func (p *Plane) planAt(s *model.State, foreign uint32, plan *planned) (*kernel, *work, error) {
	if plan != nil && plan.foreign == foreign && plan.way == p.locals.way {
		n, err := p.client.Count()
		if err != nil {
			return nil, nil, err
		}
		if n-p.client.Made() == plan.kernel.servers.turns.others {
			p.locals.want(s)
			return plan.kernel, plan.work, nil
		}
	}
	k, err := p.read(s)
	if err != nil {
		return nil, nil, err
	}
	todo, err := p.planAll(k, s)
	return k, todo, err
}

// planAll finds what leads from what read found to s.
func (p *Plane) planAll(k *kernel, s *model.State) (*work, error) {
	w, err := k.take(s, s.Whole())
	if err != nil {
		return nil, err
	}
	w.forget, w.whole = true, true
	for _, t := range k.tables {
		if err := t.Structure(nil); err != nil { // no chains: they come with the rows
			return nil, err
		}
	}
	for number, id := range k.affinityPools() { // for the sessions of other planes
		k.tables[index(id.V6)].addMemory(number)
	}
	for key := range k.servers.held {
		w.servers[key] = struct{}{}
		if key.Mark == 0 {
			k.tables[index(key.V6)].record(key, true)
		}
	}
	p.locals.want(s)
	p.adoptPastAddresses(k)
	for _, there := range []map[netip.Prefix]bool{p.locals.held, p.locals.otherHeld} {
		for held := range there {
			if held.IsSingleIP() {
				k.tables[index(held.Addr().Is6())].setLocal(held.Addr(), true)
			}
		}
	}
	for _, t := range k.tables {
		t.SweepRanges(s)
	}
	todo, err := k.plan(s, w, p.locals)
	if err != nil {
		return nil, err
	}
	for _, t := range k.tables {
		t.Sweep()
		for _, id := range t.foundIDs {
			delete(t.takenIDs, id)
		}
		clear(t.foundIDs)
		t.sweepChains(k.rows)
	}
	todo.table.Append(k.tx)
	return todo, nil
}

// Apply implements dataplane.Dataplane.
func (p *Plane) Apply(_ context.Context, s *model.State, c model.Change) error {
	if p.held == nil {
		return errors.New("ipvs: the kernel's content is not known; Sync first")
	}
	if err := p.apply(s, c); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	return nil
}

func (p *Plane) apply(s *model.State, c model.Change) error {
	k := p.held
	p.held = nil
	p.countLocals(k, s, c)
	w, err := k.take(s, c)
	if err != nil {
		return err
	}
	todo, err := k.plan(s, w, p.locals)
	if err != nil {
		return err
	}
	if err = p.perform(k, todo); err != nil {
		p.clean = 0
	}
	return err
}

// countLocals takes over which addresses frontends have. It comes before the rows are.
func (p *Plane) countLocals(k *kernel, s *model.State, c model.Change) {
	for _, key := range c.Frontends.Delete {
		p.locals.count(key, k.frontends[key], -1)
	}
	for key, f := range c.Frontends.Set.All() {
		p.locals.count(key, k.frontends[key], -1)
		p.locals.count(key, f, 1)
	}
	if !c.Guards.Empty() {
		p.locals.setRanges(s)
	}
}

// perform does the work. With dataplane.ErrPartial all is as it should be but for what the error names.
//
// IPVS, the table, and routes cannot be changed together. The order lets each packet in between find either the old way
// or the new one:
//
//   - The record of a virtual server comes before it, so that a process that starts after a crash knows it for ours. If
//     the table replaces one of another version, that is complete until then, and records come with the table.
//   - Virtual servers are complete before the table marks packets for them, and that before the address is local. A
//     packet for a local address that IPVS does not know is the node's own, and refused.
//   - Virtual servers go when the table does not lead to them any more, and routes when there are no virtual servers.
//   - Records go last.
func (p *Plane) perform(k *kernel, todo *work) error {
	var refused []error
	soft := func(err error) error { return soften(err, &refused) }
	for _, step := range []func() error{
		func() error { return soft(p.ruleset.Commit(&todo.records)) },
		func() error { todo.takeIn(!todo.replaces); return nil },
		func() error { return soft(k.servers.perform(todo.servers.first)) },
		func() error { return soft(p.substitute(k, todo)) },
		func() error { return k.refuse(&todo.table, len(refused) > 0) },
		func() error { return soft(p.ruleset.Commit(&todo.table)) },
		func() error { todo.takeIn(todo.replaces); return nil },
		func() error { return soft(p.locals.add(todo.add)) },
		func() error { return soft(k.servers.perform(todo.servers.last)) },
		func() error { return soft(k.servers.endAll(todo.servers.ended)) },
		func() error { return soft(k.drain(k.servers.draining.begun())) },
		func() error { return p.tidy(k, &refused) },
		func() error { return soft(p.forget(k, todo.forget)) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	k.forget = todo.forget
	p.held = k
	return errors.Join(refused...)
}

func (w *work) takeIn(now bool) {
	if now && w.takeSessions != nil {
		w.takeSessions()
	}
}

// soften puts an error that leaves all as it should be, but for what it names, among those refused.
func soften(err error, refused *[]error) error {
	if errors.Is(err, dataplane.ErrPartial) {
		*refused = append(*refused, err)
		return nil
	}
	return err
}

// drain deletes what has drained of some virtual servers.
func (k *kernel) drain(keys []ipvs.Key) error {
	return k.servers.drain(keys, func(key ipvs.Key) bool { _, ok := k.wanted[key]; return ok })
}

// tidy deletes the routes that no row needs, and the records of what is gone. An address to which connections may go on
// stays local.
func (p *Plane) tidy(k *kernel, refused *[]error) error {
	p.pastAddresses.prune(&k.servers.draining)
	ending := p.pastAddresses.ending(&k.servers.draining)
	gone, err := p.locals.removeOther(ending)
	surplus := p.locals.idle(ending)
	err = errors.Join(err, p.locals.remove(surplus))
	gone = append(gone, surplus...)
	if err := soften(err, refused); err != nil {
		return err
	}
	for _, gone := range gone {
		if gone.IsSingleIP() && !p.locals.held[gone] && !p.locals.otherHeld[gone] {
			k.tables[index(gone.Addr().Is6())].setLocal(gone.Addr(), false)
		}
	}
	for _, key := range k.servers.gone {
		if k.servers.held[key] == nil {
			k.tables[index(key.V6)].record(key, false)
		}
	}
	k.servers.gone = nil
	return soften(p.ruleset.Commit(k.tx), refused)
}

// Audit implements dataplane.Dataplane.
func (p *Plane) Audit(_ context.Context, s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	if r, err = p.audit(s, d); err != nil {
		return dataplane.Report{}, fmt.Errorf("ipvs: %w", err)
	}
	return r, nil
}

// audit compares sysctls, timeouts, and the rest. A quick audit does not read a ruleset that no other program has
// changed since it was clean.
func (p *Plane) audit(s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	var drifts []dataplane.Drift
	for _, c := range p.sysctls {
		if have := c.get(); have != c.value {
			drifts = append(drifts, dataplane.Drift{Class: "sysctl", Object: c.file, Want: c.value, Have: have})
		}
	}
	set, err := p.timeoutDrifts()
	if err != nil {
		return r, err
	}
	drifts = append(drifts, set...)
	if p.held != nil {
		if err := p.tick(); err != nil {
			return r, err
		}
	}
	foreign, err := p.ruleset.Foreign()
	if err != nil {
		return r, err
	}
	if p.held != nil && foreign == p.clean && d == dataplane.Quick {
		r.Drifts, err = p.quick()
	} else if r, err = p.compare(s, foreign); err == nil && len(r.Drifts) == 0 {
		p.clean = foreign
	}
	r.Drifts = append(drifts, p.nameMarks(r.Drifts)...)
	return r, err
}

// nameMarks adds to differences of virtual servers of marks whose they are.
func (p *Plane) nameMarks(drifts []dataplane.Drift) []dataplane.Drift {
	if p.held == nil {
		return drifts
	}
	pools := map[string]string{}
	for key, id := range p.held.wanted {
		if key.Mark != 0 {
			pools["virtual server "+key.String()] = " of pool " + id.String()
		}
	}
	for i := range drifts {
		drifts[i].Object += pools[drifts[i].Object]
	}
	return drifts
}

// quick looks at what is not in the ruleset, which no other program has touched.
func (p *Plane) quick() ([]dataplane.Drift, error) {
	drifts, err := p.held.servers.verify()
	if err != nil {
		return nil, err
	}
	if err := p.locals.load(); err != nil {
		return nil, err
	}
	missing := p.locals.missing(p.locals.all())
	return append(drifts, p.localDrifts(p.held, missing)...), nil
}

// compare reads everything. If it is as s says, that is what is held from now on, where nothing was known.
func (p *Plane) compare(s *model.State, foreign uint32) (r dataplane.Report, err error) {
	k, err := p.read(s)
	if err != nil {
		return r, err
	}
	users, ranges := p.locals.users, p.locals.ranges
	todo, err := p.planAll(k, s)
	if err != nil {
		return r, err
	}
	r.Drifts = append(k.drifts(todo, s), p.localDrifts(k, todo.add)...)
	switch {
	case len(r.Drifts) > 0 && len(p.client.lacking.names) == 0: // else Repair plans anew: a module may come
		r.Plan = &planned{foreign, p.locals.way, k, todo}
	case len(r.Drifts) == 0 && p.held == nil:
		p.held, p.deadlines = k, k.servers.deadlines
	}
	if p.held != k {
		p.locals.users, p.locals.ranges = users, ranges
	}
	return r, nil
}

// tick does what time brings about: backends that left have no connections any more. Its errors are like those of
// perform.
func (p *Plane) tick() error {
	k := p.held
	p.held = nil
	var refused []error
	for _, step := range []func() error{
		func() error { return soften(k.drain(k.servers.draining.next()), &refused) },
		func() error { return p.tidy(k, &refused) },
		func() error { return soften(p.forget(k, k.forget), &refused) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	k.forget = false
	p.held = k
	return errors.Join(refused...)
}

// drifts are what there is to do, but for what drains.
func (k *kernel) drifts(todo *work, s *model.State) []dataplane.Drift {
	want := map[ipvs.Key]*server{}
	for key := range k.wanted {
		want[key] = k.want(key)
	}
	drifts := k.servers.compare(want)
	for _, tx := range []*nft.Transaction{&todo.records, &todo.table} {
		drifts = append(drifts, tx.Drifts(s)...)
	}
	return drifts
}

func (p *Plane) localDrifts(k *kernel, missing []netip.Prefix) (drifts []dataplane.Drift) {
	const class, object = "routes", "local address"
	for _, m := range missing {
		drifts = append(drifts, dataplane.Drift{Class: class, Object: object, Want: m.String()})
	}
	ending := p.pastAddresses.ending(&k.servers.draining)
	for _, there := range slices.AppendSeq(p.locals.surplus(), maps.Keys(p.locals.otherHeld)) {
		if !ending.keep(there) {
			drifts = append(drifts, dataplane.Drift{Class: class, Object: object, Have: there.String()})
		}
	}
	return drifts
}

// Remove implements dataplane.Dataplane.
func (p *Plane) Remove(context.Context) error {
	p.held = nil
	if err := p.remove(); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	return nil
}

func (p *Plane) remove() error {
	r, err := p.leftovers()
	if err != nil {
		return err
	}
	return r.clear()
}

// Close implements dataplane.Dataplane.
func (p *Plane) Close() error {
	var errs []error
	for _, c := range p.sysctls {
		errs = append(errs, c.close())
	}
	p.sysctls = nil
	if p.client != nil {
		errs = append(errs, p.client.Close())
	}
	if p.ruleset != nil {
		errs = append(errs, p.ruleset.Close())
	}
	if p.locals != nil {
		p.locals.handle.Close()
	}
	return errors.Join(errs...)
}

// prepare sets what a later process may not set, in a pod with CAP_NET_ADMIN alone.
func prepare(o Options) func(dataplane.Config) error {
	return func(c dataplane.Config) (err error) {
		opened, err := New(o)(c)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, opened.Close()) }()
		for _, c := range opened.(*Plane).sysctls {
			err = errors.Join(err, c.set())
		}
		return err
	}
}
