package handover

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

// TestModel walks the ways that a node can go from one plane to another one, on planes whose kernel is a map. Each way
// is a run of the real Handover, from the start of a process to the moment in which one plane is alone:
//
//	start ─► switch from one plane to the other ─► connections end ─► alone
//
// Before each operation on the kernel something may happen: see happenings. The test walks all ways on which one thing
// happens, and draws some on which up to three do. ./dev test --all walks all with two. Whatever happens, these must
// hold at each operation:
//
//   - every row that both planes hold is served.
//   - every client with a session reaches its backend with a new connection.
//   - every open connection goes on, but those that passed through a process that has died.
//
// At the end one plane holds the rows, nothing is left of the other, and no connection needs a removed object.
func TestModel(t *testing.T) {
	natures := []memory.Nature{memory.Tracked, memory.Tabled, memory.Relayed}
	seen, runs := map[uint64]bool{}, 0
	seed := sample.Seed(t)
	for _, from := range natures {
		for _, to := range natures {
			all := walk{seen: seen, limit: 1}
			if sample.All() {
				all.limit = 2
			}
			drawn := walk{seen: seen, limit: 3, runs: 400, random: rand.New(rand.NewPCG(seed, 0))}
			t.Run(fmt.Sprintf("%d to %d", from, to), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					for _, w := range []*walk{&all, &drawn} {
						for ; w.next(); runs++ {
							if err := w.run(t.Context(), from, to); err != nil {
								t.Fatalf("after %s: %v", w, err)
							}
						}
					}
				})
			})
		}
	}
	t.Logf("%d runs, %d states", runs, len(seen))
}

// happening is what may happen before an operation.
type happening int

const (
	nothing  happening = iota
	crashes            // the process dies; another one starts with the plane that was to be in force, or with the other
	restarts           // likewise, with the plane that was in force
	fails              // the operation returns an error
	arrives            // a client comes, and stays
	reads              // the process that serves has read a client's first packet, and handles it before time goes on
	changes            // the loop programs a change of the rows; only while it is not at work
	repairs            // the loop audits, and repairs; likewise
	happenings
)

func (h happening) String() string {
	return []string{"nothing", "crash", "restart", "failure", "client", "late packet", "change", "repair"}[h]
}

// walk goes through all sequences of choices, the last one first: each run repeats the choices of the one before but
// for the last that can be another one.
type walk struct {
	limit   int         // of what happens in a run
	choices []happening // of the run
	places  []string    // where they were made
	at      int         // the next one
	began   bool
	random  *rand.Rand // nil: all ways are walked
	runs    int        // that are still to be drawn
	seen    map[uint64]bool
}

// next begins another run, if there is one.
func (w *walk) next() bool {
	w.at = 0
	if w.random != nil {
		w.choices, w.places = nil, nil
		w.runs--
		return w.runs >= 0
	}
	if !w.began {
		w.began = true
		return true
	}
	for len(w.choices) > 0 {
		last := len(w.choices) - 1
		if w.choices[last]++; w.choices[last] < happenings && w.happened() <= w.limit {
			return true
		}
		w.choices, w.places = w.choices[:last], w.places[:last]
	}
	return false
}

func (w *walk) happened() (n int) {
	for _, c := range w.choices {
		if c != nothing {
			n++
		}
	}
	return n
}

// choose is what happens at a place.
func (w *walk) choose(place string) happening {
	if w.at == len(w.choices) {
		what := nothing
		if w.random != nil && w.happened() < w.limit && w.random.IntN(20) == 0 {
			what = happening(w.random.IntN(int(happenings)))
		}
		w.choices, w.places = append(w.choices, what), append(w.places, "")
	}
	w.places[w.at] = place
	w.at++
	return w.choices[w.at-1]
}

// String tells what happened where.
func (w *walk) String() string {
	var all []string
	for i, c := range w.choices {
		if c != nothing {
			all = append(all, fmt.Sprintf("%v at %d (%s)", c, i, w.places[i]))
		}
	}
	return strings.Join(all, ", ")
}

const (
	rows = `
backend default/api cluster 10.244.1.11:8080
backend default/api cluster 10.244.2.13:8080
backend default/web cluster 10.244.1.11:8080
backend default/web cluster 10.244.2.13:8080
backend default/web cluster 10.244.3.17:8080
frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster
frontend 10.96.0.11:80/tcp any forward default/api cluster snat offcluster
pool default/api cluster
pool default/web cluster affinity 3h0m0s
`
	rowMore = `
backend default/new cluster 10.244.4.19:8080
frontend 10.96.0.12:80/tcp any forward default/new cluster snat offcluster
pool default/new cluster
`
)

