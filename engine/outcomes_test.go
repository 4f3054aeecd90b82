package engine

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// unasked are Outcomes that must not be asked.
type unasked struct{ t *testing.T }

func (d unasked) Take(bool, func(model.Outcome)) error {
	d.t.Error("outcomes are looked at")
	return nil
}

func (d unasked) Connect(context.Context, netip.AddrPort) bool { return false }

// TestEngine_slowStart has the share of a new endpoint grow where outcomes are not looked at.
func TestEngine_slowStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(func(o *Options) { o.Outcomes = unasked{t} })
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
