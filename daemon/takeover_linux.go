package daemon

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/takeover"
)

const (
	// takeoverInterval is the time between two searches for kube-proxy's objects, and so the time for which stale rules
	// of a kube-proxy that ran again can win. A running kube-proxy makes its rules again within its syncPeriod, 30 s.
	// Removing them as often costs no more than that does. Whichever of the two translates meanwhile, the backends are
	// the same.
	takeoverInterval = 30 * time.Second
	// drainInterval is the first of the times between two looks while IPVS drains.
	drainInterval = time.Second
	// episode is how long nothing must have come back for the next time to be news.
	episode = 10 * time.Minute
)

// successor removes kube-proxy's rules once Fairlead's are active for the first time, so that Services work all the
// time. Then it watches whether kube-proxy comes back, and whether FORWARD closes.
type successor struct {
	successorConfig
	takeover *takeover.Takeover
	excluded *excludedBackends
	interval time.Duration
	reminder time.Duration // of a closed FORWARD

	turn sync.Mutex      // held during a look
	said map[string]bool // of what stays; belongs to that one
}

type successorConfig struct {
	log      *slog.Logger
	report   *reporter
	returned func()                // is called when kube-proxy has been back
	accepted func() bool           // reports whether kube-proxy would accept in FORWARD what Services need
	closed   func(bool)            // is told whether FORWARD drops that
	exclude  func() []netip.Prefix // whose virtual servers of IPVS stay
}

func newSuccessor(c successorConfig) (*successor, error) {
	s := &excludedBackends{}
	t, err := takeover.New(takeover.Config{
		Log: c.log, Drain: drainTime, KeepForward: true, Spare: s.has, Owned: ipvs.Owns,
		OwnAlias: ipvs.DummyAlias, Exclude: c.exclude,
	})
	return &successor{
		successorConfig: c, takeover: t, excluded: s, said: map[string]bool{},
		interval: takeoverInterval, reminder: forwardReminder,
	}, err
}

// succeed removes what kube-proxy has left, and whatever it makes later, until ctx ends.
func (s *successor) succeed(ctx context.Context) {
	s.turn.Lock()
	defer s.turn.Unlock()
	for w := (watch{successor: s}); ctx.Err() == nil; {
		w.look(ctx)
		select {
		case <-ctx.Done():
		case <-time.After(w.pause):
		}
	}
}

// succeedOnce removes what is left, and waits for connections that still need some of it.
func (s *successor) succeedOnce(ctx context.Context) error {
	w := watch{successor: s}
	if err := w.remove(ctx); err != nil {
		return err
	}
	return s.takeover.Drain(ctx, nil)
}

// watch is what a successor knows from earlier looks.
type watch struct {
	*successor
	pause   time.Duration // until the next look
	clean   bool          // nothing was left but what stays
	removed bool          // all has been removed once: what is found then has come back
	stays   []takeover.Leftover
	back    time.Time // when something had come back
	failure said.Condition
}

// look looks once, and removes what it finds.
func (w *watch) look(ctx context.Context) {
	ctx, over := w.excluded.look(ctx)
	defer over()
	if w.clean {
		if back, err := w.takeover.Returned(ctx); !back && err == nil {
			return
		}
	}
	err := w.remove(ctx)
	if err == nil || ctx.Err() != nil {
		w.failure.Cleared()
		return
	}
	w.pause = w.interval
	if w.failure.Changed(err.Error()) {
		w.log.Error("kube-proxy's rules could not be removed; trying again", "error", err, "retry", w.pause)
	}
}

// remove removes what can go, and says why the rest stays.
func (w *watch) remove(ctx context.Context) error {
	all, err := w.takeover.Find(ctx)
	f := sortOut(all)
	w.schedule(f, err)
	w.explain(f.stays)
	if len(f.goes) > 0 {
		w.returns(f.goes)
	}
	w.stays = f.stays
	if len(f.goes)+len(f.drains) > 0 {
		if err := w.takeover.Remove(ctx); err != nil {
			return err
		}
	}
	if len(f.goes) > 0 && !w.removed {
		w.log.Info("removed kube-proxy's leftovers", "leftover", leftovers(f.goes))
		w.report.emit(kube.Event{Reason: reasonTakenOver,
			Message: "Fairlead serves; removed kube-proxy's leftovers: " + leftovers(f.goes)})
	}
	w.removed = w.removed || err == nil && !w.excluded.hides()
	return err
}

// schedule decides when to look next, and how. The first looks after draining begins come soon, as short connections
// end then.
func (w *watch) schedule(f finding, err error) {
	w.clean = err == nil && len(f.goes)+len(f.drains) == 0 && !w.excluded.hides()
	switch {
	case err != nil || w.clean:
		w.pause = w.interval
	case !w.removed:
		w.pause = min(drainInterval, w.interval)
	case len(f.goes) == 0:
		w.pause = min(2*w.pause, w.interval)
	default:
		w.pause = w.interval
	}
}

// explain says what stays and what to do about it, once.
func (w *watch) explain(stays []takeover.Leftover) {
	var texts []string
	for _, l := range stays {
		if text := l.String(); !w.said[text] {
			w.said[text] = true
			w.log.Warn("kube-proxy's rules cannot all be removed", "leftover", text)
			texts = append(texts, text)
		}
	}
	if len(texts) > 0 {
		w.report.warn(reasonStays, "left of kube-proxy: "+strings.Join(texts, "; "))
	}
}

// returns says that kube-proxy has been back, if that is so: once, until it has been away for a while.
func (w *watch) returns(goes []takeover.Leftover) {
	goes = slices.DeleteFunc(slices.Clone(goes), w.stayed)
	if !w.removed || len(goes) == 0 {
		return
	}
	w.returned()
	again := time.Since(w.back) < episode
	w.back = time.Now()
	if again {
		return
	}
	w.log.Warn("kube-proxy runs beside Fairlead, or has run; stop it: its rules are removed whenever they come back",
		"leftover", leftovers(goes))
	w.report.warn(reasonReturned, "kube-proxy runs beside Fairlead, or has run: "+leftovers(goes)+
		"; stop it (kubectl -n kube-system get daemonset kube-proxy). Until then its rules are removed every "+
		w.interval.String())
}

// stayed reports whether an object like this one had to stay at an earlier look, so that it has become removable.
func (w *watch) stayed(l takeover.Leftover) bool {
	return slices.ContainsFunc(w.stays, func(s takeover.Leftover) bool {
		return s.Backend == l.Backend && s.Family == l.Family && s.Table == l.Table
	})
}

// finding is what is left of kube-proxy, by what happens to it.
type finding struct{ goes, drains, stays []takeover.Leftover }

func sortOut(found []takeover.Leftover) (f finding) {
	for _, l := range found {
		switch {
		case l.Stays != "":
			f.stays = append(f.stays, l)
		case !l.Until.IsZero():
			f.drains = append(f.drains, l)
		default:
			f.goes = append(f.goes, l)
		}
	}
	return f
}

// leftovers are what is removed, in one line.
func leftovers(found []takeover.Leftover) string {
	var texts []string
	for _, l := range found {
		texts = append(texts, l.String())
	}
	return strings.Join(texts, ", ")
}
