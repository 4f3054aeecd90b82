package integration

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// The control plane fails in all its ways while clients go on. The proxy serves the rows that it has, and learns of
// changes soon enough for pods that drain.
func TestControlPlaneFails(t *testing.T) {
	t.Parallel()
	// On a busy machine the controllers, too, need up to half a minute after a fault until EndpointSlices have the new pods.
	const linger = 90 * time.Second
	w := newWorld(t, kubernetes.Options{})
	w.deployWeb(linger)
	must := func(errs ...error) {
		w.Helper()
		for _, err := range errs {
			if err != nil {
				w.Fatal(err)
			}
		}
	}
	ctx := t.Context()
	for _, fault := range []struct {
		name   string
		inject func(change func())
	}{
		{"API server restarts", func(change func()) {
			must(w.plane.StopAPIServer(false), w.plane.StartAPIServer(ctx))
			change()
		}},
		{"API server is killed", func(change func()) {
			must(w.plane.StopAPIServer(true), w.plane.StartAPIServer(ctx))
			change()
		}},
		{"etcd is killed", func(change func()) {
			must(w.plane.StopEtcd(true), w.plane.StartEtcd(ctx))
			change()
		}},
		{"connections are reset", func(change func()) {
			w.relay.Reset()
			change()
		}},
		{"API server is away", func(change func()) {
			w.relay.Cut()
			change()
			must(w.relay.Restore())
		}},
		{"API server is silent", func(change func()) {
			w.relay.Hang()
			change()
			must(w.relay.Restore())
		}},
		{"API server is slow", func(change func()) {
			w.relay.Slow(100 * time.Millisecond)
			change()
			w.relay.Slow(0)
		}},
		{"the watch has expired", func(change func()) {
			w.relay.Cut()
			change()
			must(w.plane.CompactStore(ctx), w.plane.StopAPIServer(true), w.plane.StartAPIServer(ctx), w.relay.Restore())
		}},
		{"the token is revoked", func(change func()) {
			w.revokeToken()
			w.relay.Reset()
			change()
			w.newToken()
		}},
	} {
		w.step(fault.name, func(w *world) {
			w.unbroken(func() {
				fault.inject(w.replacePods)
				w.settled()
			})
		})
	}
}

// revokeToken makes the proxy's token worthless, and returns when the API server refuses it: it remembers
// for some seconds that it was good.
func (w *world) revokeToken() {
	w.Helper()
	w.kubectl("delete", "serviceaccount", "kube-proxy", "--namespace=kube-system")
	tokens, err := filepath.Glob(filepath.Join(w.dir, "*.token"))
	if err != nil || len(tokens) != 1 {
		w.Fatalf("the proxy's tokens are %v, %v", tokens, err)
	}
	config := rest.AnonymousClientConfig(w.plane.Config())
	config.BearerTokenFile = tokens[0]
	client, err := clientset.NewForConfig(config)
	if err != nil {
		w.Fatal(err)
	}
	eventually.Nil(w, "the token is refused", func() error {
		_, err := client.CoreV1().Services("").List(w.Context(), metav1.ListOptions{})
		if apierrors.IsUnauthorized(err) {
			return nil
		}
		return errors.New("the answer is " + fmt.Sprint(err))
	})
}

// replacePods gives the Deployment new pods. The old ones drain.
func (w *world) replacePods() {
	w.Helper()
	w.kubectl("rollout", "restart", "deployment/web")
	w.kubectl("rollout", "status", "deployment/web", "--timeout=120s")
}

// settled returns when connections reach the pods that are there to stay, and no others.
func (w *world) settled() {
	w.Helper()
	start := time.Now()
	wanted := w.pods()
	// kube-proxy, to which the same can be done, takes 41 s after its token was revoked.
	eventually.Taking(time.Minute).Nil(w, "only the new pods get connections", func() error {
		const enough = 40 // for each of four pods to be chosen, but for one time in 25,000
		chosen := map[string]bool{}
		for range enough {
			o, err := w.bed.Probe(w.Context(), testbed.Probe{From: client, To: addresses()[0], Timeout: 10 * time.Second})
			if err != nil {
				return err
			}
			chosen[o.Backend] = true
		}
		if !maps.Equal(chosen, wanted) {
			return fmt.Errorf("%v do, and shall be %v", chosen, wanted)
		}
		return nil
	})
	w.Logf("new pods are in force after %s", time.Since(start).Round(time.Millisecond))
}
