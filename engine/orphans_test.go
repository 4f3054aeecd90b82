package engine

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/service"
)

// orphanPlane notes of which backends it is told that they are gone.
type orphanPlane struct {
	dataplane.Dataplane

	took time.Duration // by each look

	mu    sync.Mutex
	calls int
	gone  string
}

func (p *orphanPlane) told() (calls int, gone string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls, p.gone
}

func (p *orphanPlane) ResetOrphans(_ context.Context, gone dataplane.Gone) (int, error) {
	bubble.Work(p.took)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	all := slices.SortedFunc(maps.Keys(gone), netip.AddrPort.Compare)
	var words []string
	for _, b := range all {
		words = append(words, b.Addr().String())
	}
	p.gone = strings.Join(words, " ")
	return 0, nil
}

// startOrphans starts with a plane whose looks take some time.
func (r *rig) startOrphans(reset bool, took time.Duration) (p *orphanPlane) {
	r.start(func(o *Options) {
		p = &orphanPlane{Dataplane: o.Plane, took: took}
		o.Plane, o.ResetOrphans = p, reset
	})
	return p
}

// TestEngine_orphans: a backend is gone if no pool has it any more, for a time. The plane is asked nothing else.
func TestEngine_orphans(t *testing.T) {
	for name, wanted := range map[string]bool{"on": true, "off": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				p := r.startOrphans(wanted, 0)
				r.send(web(1, "10.244.1.2", "10.244.1.3", "10.244.1.4"))
				bubble.Pass(time.Minute)
				r.send(web(2, "10.244.1.2", "10.244.1.3"))
				bubble.Pass(time.Minute)
				if calls, _ := p.told(); calls > 0 {
					t.Errorf("before a backend has left, the plane is asked %d times", calls)
				}
				for _, step := range []struct {
					send    func()
					backend string
				}{
					{func() { r.send(web(1, "10.244.1.2")) }, "10.244.1.4"},
					{func() { r.send(web(2, "10.244.1.2")) }, "10.244.1.3 10.244.1.4"},
					{func() { r.send(web(1, "10.244.1.2", "10.244.1.4")) }, "10.244.1.3"},
					{func() { r.send(gone(1)) }, "10.244.1.3 10.244.1.4"},
					{func() { bubble.Pass(goneFor) }, ""},
				} {
					step.send()
					bubble.Pass(2 * maxOrphanLook)
					if !wanted {
						step.backend = ""
					}
					if _, gone := p.told(); gone != step.backend {
						t.Errorf("gone are %q, want %q", gone, step.backend)
					}
				}
				before, _ := p.told()
				bubble.Pass(time.Hour)
				if calls, _ := p.told(); calls > before || before > 2+int(2*goneFor/maxOrphanLook) {
					t.Errorf("the plane is asked %d times, and %d times in an idle hour", before, calls-before)
				}
				r.stop()
			})
		})
	}
}

// TestEngine_orphansMany: where too many are gone, the last one is not forgotten.
func TestEngine_orphansMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := r.startOrphans(true, 0)
		var many []string
		for i := range maxGone + 1 {
			many = append(many, netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}).String())
		}
		for _, b := range []service.Batch{
			web(1, many...), web(2, "10.245.0.1", "10.245.0.2"), web(1), web(2, "10.245.0.2"),
		} {
			r.send(b)
			bubble.Pass(2 * minOrphanLook)
		}
		_, gone := p.told()
		if all := strings.Fields(gone); len(all) != maxGone || !slices.Contains(all, "10.245.0.1") {
			t.Errorf("%d are gone, want %d with the last one", len(all), maxGone)
		}
		r.stop()
	})
}

// TestEngine_orphansShared: where there are so many pools that a search has parts, a backend is not gone while any has it.
func TestEngine_orphansShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pools = 3 * searchPart
		r := newRig(t)
		p := r.startOrphans(true, 0)
		for i := range pools {
			r.send(web(i, "10.244.1.2", "10.244.1.3"))
		}
		for i := range pools - 1 {
			r.send(web(i, "10.244.1.3"))
		}
		bubble.Pass(2 * maxOrphanLook)
		if _, gone := p.told(); gone != "" {
			t.Errorf("gone is %q, which a pool has", gone)
		}
		r.send(web(pools-1, "10.244.1.3"))
		bubble.Pass(2 * maxOrphanLook)
		if _, gone := p.told(); gone != "10.244.1.2" {
			t.Errorf("gone is %q, want the backend that no pool has", gone)
		}
		r.stop()
	})
}

// TestEngine_orphansRest: looks that take long are rare, also while backends leave all the time.
func TestEngine_orphansRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const took, minutes, each = 500 * time.Millisecond, 10, 2 * time.Second
		r := newRig(t)
		p := r.startOrphans(true, took)
		for i := range int(minutes * time.Minute / each) {
			r.send(web(1, fmt.Sprint("10.244.1.", 2+i%2)))
			bubble.Pass(each)
		}
		least := minutes * 60 / (int(maxOrphanLook/time.Second) + orphanShare)
		if calls, _ := p.told(); calls < least || time.Duration(calls-1)*orphanShare*took > minutes*time.Minute {
			t.Errorf("in %d minutes there are %d looks that take %v each", minutes, calls, took)
		}
		r.stop()
	})
}