var errFails = errors.New("the kernel refuses")

// died is what a crash throws.
type died struct{ restarts bool }

// node is a kernel, and what happens on it.
type node struct {
	*walk
	ctx      context.Context
	kernel   *memory.Kernel
	drivers  []dataplane.Driver
	natures  map[string]memory.Nature
	wanted   *model.State
	clients  []client
	late     []func(dies bool) // handle packets that were read, unless the process dies
	read     map[string]bool   // planes whose sessions were read to be removed
	ports    uint16
	hand     *Handover // of the process that lives
	opened   []dataplane.Dataplane
	inLoop   bool
	taking   bool // the plane that a switch activates takes packets
	serves   bool // the process, or the rules in the kernel, serve all rows
	checking bool
	broken   error
}

// client is one that stays, with the backend of its session, and with a connection that is open.
type client struct {
	packet  memory.Packet
	backend netip.AddrPort // of the session
	plane   string         // that has begun the connection; empty: it was cut by a crash
	session sessionState
}

// sessionState says whether the plane in force must have a session.
type sessionState int

const (
	has  sessionState = iota
	will              // when the plane has learned it, which it is about to do
	lost              // it could not be learned, or the client came after it was read for the last time; see learnLate
)

// run is one way. It returns what was not as it should be.
func (w *walk) run(ctx context.Context, from, to memory.Nature) error {
	s, err := model.ParseState(rows)
	if err != nil {
		return err
	}
	n := &node{walk: w, ctx: ctx, kernel: &memory.Kernel{}, wanted: s, natures: map[string]memory.Nature{"a": from, "b": to}}
	for _, name := range []string{"a", "b"} {
		n.drivers = append(n.drivers, n.hooked(n.kernel.Driver(name, n.natures[name])))
	}
	first, second := "a", "b"
	for crash := n.process(first, second); crash != nil; crash = n.process(first, "") {
		if !crash.restarts && second != "" {
			first = second
		}
		second = ""
	}
	return n.broken
}

// process is the life of one. It starts with a plane, and may change to another one.
func (n *node) process(first, second string) (crash *died) {
	defer n.die()
	defer func() {
		if r := recover(); r != nil {
			d, ok := r.(died)
			if !ok {
				panic(r)
			}
			crash = &d
		}
	}()
	n.hand = New(Options{Drivers: n.drivers, DrainTime: time.Hour, Log: slog.New(slog.DiscardHandler)})
	p, err := n.open(first)
	if err != nil {
		n.fail(err)
		return nil
	}
	n.hand.Start(p)
	n.read = map[string]bool{}
	n.resync()
	for range 3 {
		n.arrive()
	}
	if second != "" {
		err := n.hand.Switch(n.ctx, n, func() (*Plane, error) { return n.open(second) }, func(Progress) {})
		n.check("the end of the switch")
		if err != nil && n.happened() == 0 {
			n.fail(fmt.Errorf("the plane does not change: %w", err))
		}
	}
	n.pass(2)
	n.end()
	return nil
}

// end has all connections end, and expects that one plane is alone.
func (n *node) end() {
	for i := range n.clients {
		n.kernel.End(n.clients[i].packet)
		n.clients[i].plane = ""
	}
	n.pass(2)
	for range n.limit + 1 { // failed steps are tried again
		if n.hand.state != Alone {
			n.resync()
			n.pass(1)
		}
	}
	n.checking = true // from now on nothing happens
	defer func() { n.checking = false }()
	for _, d := range n.drivers {
		if left, _ := d.Inspect(); left.Rules != (d.Name == n.hand.InForce().Name) {
			n.fail(fmt.Errorf("in the end plane %s has rules: %t", d.Name, left.Rules))
		}
	}
	r, err := n.hand.Audit(n.ctx, n.wanted, dataplane.Full)
	if err != nil || len(r.Drifts) > 0 || n.hand.state != Alone || len(n.hand.Kept()) > 0 {
		n.fail(fmt.Errorf("in the end: %w, state %d, %v, %v", err, n.hand.state, r.Drifts, n.hand.Kept()))
	}
}

// die ends the process, which takes connections with it that passed through it.
func (n *node) die() {
	n.checking = true
	n.handleLate(true)
	for _, p := range n.opened {
		_ = p.Close()
	}
	n.checking, n.inLoop, n.taking, n.opened = false, false, false, nil
	for i, c := range n.clients {
		if n.natures[c.plane] == memory.Relayed {
			n.kernel.End(c.packet)
			n.clients[i].plane = ""
		}
	}
	// Rules that need a process serve again when the next process has programmed.
	n.serves = n.serves && n.natures["a"] != memory.Relayed && n.natures["b"] != memory.Relayed
}

