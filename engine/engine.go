// Package engine is the loop that makes the kernel follow the cluster, and the servers that tell
// others how it does.
//
//	source ── Next ──► inbox ──► queue ──► Table.Update ──► State, Change ──► Sync | Apply ──► data plane
//	                             ▲                              │  │
//	                 requests ───┘ (Do ends the wait)           │  └──► healthCheckNodePort servers
//	                                                            └──► /healthz, /livez, /readyz, control socket
//
// One goroutine, that of Run, owns the State, the Table and the data plane. It does one thing after
// another and needs no locks; others ask it through Do. Another one pulls the Source.
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"runtime/debug"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

// Options say what an Engine connects. The caller goes on owning Source and Plane and closes them
// after Run.
type Options struct {
	Source source.Source
	Table  *service.Table
	Plane  dataplane.Dataplane
	Log    *slog.Logger // nil: silent

	// Once ends Run when all rows have been programmed for the first time, or cannot be. The engine opens no listeners:
	// another process may have them.
	Once bool
	// AuditInterval is the time between two comparisons of the kernel with the State; 0: half a second.
	// Where comparisons take long they are made less often, so that they cost a hundredth of one CPU, and those with
	// repairs a quarter.
	AuditInterval time.Duration
	// ExternalChanges are those that the kernel reports: the next audit comes at once then. nil: nothing reports them.
	ExternalChanges <-chan dataplane.ExternalChange
	// MaxRest is how long a change may have to wait at most because programming the last ones of its namespace took
	// much processor time; 0: it never has to. Where programming is quick no change ever waits.
	MaxRest time.Duration
	// Connect reports whether a backend accepts a connection of TCP from this node. It is called by many goroutines. nil:
	// backends are not judged.
	Connect func(ctx context.Context, backend netip.AddrPort) bool
	// ResetOrphans has open connections reset whose backend is gone and does not acknowledge what it was sent.
	ResetOrphans bool
	// HealthTimeout is how long a change may wait to be programmed before /healthz says so; 0: one
	// minute, which is kube-proxy's (twice its syncPeriod).
	HealthTimeout time.Duration
	// HealthAddress is where /healthz and /livez are served; the zero value: nowhere.
	HealthAddress netip.AddrPort
	// HealthFile has a responder answer at the health check ports of Services, and not the engine.
	HealthFile HealthFile
	// HardFail ends Run if HealthAddress cannot be opened at once. Otherwise it is tried again and again.
	HardFail bool
	// ControlSocket is the path of the Unix socket on which "fairlead dump" and others ask; empty: none.
	ControlSocket string
	// Control are more questions that are answered on the control socket, by their paths. They are asked from any
	// goroutine.
	Control map[string]http.Handler
	// ControlRefused is called once with the reason why the control socket cannot be opened; it may be nil. It may be
	// called from any goroutine. The engine goes on trying to open the socket.
	ControlRefused func(error)
	// ConnectionClosed gets the listener and the reason, in the words of httpserve, when a limit closes a connection of
	// /healthz, a health check port or the control socket. It may be nil, and may be called from any goroutine.
	ConnectionClosed func(listener, reason string)
	// Health are more questions that are answered beside /healthz, by their paths.
	Health map[string]http.Handler
	// About tells more for "fairlead status"; nil: nothing. It may be called from any goroutine.
	About func() About
	// Observer is called with the results of rounds and requests; it may be nil.
	Observer Observer

	work func() time.Duration // a clock of the calling thread's work; nil: its processor time
}

const (
	auditInterval = 500 * time.Millisecond
	healthTimeout = time.Minute
	// Failed programming is tried again after minBackoff, and then after ever longer waits up to maxBackoff. The first
	// wait after a success is at most againBackoff, and minBackoff if the success has lasted for calm.
	minBackoff   = 100 * time.Millisecond
	maxBackoff   = 30 * time.Second
	againBackoff = time.Second
	calm         = 10 * time.Second
	// Retries for single refused rows take a fifth of the time at most.
	partialShare = 4
	// onceAttempts is how often Once tries.
	onceAttempts = 4
)

// View is what a request sees. All of it is lent until the request returns.
type View struct {
	State *model.State
	Table *service.Table
	Plane dataplane.Dataplane
}

