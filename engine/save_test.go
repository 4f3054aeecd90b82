package engine

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
)

// savingPlane takes a while for every audit, and counts how often it is to save sessions.
type savingPlane struct {
	dataplane.Dataplane
	audits, saves atomic.Int64
}

func (p *savingPlane) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	p.audits.Add(1)
	bubble.Work(200 * time.Millisecond)
	return p.Dataplane.Audit(ctx, s, d)
}

func (p *savingPlane) Save(context.Context) { p.saves.Add(1) }

// Audits that take long become rare. A process that is killed then loses the sessions of the last second only.
func TestEngine_savesWhileAuditsRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := newRig(t), &savingPlane{}
		r.start(func(o *Options) { p.Dataplane, o.Plane = o.Plane, p })
		r.send(web(1))
		r.converged()
		bubble.Pass(time.Minute)
		audits := p.audits.Load()
		for range 60 {
			before := p.saves.Load()
			bubble.Pass(time.Second)
			if p.saves.Load() == before {
				t.Fatal("sessions are not saved for a second")
			}
		}
		if n := p.audits.Load() - audits; n > 10 {
			t.Errorf("%d audits in a minute, want them to rest", n)
		}
		r.stop()
	})
}
