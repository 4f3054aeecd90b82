// Package userspace serves Services from one process: constant rules lead their packets to its sockets, and it
// connects to a backend and copies what both say. It works wherever a process may, and it alone can try another
// backend when one does not answer.
//
//	prerouting ─ of a socket of ours? ──────────────────────► mark ─► route table 17985: local ─► the socket
//	   │ no: a destination of a row? ─ allowed? rejected? dropped?
//	   ▼ by origin: pods, this node, elsewhere                 tproxy ─► 127.0.0.1:port of the origin
//	output ─ this node's packets for a row ─► mark ─► lo ─► prerouting
//
//	accept ─► directory: the row, as State.Lookup has it ─► pool: whose turn? ─► dial, as the client unless the row
//	hides it ─► (no answer: the next backend) ─► copy or splice, both ways, until both have ended
//
// The rules decide what is refused or dropped, and which clients are allowed, as a connection that was accepted cannot
// be refused. Which of three sockets accepts a connection tells where it is from.
//
// Connections end with the process, unlike those of other planes. The rules and the sessions stay: a client that
// connects meanwhile waits for the next process.
package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/dataplane/internal/subset"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// Redirect is how packets come to the process.
type Redirect string

const (
	// ByTPROXY needs the kernel's nft_tproxy and nft_socket (Linux 5.9).
	ByTPROXY Redirect = "tproxy"
	// ByNAT translates addresses, for which each connection takes two more transactions of nf_tables; while there is no
	// process, those who connect are refused and do not wait.
	ByNAT Redirect = "nat"
	// ByPlane has another data plane translate addresses, the one given to NewOver: for kernels without nf_tables.
	// Backends see the process as their client.
	ByPlane Redirect = "plane"
	// ByListening makes no rules: the process listens at the destinations of rows, as far as they are addresses of the
	// machine and it may. It needs no rights. Backends see the process as their client.
	ByListening Redirect = "listen"
)

// Options are what the plane can be told. The zero value of each means the default.
type Options struct {
	// Redirect is how packets come to the process, by default the first of the constants that the kernel has and the
	// process may use.
	Redirect Redirect
	// DialTimeout is for how long one backend is waited for, three seconds by default: two SYNs. Dials is how many are
	// tried, six by default.
	DialTimeout time.Duration
	Dials       int
	// IdleTimeout ends a connection of TCP over which nothing has passed, a day by default; HalfClosedTimeout, an hour,
	// one of which one side has ended its direction.
	IdleTimeout, HalfClosedTimeout time.Duration
	// FlowTimeout ends a flow of UDP that is silent, half a minute by default; StreamTimeout, two minutes, one that was
	// answered and goes on. They are those of connection tracking.
	FlowTimeout, StreamTimeout time.Duration
	// MaxConnections bounds the connections of TCP that are open, and MaxFlows the flows of UDP. By default they are
	// two fifths and a tenth of the files that the process may open, 65,536 and 32,768 at most. They are never more than
	// there are files for, without a reserve for the rest of the process. Clients, Services and namespaces have shares
	// (package share).
	MaxConnections, MaxFlows int
}

func (o *Options) defaults() {
	o.DialTimeout = cmp.Or(o.DialTimeout, 3*time.Second)
	o.Dials = cmp.Or(o.Dials, 6)
	o.IdleTimeout = cmp.Or(o.IdleTimeout, 24*time.Hour)
	o.HalfClosedTimeout = cmp.Or(o.HalfClosedTimeout, time.Hour)
	o.FlowTimeout = cmp.Or(o.FlowTimeout, 30*time.Second)
	o.StreamTimeout = cmp.Or(o.StreamTimeout, 2*time.Minute)
	o.MaxConnections = cmp.Or(o.MaxConnections, min(share.Files()*2/5, 1<<16))
	o.MaxFlows = cmp.Or(o.MaxFlows, min(share.Files()/10, 1<<15))
	o.fit()
}