// ErrStopped says that Run has returned.
var ErrStopped = errors.New("the engine has stopped")

// Engine drives one data plane.
type Engine struct {
	options  Options       // but for what Settings and Parts have, they stay
	requests chan *request // wait for the first batch
	orders   chan *request // do not
	stopped  chan struct{}
	started  time.Time
	status   statusBox
	checks   *checks

	// Only the goroutine of Run uses the fields from here on.
	control    *controlServer
	state      *model.State // nil before the first batch
	dirty      bool         // the kernel is unknown: the next call is Sync
	partial    bool         // some rows are not in force, but the next change may come
	retryAt    time.Time    // when dirty or partial
	backoff    time.Duration
	synced     time.Time     // when that was last successful; zero: it has failed since
	took       time.Duration // the last one
	audits     audits
	saves      saves
	looks      looks
	orphans    orphans
	rebalances rebalances
	recurrence recurrence
	problems   problems
	usedUp     map[string]service.Problem // by namespace, of shares of which clients have used all

	pull    func(source.Source) *inbox
	inbox   *inbox // of the Source in use
	queue   queue
	inForce inForce
	rests   rests
	pace    pace
	cost    cost                            // of the turn that goes on
	pending pending                         // rows of the Table that the kernel lacks
	health  map[netip.AddrPort]model.Health // of the last State that the kernel is known to have

	round    Round // the one that is going on
	again    bool  // go round without waiting
	tidy     tidy
	reported said.Share // of problems
	edited   said.Share // of changes in force

	lastChanges map[string]LastChange // by Service
}

// New makes an Engine. Nothing happens before Run.
func New(o Options) *Engine {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Once {
		o.HealthAddress, o.HealthFile, o.ControlSocket, o.Connect = netip.AddrPort{}, HealthFile{}, "", nil
	}
	o.HealthTimeout = cmp.Or(o.HealthTimeout, healthTimeout)
	if o.Observer == nil {
		o.Observer = Unobserved{}
	}
	if o.work == nil {
		o.work = processorTime
	}
	if o.ControlRefused == nil {
		o.ControlRefused = func(error) {}
	}
	e := &Engine{
		options:     o,
		requests:    make(chan *request),
		orders:      make(chan *request),
		stopped:     make(chan struct{}),
		started:     time.Now(),
		dirty:       true,
		audits:      newAudits(o.HealthTimeout / 2),
		saves:       saves{budget: budget{share: 10, credit: time.Second, longest: maxAuditRest}},
		rests:       newRests(),
		pace:        newPace(),
		reported:    said.Share{Words: 2 * maxReported, While: time.Minute},
		edited:      said.Share{Words: 2 * maxEdits, While: time.Minute},
		lastChanges: map[string]LastChange{},
		problems:    newProblems(),
		looks:       looks{asked: make(chan service.Ask, maxAsks)},
		orphans:     newOrphans(),
		rebalances:  rebalances{until: map[model.PoolID]time.Time{}},
		tidy:        tidy{heap: heap, give: debug.FreeOSMemory},
	}
	e.queue = e.newQueue()
	e.status.set(Status{NodeEligible: true})
	e.setTimes(o.AuditInterval, o.MaxRest)
	e.checks = e.newChecks()
	return e
}

// Run programs the data plane until ctx ends, and then returns nil and leaves the kernel as it is.
// It returns an error if the Source fails, or if Once is set and the data plane fails. Sockets are
// opened on the calling thread, thus in its network namespace. Run is called once.
func (e *Engine) Run(ctx context.Context) error {
	defer close(e.stopped)
	defer e.checks.close()
	e.openControl(e.options.ControlSocket)
	defer func() { e.control.close() }() // Configure may have replaced it
	if err := e.checks.openHealthz(e.options.Log); err != nil && e.options.HardFail {
		return err
	}
	keeping, stop := context.WithCancel(ctx)
	defer stop()
	e.checks.running.Go(func() { wait.UntilWithContext(keeping, e.checks.file.confirm, time.Second) })
	e.pull = func(s source.Source) *inbox { return openInbox(ctx, s, e.arrived) }
	e.inbox = e.pull(e.options.Source)
	defer func() { e.inbox.close() }() // Replace may have replaced it
	e.options.Plane.ReadAhead(ctx)     // while the first objects are on their way
	return e.loop(ctx)
}