func (n *node) open(name string) (*Plane, error) {
	return n.hand.Reopen(dataplane.Config{Fault: n.before(name)}, name, func(c dataplane.Config) (*Plane, error) {
		i := slices.IndexFunc(n.drivers, func(d dataplane.Driver) bool { return d.Name == name })
		made, err := n.drivers[i].Open(c)
		if err != nil {
			return nil, err
		}
		n.opened = append(n.opened, made)
		p := &Plane{Dataplane: noted{made, n}, Name: name, Settings: name}
		if n.natures[name] == memory.Relayed {
			p.Process = made
		}
		return p, nil
	})
}

// noted is a plane that tells the node when it takes packets.
type noted struct {
	dataplane.Dataplane
	*node
}

func (p noted) SetStage(ctx context.Context, s *model.State, to dataplane.Stage) (int, error) {
	open, err := p.Dataplane.SetStage(ctx, s, to)
	p.taking = p.taking || to == dataplane.Active && err == nil
	return open, err
}

// hooked has something happen before what a Driver does, too.
func (n *node) hooked(d dataplane.Driver) dataplane.Driver {
	sessions, remove, drain := d.Sessions, d.Remove, d.Drain
	d.Sessions = func(ctx context.Context, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Session, error] {
		c.Fault = n.before(d.Name + " left")
		return sessions(ctx, c, s)
	}
	d.Remove = func(ctx context.Context, c dataplane.Config) error {
		c.Fault = n.before(d.Name + " left")
		return remove(ctx, c)
	}
	if drain != nil {
		d.Drain = func(ctx context.Context, c dataplane.Config) (int, error) {
			c.Fault = n.before(d.Name + " left")
			return drain(ctx, c)
		}
	}
	return d
}

// before checks what must hold, and has happen what the walk chooses.
func (n *node) before(plane string) func(operation string) error {
	return func(operation string) error {
		if n.checking {
			return nil
		}
		place := plane + " " + operation
		n.check(place)
		n.note(place)
		if name, _, ok := strings.Cut(place, " left sessions"); ok && n.hand.state == Clearing {
			defer func() { n.read[name] = true }()
		}
		switch what := n.choose(place); {
		case what == crashes, what == restarts:
			panic(died{what == restarts})
		case what == fails:
			if strings.Contains(place, "sessions") { // a plane serves without
				n.forget()
			}
			return errFails
		case what == arrives && n.serves:
			n.arrive()
		case what == reads && n.serves:
			n.readLate()
		case what == changes && !n.inLoop && n.hand.programmed.Load():
			n.change()
		case what == repairs && !n.inLoop && n.hand.programmed.Load():
			n.repair()
		}
		return nil
	}
}

// note counts states.
func (n *node) note(place string) {
	h := fnv.New64a()
	fmt.Fprint(h, n.natures, place, n.hand.state, n.hand.InForce().Name, n.hand.Kept(), len(n.late), n.wanted.Rows(), n.inLoop)
	for _, d := range n.drivers {
		left, _ := d.Inspect()
		fmt.Fprint(h, left)
	}
	for _, c := range n.clients {
		fmt.Fprint(h, c.plane)
	}
	n.seen[h.Sum64()] = true
}

func (n *node) fail(err error) {
	if n.broken == nil {
		n.broken = err
	}
}

// packet is the first one of a new connection.
func (n *node) packet(client, service string) memory.Packet {
	n.ports++
	return memory.Packet{SourcePort: n.ports, Packet: model.Packet{
		Protocol: model.TCP, Source: netip.MustParseAddr(client), Destination: netip.MustParseAddrPort(service),
	}}
}

// check sends packets of all clients, old ones and new ones.
func (n *node) check(place string) {
	if !n.serves {
		return
	}
	probe := n.packet("192.0.2.1", "10.96.0.11:80")
	if a := n.kernel.Send(probe); a.Verdict != model.Forward {
		n.fail(fmt.Errorf("before %s no plane serves a row", place))
	}
	n.kernel.End(probe)
	for _, c := range n.clients {
		if c.session == has {
			again := n.packet(c.packet.Source.String(), "10.96.0.10:80")
			if a := n.kernel.Send(again); a.Backend.AddrPort() != c.backend {
				n.fail(fmt.Errorf("before %s a client with a session at %v is sent to %v", place, c.backend, a.Backend.AddrPort()))
			}
			n.kernel.End(again)
		}
		if c.plane == "" {
			continue
		}
		if a := n.kernel.Send(c.packet); a.Begins {
			n.fail(fmt.Errorf("before %s a connection through %s is cut", place, c.plane))
		}
	}
}

