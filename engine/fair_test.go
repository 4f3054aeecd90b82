package engine

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// pricedPlane takes a while for each call and for each row.
type pricedPlane struct {
	dataplane.Dataplane
	call, row time.Duration
	applies   atomic.Int64
}

func (p *pricedPlane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	p.applies.Add(1)
	rows := len(c.Frontends.Set) + len(c.Frontends.Delete) + len(c.Guards.Set) + len(c.Guards.Delete)
	for _, pool := range c.Pools.Set.All() {
		rows += len(pool.Backends)
	}
	bubble.Work(p.call + time.Duration(rows)*p.row)
	return p.Dataplane.Apply(ctx, s, c)
}

// fair starts an Engine with such a plane, in which a victim has a Service.
func fair(t *testing.T, p *pricedPlane) *rig {
	r := newRig(t)
	start := time.Now()
	r.start(func(o *Options) {
		o.work = func() time.Duration { return time.Since(start) }
		p.Dataplane, o.Plane = o.Plane, p
		o.AuditInterval, o.MaxRest = 10*time.Hour, time.Second
	})
	r.send(victim(0))
	r.converged()
	return r
}

// victim is the only Service of its namespace. The address of its endpoint tells how often it was changed.
func victim(n int) service.Batch {
	b := object("victim", 1)
	b.Services[0].Is.ClusterIPs[0] = netip.MustParseAddr("10.97.0.1")
	b.Slices[0].Is.Endpoints[0].Addr = netip.AddrFrom4([4]byte{10, 245, byte(n >> 8), byte(n)})
	return b
}

// latency changes the victim's Service and waits until the kernel has it.
func (r *rig) latency(n int) time.Duration {
	r.t.Helper()
	start := time.Now()
	r.send(victim(n))
	want := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 245, byte(n >> 8), byte(n)}), 8080)
	for range 10_000 {
		found := false
		r.kernel.Do(func(s *model.State) {
			for _, b := range s.Pools[model.PoolID{Service: "victim/s1"}].Backends {
				found = found || b.AddrPort() == want
			}
		})
		if found {
			return time.Since(start)
		}
		bubble.Work(time.Millisecond)
	}
	r.t.Fatal("the victim's change is not in force after ten seconds")
	return 0
}

// Whatever one namespace does, a change of another one is in force soon.
func TestEngine_fairTime(t *testing.T) {
	const (
		limit = time.Second
		pause = 2300 * time.Millisecond // so that the victim does not have to rest for what it did itself
	)
	flap := func(r *rig, endpoints int, end *atomic.Bool) {
		for i := 0; !end.Load(); i++ {
			b := object("tenant", 0)
			b.Slices[0].Is.Endpoints = nil
			for n := range endpoints {
				b.Slices[0].Is.Endpoints = append(b.Slices[0].Is.Endpoints, service.Endpoint{
					Addr:  netip.AddrFrom4([4]byte{10, 244 - byte(i%2), byte(n >> 8), byte(n)}),
					Ready: true, Serving: true, Weight: 1,
				})
			}
			r.script.batches <- b
			bubble.Work(5 * time.Millisecond)
		}
	}
	flood := func(r *rig, namespaces int) {
		var all service.Batch
		for i := range 10_000 {
			one := object(fmt.Sprint("tenant", i%namespaces), i)
			all.Services.Add(one.Services)
			all.Slices.Add(one.Slices)
		}
		r.script.batches <- all
	}
	for name, c := range map[string]struct {
		plane  *pricedPlane
		attack func(*rig, *atomic.Bool)
	}{
		"flapping, quick changes":  {&pricedPlane{call: time.Millisecond}, func(r *rig, end *atomic.Bool) { flap(r, 1, end) }},
		"flapping, costly changes": {&pricedPlane{call: 180 * time.Millisecond}, func(r *rig, end *atomic.Bool) { flap(r, 1, end) }},
		"flapping, many endpoints": {&pricedPlane{row: 500 * time.Microsecond}, func(r *rig, end *atomic.Bool) { flap(r, 500, end) }},
		"many Services":            {&pricedPlane{row: 200 * time.Microsecond}, func(r *rig, _ *atomic.Bool) { flood(r, 1) }},
		"many Services, costly":    {&pricedPlane{call: 180 * time.Millisecond, row: 10 * time.Microsecond}, func(r *rig, _ *atomic.Bool) { flood(r, 1) }},
		"Services of many":         {&pricedPlane{row: 200 * time.Microsecond}, func(r *rig, _ *atomic.Bool) { flood(r, 1000) }},
		"Services of many, flapping": {&pricedPlane{call: 20 * time.Millisecond}, func(r *rig, end *atomic.Bool) {
			for i := 0; !end.Load(); i++ {
				b := object(fmt.Sprint("tenant", i%50), i%50)
				b.Slices[0].Is.Endpoints[0].Addr = netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})
				r.script.batches <- b
				bubble.Work(5 * time.Millisecond)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := fair(t, c.plane)
				var end atomic.Bool
				done := make(chan struct{})
				go func() {
					defer close(done)
					c.attack(r, &end)
				}()
				var worst time.Duration
				for i := range 8 {
					bubble.Work(pause)
					worst = max(worst, r.latency(i+1))
				}
				end.Store(true)
				<-done
				if t.Logf("the worst of 8 changes took %v, with %d calls of the plane", worst, c.plane.applies.Load()); worst > limit {
					t.Errorf("a change took %v, want %v at most", worst, limit)
				}
				r.stop()
			})
		})
	}
}