// fit makes what may be open at once so small that there are files for it. A connection takes two, and a flow one.
// A sixteenth is lent: for pipes while they carry something, sockets that answer flows, and backends that have not
// answered for long.
func (o *Options) fit() {
	rest := share.Files() - share.Reserve() - extraFiles()
	o.MaxFlows = min(o.MaxFlows, rest/8)
	o.MaxConnections = min(o.MaxConnections, (rest-o.MaxFlows)/2)
}

func extraFiles() int { return share.Files() / 16 }

// Plane is the userspace data plane.
type Plane struct {
	dataplane.Base
	learned   dataplane.Learned
	config    dataplane.Config
	options   Options
	namespace namespace.Namespace
	ruleset   *nft.Ruleset
	routes    *routes
	proxy     *proxy              // nil: nothing is served
	listening [2]listening        // of IPv4 and IPv6, as nft.Families are; zero: the family cannot be served
	why       [2]error            // why not
	tables    []*table            // nil: the kernel's content is not known
	over      dataplane.Dataplane // of ByPlane
	led       *subset.Subset      // what that has; nil: it is not known
	clean     uint32              // Ruleset.Foreign when our rules were as they should be; 0: unknown
	allowed   map[uint16]bool     // ports that answers of UDP may come from
	phase     phase
	standby   bool      // Sync prepares everything, and takes nothing
	tended    time.Time // see tend
}

const tendEvery = 10 * time.Second

// tend forgets clients whose time has run out, and tells which Services had to give way, once in a while. It reports
// whether it did.
func (p *Plane) tend() bool {
	now := time.Now()
	if now.Sub(p.tended) <= tendEvery {
		return false
	}
	p.tended = now
	if names := p.proxy.Forget(now); len(names) > 0 {
		p.config.Logger().Warn("a limit was reached, and clients of Services beyond their share were refused or reset; see "+
			"fairlead dump --counters, userspace.maxConnections and userspace.maxFlows",
			"service", said.List(names))
	}
	return true
}

var _ dataplane.Dataplane = (*Plane)(nil)

// Driver has planes with options that, where the kernel can do no better, have another one translate. Open sets the way
// in which packets come to the process; nil: it is not asked for.
func Driver(o Options, over dataplane.New, way *Redirect) dataplane.Driver {
	d := dataplane.Driver{Name: "userspace", Open: newOver(o, over, way), Inspect: inspect, Carries: carries}
	return d.SeenBy(func(c dataplane.Config) (dataplane.Dataplane, error) { return look(c) })
}

// New makes planes with options. They are opened in the network namespace of the calling thread, and need
// CAP_NET_ADMIN; without it see ByListening.
func New(o Options) dataplane.New { return newOver(o, nil, nil) }

func newOver(o Options, over dataplane.New, way *Redirect) dataplane.New {
	o.defaults()
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		p, err := open(c, o)
		if err != nil {
			return nil, fmt.Errorf("userspace: %w", err)
		}
		if err := p.probe(over); err != nil {
			return nil, errors.Join(fmt.Errorf("userspace: %w", err), p.Close())
		}
		if way != nil {
			*way = p.options.Redirect
		}
		return p, nil
	}
}

func open(c dataplane.Config, o Options) (*Plane, error) {
	here, err := namespace.Here()
	if err != nil {
		return nil, err
	}
	ruleset, err := nft.Open(c.Inject)
	if err != nil {
		return nil, errors.Join(err, here.Close())
	}
	routes, err := openRoutes(c.RelayMark())
	if err != nil {
		return nil, errors.Join(err, ruleset.Close(), here.Close())
	}
	return &Plane{
		config: c, options: o, namespace: here, ruleset: ruleset, routes: routes, allowed: map[uint16]bool{},
	}, nil
}

