package engine

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// unasked is a plane of which no outcomes may be asked.
type unasked struct {
	dataplane.Dataplane
	t *testing.T
}

func (p unasked) Outcomes(context.Context, bool, func(model.Outcome)) error {
	p.t.Error("outcomes are looked at")
	return nil
}

// TestEngine_slowStart has the share of a new endpoint grow where outcomes are not looked at.
func TestEngine_slowStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) {
			o.Plane = unasked{o.Plane, t}
			o.Connect = func(context.Context, netip.AddrPort) bool { return false }
		})
		s, problems := service.FromService(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-1", Annotations: map[string]string{
				"fairlead.dev/slow-start": "30s"}},
			Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		})
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		b := web(1, "10.244.1.2")
		b.Services = service.One(s.Name, s)
		r.send(b)
		bubble.Pass(time.Minute)
		r.send(service.Batch{Slices: web(1, "10.244.1.2", "10.244.1.3").Slices})
		for _, want := range []string{"16 2", "16 4", "16 8", "1 1", "1 1"} {
			bubble.Pass(5 * time.Second)
			if got := r.weights(); got != want {
				t.Errorf("weights %s, want %s", got, want)
			}
			bubble.Pass(5 * time.Second)
		}
		r.stop()
	})
}

// weights are those of the backends in the kernel, in their order.
func (r *rig) weights() string {
	var all []string
	for line := range strings.Lines(r.kernel.String()) {
		if !strings.HasPrefix(line, "backend ") {
			continue
		}
		if _, weight, ok := strings.Cut(strings.TrimSpace(line), " weight "); ok {
			all = append(all, weight)
		} else {
			all = append(all, "1")
		}
	}
	return strings.Join(all, " ")
}

// askedPlane is one that counts how often outcomes are asked; over: the last time it was told that none are any more.
type askedPlane struct {
	dataplane.Dataplane

	mu    sync.Mutex
	asked int
	over  bool
}

func (p *askedPlane) Outcomes(_ context.Context, _ bool, f func(model.Outcome)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over = f == nil; !p.over {
		p.asked++
	}
	return nil
}

func (p *askedPlane) told() (asked int, over bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked, p.over
}

// TestEngine_outcomes: the plane is asked while backends are judged, and told when they are not any more.
func TestEngine_outcomes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := newRig(t), &askedPlane{}
		r.start(func(o *Options) {
			p.Dataplane, o.Plane = o.Plane, p
			o.Connect = func(context.Context, netip.AddrPort) bool { return false }
		})
		r.send(web(1, "10.244.1.2"))
		before := 0
		for _, mode := range []service.HealthMode{service.HealthObserve, service.HealthOff, service.HealthEject} {
			s := Settings{Table: service.Options{Health: service.Health{Mode: mode}}}
			if err := r.engine.Configure(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			bubble.Pass(time.Minute)
			asked, over := p.told()
			if off := mode == service.HealthOff; over != off || asked > before == off {
				t.Errorf("%s: asked %d times, and over: %t", mode, asked-before, over)
			}
			before = asked
		}
		r.stop()
	})
}
