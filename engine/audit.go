package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/service"
)

// The engine compares the kernel with the State once in an interval, and at once when the kernel reports an external
// change. Audits have a budget of CPU time, and those that lead to a repair a larger one. So a program that undoes
// every repair cannot make the node busy. See recurrence for repairs that do not hold.
//
//	interval is over ─┐
//	Options.ExternalChanges ──┴─► Plane.Audit ─► Report ─► recurrence ─► log, Round, Status ─► Plane.Repair
//	GET /audit ─► the same, of every row
//
// An audit that takes too long is given up, and the next one has twice the time. It says nothing about the kernel.

const (
	maxAuditRest = 30 * time.Second
	// auditQuiet is the time from an external change to its audit: the other program may not have finished.
	auditQuiet = 10 * time.Millisecond
	// driftMemory is how long a drift that comes again is not logged again, and maxDrifts how many
	// are logged in that time.
	driftMemory = 10 * time.Minute
	maxDrifts   = 20
	// maxForeign bounds the external changes of which the author is kept until the next audit.
	maxForeign = 16
	// maxPatience is for how long an audit may go on at most.
	maxPatience = 10 * time.Minute
)

// audits say when the next one is due, and what is known of what it will find.
type audits struct {
	due          time.Time
	floor        time.Time // not earlier, whatever others do: the ones before have had their share
	budget       budget
	repairs      budget                     // of those that found something
	notifyBudget budget                     // of full audits after external changes that found nothing
	quietUntil   time.Time                  // external changes until then cause quick audits only
	fullPending  bool                       // a full audit follows after quietUntil
	logged       map[string]time.Time       // drifts, lately
	foreign      []dataplane.ExternalChange // changes of others since the last one
	lacking      map[string]bool            // drifts that stayed after a Sync: rows that cannot be in force
	limit        time.Duration              // for how long the next one may go on
	pause        time.Duration              // until the next one, after one that has failed; 0: it has not
}

func newAudits(limit time.Duration) audits {
	return audits{
		limit: limit,
		// A hundredth of a CPU with what goes on beside: collecting garbage, timers, this loop.
		budget:       budget{share: 125, credit: time.Minute, longest: maxAuditRest},
		repairs:      budget{share: 4, credit: 2 * time.Minute, longest: maxAuditRest},
		notifyBudget: budget{share: 400, credit: 2 * time.Minute, longest: 5 * time.Minute},
		logged:       map[string]time.Time{},
	}
}

// notified reports whether an external change is known since the last audit.
func (a *audits) notified() bool { return len(a.foreign) > 0 }

// notify has the next audit come soon.
func (a *audits) notify(f dataplane.ExternalChange) {
	a.note(f)
	a.within(auditQuiet)
}

// within has the next audit come no later than after a time, as far as it may.
func (a *audits) within(d time.Duration) {
	if soon := later(a.floor, time.Now().Add(d)); soon.Before(a.due) {
		a.due = soon
	}
}

func (a *audits) note(f dataplane.ExternalChange) {
	if len(a.foreign) < maxForeign {
		a.foreign = append(a.foreign, f)
	}
}

// gather notes the changes that have come meanwhile.
func (a *audits) gather(changes <-chan dataplane.ExternalChange) {
	for {
		select {
		case f := <-changes:
			a.note(f)
		default:
			return
		}
	}
}

// full reports whether the next audit reads every row: a quick audit may miss an external change. Programs on the node
// may make many changes that do not concern Fairlead. Then a full audit is rare, so that the budget leaves time for the
// audits of each interval.
func (a *audits) full() bool {
	a.fullPending = a.fullPending || a.notified()
	return a.fullPending && !time.Now().Before(a.quietUntil)
}

// foundNothing is called after such an audit that has found nothing.
func (a *audits) foundNothing(took, interval time.Duration) {
	now := time.Now()
	a.quietUntil = now.Add(a.notifyBudget.rest(took))
	a.due = later(a.floor, now.Add(interval))
	a.foreign, a.fullPending = nil, false
}