// loop takes turns until ctx ends. Requests are served between turns, when no turn changes the State. Once ends it
// after the first success, or with the last error after onceAttempts.
func (e *Engine) loop(ctx context.Context) error {
	for {
		turn, err := e.next(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("read objects: %w", err)
		}
		if turn.foreign != nil {
			e.audits.notify(*turn.foreign)
		}
		if e.mustTurn(turn) {
			err = e.turn(ctx)
		}
		if turn.request != nil {
			turn.request.serve(View{e.state, e.options.Table, e.options.Plane})
		}
		if e.options.Once && e.state != nil && (!e.dirty || e.status.get().Failures >= onceAttempts) {
			return err
		}
	}
}

// arrived notes what the loop may be too busy to take.
func (e *Engine) arrived(d delivery) {
	e.status.queued(d.at)
	var n Changes
	n.add(&d.batch)
	e.options.Observer.Arrived(n)
}

// mustTurn reports whether there is anything to do now. While the changes that came have to rest they are no reason.
func (e *Engine) mustTurn(t turn) bool {
	if e.state == nil {
		return e.queue.hasCommon()
	}
	return !t.arrived || !time.Now().Before(e.due())
}

// turn takes in what has arrived and has the kernel and the servers follow.
func (e *Engine) turn(ctx context.Context) error {
	e.learn(ctx)
	change := e.take(e.release())
	if e.options.ResetOrphans {
		e.orphans.follow(&change)
	}
	e.rebalances.follow(&change)
	err := e.program(ctx, change)
	e.save(ctx)
	e.resetOrphans(ctx)
	e.rebalance(ctx)
	if len(e.cost.shares) > 0 {
		e.rests.charge(&e.cost)
	}
	if len(e.cost.shares) > 0 && e.round.Verb == Applied {
		e.pace.took(&e.cost)
	}
	if !e.dirty && (e.health == nil || !maps.Equal(e.health, e.state.Health)) {
		e.health = maps.Clone(e.state.Health) // the State's changes with it
		e.checks.file.put(e.health)
	}
	if !e.options.Once && e.checks.follow(e.health, e.options.Log) {
		e.again = true
	}
	e.observe(err)
	e.tidy.run() // when all is told
	return err
}

// turn is why the loop goes round. Without a reason something is due.
type turn struct {
	arrived bool                      // something came from the Source
	request *request                  // nil: none
	foreign *dataplane.ExternalChange // change of the kernel; nil: none
}

// next waits for a batch, for a request, or until something is due, and takes all batches that have come.
//
// There are two traps. The wait for the first batch has no deadline, and a request that ends it does not stand for a
// batch. Before the first batch the State is empty, and programming that would wipe the node. And next does not serve
// requests: the loop does so between two turns, so that all state has one goroutine.
func (e *Engine) next(ctx context.Context) (t turn, err error) {
	requests, foreign := e.requests, e.options.ExternalChanges
	if e.state == nil {
		requests = nil
	}
	if e.audits.notified() { // which is enough to look: others are taken then
		foreign = nil
	}
	alarm := time.NewTimer(0)
	defer alarm.Stop()
	due := alarm.C
	if e.state == nil {
		due = nil
	} else if !e.again {
		alarm.Reset(time.Until(e.due()))
	}
	e.again = false
	select {
	case <-e.inbox.ready:
		t.arrived = true
	case t.request = <-requests:
	case t.request = <-e.orders:
	case f := <-foreign:
		t.foreign = &f
	case <-due:
	case <-ctx.Done():
		return t, ctx.Err()
	}
	return t, e.gather()
}

// due is when the loop has to go round even if nothing comes.
func (e *Engine) due() time.Time {
	due := e.audits.due
	if at := e.saves.due; !at.IsZero() && at.Before(due) {
		due = at
	}
	if e.dirty || e.partial && e.retryAt.Before(due) {
		due = e.retryAt
	}
	if e.learns() && e.looks.at.Before(due) {
		due = e.looks.at
	}
	for _, at := range []time.Time{e.tidy.at, e.orphans.at, e.rebalances.next} {
		if !at.IsZero() && at.Before(due) {
			due = at
		}
	}
	switch at, waits := e.queue.due(e.rests.when); {
	case waits && e.dirty: // a Sync takes as long with it
		due = time.Time{}
	case waits && at.Before(due):
		due = at
	}
	return due
}

