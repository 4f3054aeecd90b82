package engine

import (
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// vandalise deletes all frontends.
func (r *rig) vandalise() { r.kernel.Do(func(rows *model.State) { clear(rows.Frontends) }) }

func TestEngine_foreignChangeWakesTheAudit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		foreign := make(chan dataplane.Foreign)
		var rounds []Round
		r.start(func(o *Options) {
			o.AuditInterval, o.Foreign = 10*time.Hour, foreign
			o.Observer = observerFunc(func(round Round) { rounds = append(rounds, round) })
		})
		r.send(web(1, "10.244.1.2"))
		r.converged()
		r.vandalise()
		foreign <- dataplane.Foreign{What: "deleted table ip fairlead", Process: "nft", PID: 7}
		time.Sleep(time.Second)
		r.converged()
		if log := r.log.String(); !strings.Contains(log, `by="nft (process 7)"`) {
			t.Error(log)
		}
		r.stop()
		for _, round := range rounds {
			if len(round.Drifts) > 0 && len(round.Foreign) == 1 {
				return
			}
		}
		t.Errorf("no round tells who it was: %+v", rounds)
	})
}

// Who undoes every repair and is told of each time gets no more of the node than the budget.
func TestEngine_foreignChangesHaveABudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		foreign := make(chan dataplane.Foreign)
		r.start(func(o *Options) {
			o.Plane, o.Foreign = &slowAudit{o.Plane, 100 * time.Millisecond, 1 << 30}, foreign
		})
		r.send(web(1, "10.244.1.2"))
		r.converged()
		for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			r.vandalise()
			select {
			case foreign <- dataplane.Foreign{What: "something"}:
			default:
			}
		}
		r.stop()
		audits := 0
		for _, call := range r.kernel.Calls() {
			if call == "audit" {
				audits++
			}
		}
		if audits < 500 || audits > 850 { // a quarter of the time, and of two minutes in advance
			t.Errorf("%d audits of 0.1 s in three minutes", audits)
		}
	})
}

func TestControl_audit(t *testing.T) {
	r := newRig(t)
	socket := filepath.Join(t.TempDir(), "control")
	r.start(func(o *Options) {
		o.ControlSocket, o.AuditInterval = socket, 10*time.Hour
		o.About = func() About { return About{Plane: "memory"} }
	})
	defer r.stop()
	r.send(web(1, "10.244.1.2"))
	if err := r.engine.Do(t.Context(), func(context.Context, View) error { return nil }); err != nil {
		t.Fatal(err)
	}
	ask := func() (a Audited) {
		t.Helper()
		text, err := Ask(t.Context(), socket, "/audit")
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &a); err != nil {
			t.Fatal(err)
		}
		return a
	}
	if a := ask(); a.Plane != "memory" || a.Rows != r.state.Rows() || len(a.Drifts) != 0 {
		t.Errorf("%+v", a)
	}
	r.vandalise()
	if a := ask(); len(a.Drifts) != 1 || !strings.Contains(a.Drifts[0].String(), "10.96.0.1:80/tcp") || !a.Repaired {
		t.Errorf("%+v", a)
	}
	if a := ask(); len(a.Drifts) != 0 {
		t.Errorf("after the repair: %+v", a)
	}
	r.setFault(func(string) error { return errBroken })
	if _, err := Ask(t.Context(), socket, "/audit"); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Errorf("a kernel that cannot be read: %v", err)
	}
}

// observerFunc is told of rounds.
type observerFunc func(Round)

func (f observerFunc) Round(r Round)      { f(r) }
func (observerFunc) Answered(string, int) {}
