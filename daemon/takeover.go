package daemon

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/takeover"
)

// takeoverRetry is the time between two attempts to remove what kube-proxy has left.
const takeoverRetry = time.Minute

// successor notes when the rules are in force for the first time, and then removes those of kube-proxy:
// at every moment there is somebody who translates. It is an engine.Observer.
type successor struct {
	log      *slog.Logger
	report   *reporter
	takeover *takeover.Takeover
	inForce  chan struct{} // closed once
	once     sync.Once
}

func newSuccessor(log *slog.Logger, r *reporter) (*successor, error) {
	t, err := takeover.New(takeover.Config{Log: log, Drain: takeover.DefaultDrain})
	return &successor{log: log, report: r, takeover: t, inForce: make(chan struct{})}, err
}

// Answered implements engine.Observer.
func (*successor) Answered(string, int) {}

// Round implements engine.Observer.
func (s *successor) Round(r engine.Round) {
	if r.Verb == engine.Synced && r.Err == nil {
		s.once.Do(func() { close(s.inForce) })
	}
}

// succeed tries until nothing is left.
func (s *successor) succeed(ctx context.Context) {
	for said := ""; ctx.Err() == nil; {
		err := s.remove(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		if said != err.Error() {
			s.log.Error("kube-proxy's rules could not be removed; trying again", "error", err, "retry", takeoverRetry)
		}
		said = err.Error()
		select {
		case <-ctx.Done():
		case <-time.After(takeoverRetry):
		}
	}
}

// remove removes what is left, and waits for connections that still need some of it.
func (s *successor) remove(ctx context.Context) error {
	found, err := s.takeover.Find(ctx)
	if err == nil && len(found) == 0 {
		return nil
	}
	if err := s.takeover.Remove(ctx); err != nil {
		return err
	}
	s.log.Info("removed what kube-proxy had left", "removed", leftovers(found))
	s.report.emit(kube.Event{Reason: reasonTakenOver,
		Message: "Fairlead serves; removed what kube-proxy had left: " + leftovers(found)})
	return errors.Join(err, s.takeover.Drain(ctx, nil))
}

// leftovers are what is removed, in one line.
func leftovers(found []takeover.Leftover) string {
	var texts []string
	for _, l := range found {
		texts = append(texts, l.String())
	}
	return strings.Join(texts, ", ")
}