// schedule keeps audits to a share of one CPU, and repairs to another.
func (a *audits) schedule(took, interval time.Duration, repaired bool) {
	b := &a.budget
	if repaired {
		b = &a.repairs
		a.fullPending = false
	}
	now := time.Now()
	a.floor = now.Add(b.rest(took))
	a.due = later(a.floor, now.Add(interval))
	a.foreign = nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// audit compares the kernel with the State, and repairs external changes.
func (e *Engine) audit(ctx context.Context) error {
	start := time.Now()
	e.audits.gather(e.options.ExternalChanges)
	full := e.audits.full()
	defer func() { e.audited(time.Since(start), full) }()
	if defect.Is(defect.EngineAudit) {
		return nil
	}
	e.status.checking(start)
	look, end := context.WithTimeout(ctx, e.audits.limit)
	defer end()
	depth := dataplane.Quick
	if full {
		depth = dataplane.Full
	}
	report, err := e.options.Plane.Audit(look, e.state, depth)
	e.round.Audited = time.Since(start)
	if !dataplane.Known(err) {
		if look.Err() != nil && ctx.Err() == nil {
			e.giveUp(err)
			return nil
		}
		e.audits.pause = min(max(2*e.audits.pause, e.options.AuditInterval), maxBackoff)
		return err
	}
	e.audits.pause = 0
	e.status.checked()
	e.tellShares(report.UsedUp)
	if !e.mayRepair(report.Drifts) {
		return err
	}
	return cmp.Or(e.repair(ctx, report), err)
}

// tellShares tells of namespaces whose clients have used up a share, and of those that have some left again. It is a
// problem like those of objects, with one for each namespace.
func (e *Engine) tellShares(usedUp []dataplane.Share) {
	of := map[string][]string{}
	for _, s := range usedUp {
		of[s.Namespace] = append(of[s.Namespace], s.Of)
	}
	now := make(map[string]service.Problem, len(of))
	var arisen []service.Problem
	for namespace, of := range of {
		now[namespace] = service.Problem{Object: "Namespace " + namespace, Cause: service.Share, Reason: fmt.Sprintf(
			"its clients have used up its share of %s on this node; the least recently used ones are removed",
			strings.Join(of, " and "))}
		if now[namespace] != e.usedUp[namespace] {
			arisen = append(arisen, now[namespace])
		}
	}
	var resolved []string
	for namespace, before := range e.usedUp {
		if now[namespace] != before {
			resolved = append(resolved, before.Object)
		}
	}
	e.usedUp = now
	e.tellProblems(&service.Batch{Resolved: resolved}, arisen, nil)
	e.round.Problems = append(e.round.Problems, arisen...)
}

// giveUp notes that an audit took too long.
func (e *Engine) giveUp(err error) {
	e.options.Log.Warn("the audit of the kernel took too long; it is repeated with a longer limit",
		"error", err, "limit", e.audits.limit)
	e.audits.limit = min(2*e.audits.limit, maxPatience)
}

// mayRepair reports whether there is something to repair now.
func (e *Engine) mayRepair(drifts []dataplane.Drift) bool {
	defer func() { e.status.undone(e.recurrence.status()) }()
	now := time.Now()
	if !e.isNews(drifts) {
		if lasted := e.recurrence.lasts(); e.recurrence.whole(now) && lasted {
			e.options.Log.Info("repairs hold again")
		}
		return false
	}
	return !now.Before(e.recurrence.found(now))
}

// audited says when the next audit is due.
func (e *Engine) audited(took time.Duration, full bool) {
	repaired := len(e.round.Drifts) > 0
	switch {
	case e.recurrence.broken: // there is nothing to look for
		e.audits.fullPending, e.audits.foreign = true, nil
		e.audits.floor = e.recurrence.status().Next
		e.audits.due = e.audits.floor
	case full && !repaired:
		e.audits.foundNothing(took, e.options.AuditInterval)
	default:
		e.audits.schedule(took, e.options.AuditInterval, repaired)
	}
	e.audits.floor = later(e.audits.floor, time.Now().Add(e.audits.pause))
}

// isNews reports whether there is anything among drifts but rows that are known not to be in force.
func (e *Engine) isNews(drifts []dataplane.Drift) bool {
	return len(e.audits.without(drifts)) > 0
}

// lacks notes which rows cannot be in force.
func (a *audits) lacks(left []dataplane.Drift) {
	a.lacking = make(map[string]bool, len(left))
	for _, d := range left {
		a.lacking[d.String()] = true
	}
}

// without leaves out the rows that are known not to be in force.
func (a *audits) without(drifts []dataplane.Drift) []dataplane.Drift {
	if len(a.lacking) == 0 {
		return drifts
	}
	return slices.DeleteFunc(slices.Clone(drifts), func(d dataplane.Drift) bool { return a.lacking[d.String()] })
}

// among are the ones that without leaves out.
func (a *audits) among(drifts []dataplane.Drift) []dataplane.Drift {
	return slices.DeleteFunc(slices.Clone(drifts), func(d dataplane.Drift) bool { return !a.lacking[d.String()] })
}

// repair repairs the drifts of an audit, reports them, and notes whether earlier repairs have held.
func (e *Engine) repair(ctx context.Context, r dataplane.Report) error {
	err := e.repairDrifts(ctx, r)
	if len(e.round.Drifts) == 0 {
		return err
	}
	lasted := e.recurrence.lasts()
	e.recurrence.repaired(time.Now(), e.round.ExternalChanges)
	if !lasted && e.recurrence.lasts() {
		e.options.Log.Warn("another program undoes the repairs; they become rarer", "by", dataplane.Authors(e.recurrence.by),
			"repairs", e.recurrence.repairs, "since", e.recurrence.began, "limit", LongestPause)
	}
	e.status.undone(e.recurrence.status())
	return err
}

// repairDrifts repairs, and reports the external changes. While some rows are refused, their absence is no external
// change. Only a Sync shows which rows these are, as they are still missing after it.
func (e *Engine) repairDrifts(ctx context.Context, r dataplane.Report) error {
	// Repairs are logged at debug level: another program may have them recur every second.
	repair := func() error {
		return e.programAll(slog.LevelDebug, func() error { return e.options.Plane.Repair(ctx, e.state, r) })
	}
	if !e.partial {
		e.reportDrifts(r.Drifts)
		if defect.Is(defect.EngineRepair) {
			return nil
		}
		return repair()
	}
	err := repair()
	if errors.Is(err, dataplane.ErrPartial) {
		left, failed := e.options.Plane.Audit(ctx, e.state, dataplane.Full)
		if failed != nil {
			return failed
		}
		e.audits.lacks(left.Drifts)
	}
	if drifts := e.audits.without(r.Drifts); len(drifts) > 0 {
		e.reportDrifts(drifts)
	}
	return err
}

// reportDrifts names drifts in the log, the Round and the Status.
func (e *Engine) reportDrifts(drifts []dataplane.Drift) {
	e.audits.gather(e.options.ExternalChanges)
	e.round.Drifts, e.round.ExternalChanges = drifts, dataplane.Candidates(e.audits.foreign, drifts)
	e.logDrifts(drifts)
	e.status.drifted(len(drifts))
}

// logDrifts logs the drifts that it has not logged lately: another program may undo every repair. Of many it logs some
// and their number.
func (e *Engine) logDrifts(drifts []dataplane.Drift) {
	const message = "another program changed Fairlead's rules; repairing"
	now, logged := time.Now(), e.audits.logged
	maps.DeleteFunc(logged, func(_ string, at time.Time) bool { return now.Sub(at) > driftMemory })
	log := e.options.Log
	if by := dataplane.Authors(e.round.ExternalChanges); by != "" {
		log = log.With("by", by)
	}
	more := 0
	for _, d := range drifts {
		text := d.String()
		switch _, known := logged[text]; {
		case known:
		case len(logged) == maxDrifts:
			more++
		default:
			logged[text] = now
			log.Warn(message, "drift", text)
		}
	}
	if more > 0 {
		log.Warn(message, "count", more)
	}
}

// Audited is what "fairlead audit" tells.
type Audited struct {
	Plane           string                     `json:"plane,omitempty"`
	Rows            int                        `json:"rows"` // of the State, backends included, that were compared
	Took            time.Duration              `json:"took"` // nanoseconds, for the comparison
	Drifts          []dataplane.Drift          `json:"drifts"`
	ExternalChanges []dataplane.ExternalChange `json:"externalChanges,omitempty"` // as the kernel reports them
	Repaired        bool                       `json:"repaired"`                  // all of it
	Error           string                     `json:"error,omitempty"`           // why it is not
	// Refused are differences without an external change: rows that the kernel refuses. Programming them is tried
	// again.
	Refused []dataplane.Drift `json:"refused,omitempty"`
}

// MarshalJSON has the keys of the release before, too.
func (a Audited) MarshalJSON() ([]byte, error) {
	type plain Audited
	return json.Marshal(struct {
		plain
		Foreign []dataplane.ExternalChange `json:"foreign,omitempty"`
		Lacking []dataplane.Drift          `json:"lacking,omitempty"`
	}{plain(a), a.ExternalChanges, a.Refused})
}

// auditNow compares every row, and repairs what differs. The goroutine of Run calls it between two batches. While the
// kernel is unknown there is nothing to compare: what differs then is what could not be programmed.
func (e *Engine) auditNow(ctx context.Context) (Audited, error) {
	a := Audited{Rows: e.state.Rows(), Drifts: []dataplane.Drift{}}
	if e.dirty {
		return a, fmt.Errorf("the rows could not be programmed; trying again: %s", e.Status().Error)
	}
	if e.options.About != nil {
		a.Plane = e.options.About().Plane
	}
	start := time.Now()
	defer func() { e.audits.schedule(time.Since(start), e.options.AuditInterval, len(a.Drifts) > 0) }()
	r, err := e.options.Plane.Audit(ctx, e.state, dataplane.Full)
	a.Took = time.Since(start)
	if !dataplane.Known(err) { // else the next audit says so
		return a, err
	}
	e.round.Audited = a.Took
	if e.isNews(r.Drifts) {
		err = e.repair(ctx, r)
		e.account(ctx, &a, err)
	}
	if e.partial {
		a.Refused = e.audits.among(r.Drifts)
	}
	return a, nil
}

// account says what became of a repair.
func (e *Engine) account(ctx context.Context, a *Audited, err error) {
	was := e.partial
	if err != nil {
		e.failed(ctx, err)
	}
	a.Drifts, a.ExternalChanges = append(a.Drifts, e.round.Drifts...), e.round.ExternalChanges
	if a.Repaired = err == nil || was && e.partial; !a.Repaired {
		a.Error = err.Error()
	}
	e.observe(err)
}