// newQueue is one for the Table in use.
func (e *Engine) newQueue() queue {
	return queue{
		began: e.started,
		owner: func(slice service.Name) string { return e.options.Table.ServiceOf(slice) },
		size:  func(name service.Name) (frontends, backends int) { return e.options.Table.Size(name) },
	}
}

// gather puts the objects that have come into the queue. All that came before the first turn are for that turn.
func (e *Engine) gather() error {
	came, err := e.inbox.take()
	for _, d := range came {
		e.inForce.came(d)
		if e.state == nil {
			e.queue.putWhole(d)
		} else {
			e.queue.put(d)
		}
	}
	return err
}

// release is what the next turn programs.
func (e *Engine) release() taken {
	if e.state == nil || e.dirty {
		return e.queue.all()
	}
	return e.queue.take(e.pace.size, time.Now(), e.rests.when)
}

// take brings the State up to date.
func (e *Engine) take(t taken) model.Change {
	e.cost = cost{shares: t.shares, cut: t.cut, full: t.full}
	var state *model.State
	var change model.Change
	e.cost.measure(e.options.work, func() { state, change, e.round.Problems = e.options.Table.Update(t.batch) })
	e.tellProblems(&t.batch, e.round.Problems, e.options.Table.Ceased())
	e.round.Batch = t.batch
	e.round.Before = change.PoolsBefore
	e.pending.add(&t.batch)
	e.pending.remember(&t)
	if first := e.state == nil; first || !change.Empty() {
		e.status.queued(time.Now())
	}
	e.state = state
	e.status.counted(count(state))
	if t.batch.Node != nil {
		e.setEligible(t.batch.Node.Eligible)
	}
	return change
}

// tellProblems has the log and the status tell what has arisen, and what a Batch and the Table say is over.
func (e *Engine) tellProblems(b *service.Batch, arisen []service.Problem, ceased []string) {
	e.log(b.Resolved, arisen)
	for name, s := range b.Services.All() {
		if s == nil {
			delete(e.lastChanges, name.String())
		}
	}
	if e.problems.note(b, arisen, ceased, e.options.Table.Remaining) {
		e.status.setProblems(e.problems.list)
	}
}

func (e *Engine) setEligible(is bool) {
	switch was := e.Status().NodeEligible; {
	case was && !is:
		e.options.Log.Info("load balancers should not use this node: /healthz says 503")
	case is && !was:
		e.options.Log.Info("load balancers may use this node again")
	}
	e.status.eligible(is)
}

// maxReported is how many problems of a namespace the log has in a minute, if there are few of others.
const maxReported = 100

// log tells of problems that are over, and of new ones. Each namespace has its share of the lines.
func (e *Engine) log(resolved []string, problems []service.Problem) {
	now, wrong := time.Now(), make(map[string]bool, len(problems))
	for _, p := range problems {
		wrong[p.Object] = true
	}
	for _, object := range resolved {
		if !wrong[object] && e.reported.May(said.NamespaceOf(object), now) {
			e.options.Log.Info("problem is over", "object", object)
		}
	}
	for _, p := range problems {
		if e.reported.May(said.NamespaceOf(p.Object), now) {
			log := e.options.Log
			if p.File != "" {
				log = log.With("file", p.File)
			}
			log.Warn("problem", "object", p.Object, "field", p.Field, "reason", p.Reason)
		}
	}
	if more, of := e.reported.Withheld(); more > 0 {
		e.options.Log.Warn("more problems", "count", more, "total", of)
	}
}