// probe finds the first way of redirection that the kernel has. If there is a wanted one, it is that or none.
func (p *Plane) probe(over dataplane.New) error {
	if p.listens() {
		return nil
	}
	ways := []Redirect{ByTPROXY, ByNAT, ByPlane}
	if p.options.Redirect != "" {
		ways = []Redirect{p.options.Redirect}
	}
	var errs []error
	for _, way := range ways {
		err := p.check(way, over)
		if err == nil {
			p.choose(way, errs)
			return nil
		}
		if errors.Is(err, unix.EPERM) {
			return p.withoutRights(err)
		}
		errs = append(errs, fmt.Errorf("by %s: %w", way, err))
	}
	return fmt.Errorf("%w: %w (nf_tables with tproxy and socket expressions are needed, or with nat: Linux 5.9 or newer, "+
		"modules nft_tproxy and nft_socket, or nft_nat and nft_masq)", dataplane.ErrUnsupported, errors.Join(errs...))
}

// withoutRights chooses the way that needs none, unless another one is wanted.
func (p *Plane) withoutRights(err error) error {
	if p.options.Redirect != "" {
		return err
	}
	p.options.Redirect = ByListening
	p.config.Logger().Warn("mode userspace without root, or CAP_NET_ADMIN: Services are served only where this process " +
		"may listen; endpoints see its address as their client's")
	return nil
}

// check has the kernel check, but not perform, a transaction with all rules.
func (p *Plane) check(way Redirect, over dataplane.New) (err error) {
	if way == ByPlane {
		if over == nil {
			return errors.New("there is no other data plane")
		}
		p.over, err = over(p.config)
		return err
	}
	return p.checkRules(listening{redirectAll: way != ByTPROXY})
}