// arrive has a client come, whose connection stays open.
func (n *node) arrive() {
	p := n.packet(fmt.Sprintf("192.0.2.%d", 10+len(n.clients)), "10.96.0.10:80")
	n.came(p, n.kernel.Send(p))
}

func (n *node) came(p memory.Packet, a memory.Answer) {
	if a.Verdict != model.Forward {
		n.fail(errors.New("a new client is not served"))
		return
	}
	c := client{packet: p, backend: a.Backend.AddrPort(), plane: a.Plane}
	switch old := a.Plane != n.hand.InForce().Name; {
	case old && n.read[a.Plane]:
		c.session = lost
	case old, n.taking: // another plane takes packets already: it has read the sessions before this client came
		c.session = will
	}
	n.clients = append(n.clients, c)
}

// forget notes that sessions could not be read or learned.
func (n *node) forget() {
	for i := range n.clients {
		n.clients[i].session = lost
	}
}

// readLate has the process that serves read a packet that it handles later.
func (n *node) readLate() {
	p := n.packet("192.0.2.100", "10.96.0.11:80")
	handle := n.kernel.Receive(p)
	n.late = append(n.late, func(dies bool) {
		if !dies && handle().Verdict != model.Forward {
			n.fail(errors.New("a packet that was read is not handled"))
		}
		n.kernel.End(p)
	})
}

func (n *node) handleLate(dies bool) {
	for _, handle := range n.late {
		handle(dies)
	}
	n.late = nil
}

// change has the loop program another State.
func (n *node) change() {
	n.inLoop = true
	defer func() { n.inLoop = false }()
	text := rows
	if len(n.wanted.Frontends) == 2 {
		text += rowMore
	}
	next, err := model.ParseState(text)
	if err != nil {
		n.fail(err)
		return
	}
	change := model.Diff(n.wanted, next)
	n.wanted = next
	if err := n.hand.Apply(n.ctx, n.wanted, change); err != nil {
		n.sync()
	}
}

func (n *node) audit() {
	n.inLoop = true
	defer func() { n.inLoop = false }()
	if _, err := n.hand.Audit(n.ctx, n.wanted, dataplane.Quick); err != nil {
		n.sync()
	}
}

func (n *node) repair() {
	n.inLoop = true
	defer func() { n.inLoop = false }()
	r, err := n.hand.Audit(n.ctx, n.wanted, dataplane.Full)
	if err == nil {
		err = n.hand.Repair(n.ctx, n.wanted, r)
	}
	if err != nil {
		n.sync()
	}
}

// resync has the loop program everything.
func (n *node) resync() {
	n.inLoop = true
	defer func() { n.inLoop = false }()
	n.sync()
}

func (n *node) sync() {
	var err error
	for range n.limit + 1 {
		if err = n.hand.Sync(n.ctx, n.wanted); err == nil {
			n.serves = true
			return
		}
		n.serves = n.serves || errors.Is(err, dataplane.ErrPartial)
	}
	n.fail(fmt.Errorf("the plane in force cannot be programmed: %w", err))
}

// pass has time go on, with audits as the engine makes them. Packets that were read are handled before.
func (n *node) pass(looks int) {
	for range looks {
		n.handleLate(false)
		for i := range n.clients {
			n.clients[i].session &^= will
		}
		bubble.Pass(maxPause)
		n.audit()
	}
}

// Between implements Loop.
func (n *node) Between(ctx context.Context, f func(context.Context, Turn) error) error {
	n.inLoop = true
	defer func() { n.inLoop = false }()
	return f(ctx, turn{n})
}

// Stopped implements Loop.
func (n *node) Stopped() <-chan struct{} { return nil }

// turn is that of the loop of a node.
type turn struct{ *node }

func (t turn) State() *model.State { return t.wanted }
func (t turn) Replaced(holds bool, _ error) {
	if !holds {
		t.sync()
	}
}
func (t turn) Failed(context.Context, error) { t.sync() }
func (t turn) AuditSoon()                    {}
func (t turn) Resync(ctx context.Context) error {
	err := t.hand.Sync(ctx, t.wanted)
	if err != nil {
		t.sync()
	}
	return err
}