// program makes the kernel follow. After an error the kernel is unknown, and nothing but Sync helps; if
// only some rows are not in force, changes and audits go on meanwhile.
func (e *Engine) program(ctx context.Context, change model.Change) error {
	err := e.follow(ctx, change)
	if err != nil {
		e.failed(ctx, err)
	}
	if !e.dirty && !time.Now().Before(e.audits.due) {
		if failed := e.audit(ctx); failed != nil {
			e.failed(ctx, failed)
			err = errors.Join(err, failed)
		}
	}
	if err != nil {
		err = fmt.Errorf("program the data plane: %w", err)
	}
	if !e.dirty {
		s := e.Status()
		e.programmed(s.Undone == nil && s.AuditUnfinishedSince.IsZero())
	}
	return err
}

// programmed notes that the kernel follows, and since when changes wait that it was not told of. It may be known to
// hold all of what it was told.
func (e *Engine) programmed(whole bool) {
	e.inbox.settle(func(oldest time.Time) {
		e.status.programmed(time.Now(), whole, e.partial)
		if oldest = earlier(oldest, e.queue.oldest()); !oldest.IsZero() {
			e.status.queued(oldest)
		}
	})
}

// follow programs a change, or everything, if that is due.
func (e *Engine) follow(ctx context.Context, change model.Change) error {
	switch {
	case (e.dirty || e.partial) && !time.Now().Before(e.retryAt):
		return e.sync(ctx, slog.LevelInfo)
	case !e.dirty && !change.Empty():
		return e.apply(ctx, change)
	}
	return nil
}

// apply programs a change.
func (e *Engine) apply(ctx context.Context, change model.Change) (err error) {
	start := time.Now()
	e.cost.measure(e.options.work, func() { err = e.options.Plane.Apply(ctx, e.state, change) })
	e.round.Verb, e.round.Took = Applied, time.Since(start)
	e.tidy.applied(&change)
	if err == nil {
		e.round.Change = &change
		e.logEdits(&change, e.round.Took)
	}
	return err
}

// sync programs everything.
func (e *Engine) sync(ctx context.Context, level slog.Level) error {
	err := e.programAll(level, func() error { return e.options.Plane.Sync(ctx, e.state) })
	if err == nil {
		e.tidy.synced()
	}
	return err
}

// programAll programs everything by Sync or Repair. It leaves nothing for an audit to find but rows that cannot be in
// force, so the next one is put off.
func (e *Engine) programAll(level slog.Level, do func() error) error {
	start := time.Now()
	err := do()
	now := time.Now()
	e.took = now.Sub(start)
	e.round.Verb, e.round.Took = Synced, e.took
	if dataplane.Known(err) {
		e.audits.due = later(e.audits.floor, now.Add(e.options.AuditInterval))
	}
	if err != nil {
		return err
	}
	e.dirty, e.partial, e.synced = false, false, now
	e.audits.lacking = nil
	e.status.checked()
	e.programmed(true) // before the line: its readers find the rows in force
	e.options.Log.Log(context.Background(), level, "programmed",
		"frontends", len(e.state.Frontends), "pools", len(e.state.Pools), "took", e.took)
	return nil
}

func (e *Engine) failed(ctx context.Context, err error) {
	partial := errors.Is(err, dataplane.ErrPartial)
	if !e.partial || !partial || !time.Now().Before(e.retryAt) {
		// A change that fails in part while others wait for their retry does not put that off.
		e.retryAt = time.Now().Add(e.delay(partial))
	}
	e.partial, e.dirty = partial, !partial && !defect.Is(defect.EngineRetry)
	if e.dirty {
		e.status.queued(time.Now()) // a repair that fails is a change that waits
	}
	if ctx.Err() == nil { // else it is no news
		e.status.failed(err, partial)
		e.options.Log.Error("programming the data plane failed", "error", err, "retry", time.Until(e.retryAt))
	}
}

// delay is how long the next Sync waits after an error. A change that is refused again and again, and is programmed
// between, shall not have it called all the time.
func (e *Engine) delay(partial bool) time.Duration {
	if !e.partial && !e.synced.IsZero() && time.Since(e.synced) >= calm {
		e.backoff = 0
	}
	e.backoff = min(max(2*e.backoff, minBackoff), maxBackoff)
	if partial {
		return max(e.backoff, min(partialShare*e.took, maxBackoff))
	}
	if !e.synced.IsZero() { // no changes are programmed until then
		e.backoff = min(e.backoff, againBackoff)
	}
	e.synced = time.Time{}
	return e.backoff
}