func (p *Plane) checkRules(l listening) error {
	var tx nft.Transaction
	for _, f := range nft.Families {
		t := newTable(f, p.routes.mark, l, &tx)
		t.Name += "-probe"
		if err := t.Structure(t.chains()); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return tx.Check(p.ruleset.Socket)
}

// choose settles how packets come here, and says what is not possible that way.
func (p *Plane) choose(way Redirect, instead []error) {
	p.options.Redirect = way
	p.routes.unused = way != ByTPROXY
	if p.config.Log == nil {
		return
	}
	if way == ByPlane {
		p.config.Log.Warn("mode userspace redirects packets to its process by iptables: endpoints do not see the "+
			"client's address, and clients are refused while no process runs; have the kernel load nf_tables and nft_tproxy",
			"error", errors.Join(instead...))
	} else if len(instead) > 0 {
		p.config.Log.Warn("mode userspace translates addresses, as this kernel has no TPROXY: connections open more "+
			"slowly, and clients are refused while no process runs; have the kernel load nft_tproxy, nft_socket, "+
			"nft_fib_ipv4 and nft_fib_ipv6", "error", errors.Join(instead...))
	}
}

func (p *Plane) newTable(family int, tx *nft.Transaction) *table {
	t := newTable(nft.Families[family], p.routes.mark, p.listening[family], tx)
	t.phase = p.phase
	return t
}

// Sync implements dataplane.Dataplane. Connections live on, whatever happens to their rows.
func (p *Plane) Sync(ctx context.Context, s *model.State) error {
	return p.Repair(ctx, s, dataplane.Report{})
}

// Repair implements dataplane.Dataplane.
func (p *Plane) Repair(ctx context.Context, s *model.State, r dataplane.Report) error {
	if p.listens() {
		return p.syncListeners(ctx, s)
	}
	if p.translates() {
		return p.syncOver(ctx, s)
	}
	p.tables, p.clean = nil, 0
	p.begin()
	if err := p.serve(s); err != nil {
		return err
	}
	before, err := p.ruleset.Foreign()
	if err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	if found, _ := r.Plan.(*planned); found != nil && found.of(before, p.phase) && p.learned.None() {
		return p.perform(found)
	}
	served, partial := p.able(s)
	p.proxy.Rows.Replace(served)
	p.learned.TakeIn(p.config.Log, p.proxy.Rows.Taker())
	p.proxy.Expel(nil)
	todo, err := p.plan(served)
	if err != nil {
		return err
	}
	todo.foreign, todo.partial = before, partial
	return p.perform(todo)
}

// planned is what there is to do.
type planned struct {
	foreign uint32 // of the ruleset, before it was read
	phase   phase
	tables  []*table
	tx      *nft.Transaction
	partial error // the rows that cannot be served
}

// of reports whether it is still what there is to do.
func (todo *planned) of(foreign uint32, now phase) bool {
	return todo.foreign == foreign && todo.phase == now
}

// perform has packets led to the process as planned. The rows are known to it.
func (p *Plane) perform(todo *planned) error {
	if err := p.route(); err != nil {
		return err
	}
	err := p.commit(todo.tx)
	if !dataplane.Known(err) {
		return err
	}
	if slices.ContainsFunc(todo.tables, func(t *table) bool { return t.made }) {
		p.proxy.Rows.Lose()
	}
	p.settle(todo.tables)
	if p.phase == serving {
		p.save(false) // whom the plane before has told: the process may be killed before the next Save
	}
	if err = errors.Join(todo.partial, err); err == nil {
		p.clean = todo.foreign
	}
	return err
}

// serve opens the sockets, unless they are open. Rules of an earlier process may lead connections to them at once,
// so the rows are known before.
func (p *Plane) serve(s *model.State) error {
	if p.proxy != nil {
		return nil
	}
	if err := p.config.Inject("userspace listen"); err != nil {
		return err
	}
	proxy := newProxy(p.options, p.namespace, p.config.Logger())
	proxy.sourceNAT = &sourceNAT{ruleset: p.ruleset, tables: [2]*table{p.newTable(0, nil), p.newTable(1, nil)}}
	proxy.Rows.Replace(s)
	if !p.translates() {
		if err := p.takeOver(proxy.Rows, s); err != nil {
			return fmt.Errorf("userspace: %w", err)
		}
	}
	err := p.namespace.Do(func() error {
		if err := proxy.ask(); err != nil {
			return err
		}
		for i := range p.listening {
			p.listening[i], p.why[i] = proxy.listenIn(i)
		}
		return nil
	})
	if p.why[0] != nil && p.why[1] != nil {
		err = errors.Join(err, p.why[0], p.why[1])
	}
	if err != nil {
		proxy.close()
		return fmt.Errorf("userspace: %w", err)
	}
	p.proxy = proxy
	return nil
}

// route leads marked packets to the sockets.
func (p *Plane) route() error {
	if err := p.config.Inject("userspace route"); err != nil {
		return err
	}
	var errs []error
	for i, family := range families() {
		if p.why[i] == nil {
			errs = append(errs, p.routes.sync(family))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	return nil
}

func families() [2]int { return [2]int{unix.AF_INET, unix.AF_INET6} }

// able leaves out the rows that cannot be served. The error, an ErrPartial, names them.
func (p *Plane) able(s *model.State) (*model.State, error) {
	var errs []error
	out := s
	for key, f := range s.Frontends {
		if err := p.unable(key, f); err != nil {
			if out == s {
				out = s.Clone()
			}
			delete(out.Frontends, key)
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 {
		return s, nil
	}
	return out, fmt.Errorf("userspace: %w: %w", dataplane.ErrPartial, errors.Join(errs...))
}

// unable is why a row cannot be served; nil: it can be.
func (p *Plane) unable(key model.Key, f model.Frontend) error {
	family := 0
	if key.Addr.Is6() {
		family = 1
	}
	switch {
	case f.Verdict != model.Forward:
		return nil
	case p.why[family] != nil:
		return fmt.Errorf("frontend %s of %s: cannot listen: %w", key, f.Service, p.why[family])
	case key.Protocol == model.SCTP:
		// It listens from when there is a row of SCTP: that has the kernel load a module, which keeps others from having
		// SCTP of their own.
		if err := p.namespace.Do(p.proxy.listenSCTP); err != nil {
			return fmt.Errorf("frontend %s of %s: %w", key, f.Service, err)
		}
	case key.Protocol == model.UDP:
		if err := p.answerFrom(key); err != nil {
			return fmt.Errorf("frontend %s of %s: cannot answer from its port: %w (the process needs CAP_NET_BIND_SERVICE)",
				key, f.Service, err)
		}
	}
	return nil
}

// answerFrom reports why answers cannot come from the port of a destination: it is for those who have the right. A
// socket tries it, as each network namespace has a first port for all users.
func (p *Plane) answerFrom(key model.Key) error {
	if p.options.Redirect != ByTPROXY || p.allowed[key.Port] {
		return nil
	}
	err := p.namespace.Do(func() error {
		at := netip.AddrPortFrom(ownAddress(key.Addr.Is6()), key.Port)
		conn, err := socket.ListenUDP(at, socket.Transparent, socket.Shared)
		if err == nil {
			err = conn.Close()
		}
		return err
	})
	if errors.Is(err, unix.EACCES) {
		return err
	}
	p.allowed[key.Port] = true
	return nil
}

// plan finds the steps that lead from what the kernel holds to s.
func (p *Plane) plan(s *model.State) (*planned, error) {
	todo := &planned{phase: p.phase, tx: &nft.Transaction{}}
	for i := range nft.Families {
		if err := p.config.Inject("userspace list"); err != nil {
			return nil, err
		}
		t := p.newTable(i, todo.tx)
		t.PodInterfaces = s.Pods.Interfaces
		if err := t.load(p.ruleset.Socket); err != nil {
			return nil, fmt.Errorf("userspace: %w", err)
		}
		if t.Foreign {
			t = p.newTable(i, todo.tx)
			t.Delete()
		}
		if err := t.sync(s); err != nil {
			return nil, fmt.Errorf("userspace: %w", err)
		}
		todo.tables = append(todo.tables, t)
	}
	return todo, nil
}

// settle is called when the kernel has done what the tables' transaction says.
func (p *Plane) settle(tables []*table) {
	for _, t := range tables {
		t.Tx = nil
	}
	p.tables = tables
}

func (p *Plane) commit(tx *nft.Transaction) error {
	if err := p.ruleset.Commit(tx); err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	return nil
}

// Apply implements dataplane.Dataplane.
func (p *Plane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	if p.listens() {
		return p.applyListeners(s, c)
	}
	if p.translates() {
		return p.applyOver(ctx, s, c)
	}
	tables := p.tables
	if tables == nil || p.proxy == nil {
		return errors.New("userspace: the kernel's content is not known; Sync first")
	}
	p.tables = nil
	c, partial := p.ableChange(c)
	p.proxy.Rows.Change(c)
	tx := &nft.Transaction{}
	for _, t := range tables {
		t.Tx = tx
		if err := t.apply(s, c); err != nil {
			return fmt.Errorf("userspace: %w", err)
		}
	}
	err := p.commit(tx)
	if err != nil {
		p.clean = 0
	}
	if !dataplane.Known(err) {
		return err
	}
	p.proxy.Expel(&c)
	p.settle(tables)
	return errors.Join(partial, err)
}

// ableChange deletes the rows that cannot be served, see able.
func (p *Plane) ableChange(c model.Change) (model.Change, error) {
	s, err := p.able(&model.State{Frontends: maps.Collect(c.Frontends.Set.All())})
	if err != nil {
		c.Frontends.Delete = slices.Clone(c.Frontends.Delete)
		for key := range c.Frontends.Set.Keys() {
			if _, ok := s.Frontends[key]; !ok {
				c.Frontends.Delete = append(c.Frontends.Delete, key)
			}
		}
		c.Frontends.Set = model.RowsOf(s.Frontends)
	}
	return c, err
}

// Audit implements dataplane.Dataplane: each step that Sync would do is a difference. Rules and sets are not read if no
// other program has changed the ruleset since the last successful call.
func (p *Plane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	if p.proxy == nil {
		r.Drifts = []dataplane.Drift{{Class: "sockets", Object: "sockets of the process", Want: "open"}}
		return r, nil
	}
	tends := p.tend()
	if p.listens() {
		if tends { // listeners that failed are tried once in a while
			err = p.listen(s, (*listeners).retry)
		}
		return r, err
	}
	var drifts []dataplane.Drift
	for i, family := range families() {
		if p.why[i] != nil {
			continue
		}
		some, err := p.routes.audit(family, nft.Families[i].Name)
		if err != nil {
			return r, fmt.Errorf("userspace: %w", err)
		}
		drifts = append(drifts, some...)
	}
	if p.translates() {
		r, err = p.auditOver(ctx, d)
	} else {
		r, err = p.auditRules(s, d)
	}
	r.Drifts = append(drifts, r.Drifts...)
	return r, err
}

// auditRules plans what Sync would do, and reports it. A quick audit does not read a ruleset that no other program has
// changed since it was clean.
func (p *Plane) auditRules(s *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	foreign, err := p.ruleset.Foreign()
	if err != nil {
		return r, fmt.Errorf("userspace: %w", err)
	}
	if p.tables != nil && foreign == p.clean && d == dataplane.Quick {
		r.Plan = &planned{foreign: foreign, phase: p.phase, tables: p.tables, tx: &nft.Transaction{}}
		return r, nil
	}
	served, partial := p.able(s) // of which Sync has told
	todo, err := p.plan(served)
	if err != nil {
		return r, err
	}
	todo.foreign, todo.partial = foreign, partial
	r.Drifts = todo.tx.Drifts(served)
	if p.tables == nil {
		return r, nil
	}
	if len(todo.tx.Steps) == 0 {
		p.clean, todo.tables = foreign, p.tables
	}
	r.Plan = todo
	return r, nil
}

// Remove implements dataplane.Dataplane. All connections end; while they do, addresses are translated still, so that
// clients hear of it.
func (p *Plane) Remove(ctx context.Context) error {
	if p.listens() {
		p.endProxy()
		return nil
	}
	if p.translates() {
		return p.removeOver(ctx)
	}
	p.tables = nil
	if err := p.config.Inject("userspace remove"); err != nil {
		return err
	}
	if err := p.forgetMarked(); err != nil { // who asks again just now asks another plane the next time
		return err
	}
	if err := p.replaceTables(stub); err != nil {
		return err
	}
	p.endProxy()
	if err := p.forgetMarked(); err != nil {
		return err
	}
	var errs []error
	for _, family := range families() {
		if !defect.Is(defect.UserspaceRemove) {
			errs = append(errs, p.routes.remove(family))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	return p.replaceTables(nil)
}

// forgetMarked has connection tracking forget the flows that have the mark of ours, which the kernel tells: it may be
// that of another process.
func (p *Plane) forgetMarked() error {
	var errs []error
	wanted := func(f *tracked.Flow) bool { return f.Protocol == model.UDP || f.Attempt() }
	for _, family := range families() {
		mark, err := p.routes.marks(family)
		errs = append(errs, err,
			forget(p.ruleset.Socket, mark, wanted, tracked.Filter{Protocol: model.UDP}, unanswered()))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("userspace: %w", err)
	}
	return nil
}

// stub are the chains of a table that does nothing but keep the kernel translating. A chain alone does not do that: the
// kernel tracks connections in a network namespace only while a rule there asks for it (nf_ct_netns_get).
func stub() []nft.Chain {
	return []nft.Chain{{
		Name: "translated",
		Hook: &nft.Hook{Kind: "nat", Number: unix.NF_INET_PRE_ROUTING, Priority: redirectPriority},
		Rules: []nft.Rule{nft.NewRule("keep connection tracking while connections are reset",
			&expr.Ct{Key: expr.CtKeySTATE, Register: nft.Word(0)})},
	}}
}

// replaceTables deletes our tables, and makes others with these chains in the place of those that there were.
func (p *Plane) replaceTables(chains func() []nft.Chain) error {
	tx := &nft.Transaction{}
	for i := range nft.Families {
		t := p.newTable(i, tx)
		err := t.LoadTable(p.ruleset.Socket)
		if err != nil && !errors.Is(err, unix.EINVAL) { // a kernel without nf_tables
			return fmt.Errorf("userspace: %w", err)
		}
		if !t.Exists {
			continue
		}
		t.Delete()
		if chains == nil {
			continue
		}
		tx.Join()
		next := p.newTable(i, tx)
		next.Sets = nil
		if err := next.Structure(chains()); err != nil {
			return fmt.Errorf("userspace: %w", err)
		}
	}
	if len(tx.Steps) == 0 {
		return nil
	}
	return p.commit(tx)
}

func (p *Plane) endProxy() {
	if p.proxy != nil {
		p.proxy.close()
		p.proxy = nil
	}
}

// Close implements dataplane.Dataplane. All connections end.
func (p *Plane) Close() error {
	p.handOver()
	p.endProxy()
	p.routes.close()
	var err error
	if p.over != nil {
		err = p.over.Close()
	}
	return errors.Join(err, p.ruleset.Close(), p.namespace.Close())
}

// Counters implements dataplane.Observed.
func (p *Plane) Counters(ctx context.Context) (c dataplane.Counters, err error) {
	if p.proxy != nil {
		c = p.proxy.Counters()
	}
	if p.led != nil {
		behind, err := p.over.Counters(ctx)
		c.Refused = append(c.Refused, behind.Refused...)
		return c, err
	}
	for _, t := range p.tables {
		refused, err := t.RefusedByRules(p.ruleset.Socket, refusals())
		if err != nil {
			return c, fmt.Errorf("userspace: %w", err)
		}
		c.Refused = append(c.Refused, refused...)
	}
	return c, nil
}

// refusals are the chains whose rules refuse, for all rows of a kind.
func refusals() map[string][]dataplane.Refused {
	of := []dataplane.Refused{
		{Verdict: model.Drop, Reason: dataplane.SourceNotAllowed},
		{Verdict: model.Drop, Reason: dataplane.NoLocalEndpoints},
		{Verdict: model.Reject, Reason: dataplane.NoEndpoints},
	}
	return map[string][]dataplane.Refused{
		admit(model.Any): of, admit(model.Internal): of, chainRest: nft.Guarded(),
	}
}

// Outcomes implements dataplane.Observed.
func (p *Plane) Outcomes(_ context.Context, answered bool, f func(model.Outcome)) error {
	if p.proxy != nil && f != nil {
		p.proxy.Outcomes(answered, f)
	}
	return nil
}

// CloseIdle implements dataplane.Observed.
func (p *Plane) CloseIdle(ctx context.Context, of *dataplane.Idle) (n int, err error) {
	if p.over != nil {
		n, err = p.over.CloseIdle(ctx, of)
	}
	if p.proxy != nil {
		n += p.proxy.CloseIdle(of)
	}
	return n, err
}

// ResetOrphans implements dataplane.Observed.
func (p *Plane) ResetOrphans(ctx context.Context, gone dataplane.Gone) (n int, err error) {
	if p.over != nil {
		n, err = p.over.ResetOrphans(ctx, gone)
	}
	if p.proxy != nil {
		n += p.proxy.ResetOrphans(gone)
	}
	return n, err
}
