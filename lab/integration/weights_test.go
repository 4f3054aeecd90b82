package integration

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// A pod is emptied with kubectl: its addresses have weight 0 on the slices that the endpoint controller makes.
// That keeps what it does not know while it updates them. The scheduler of a Service arrives as well.
func TestWeights(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.Fairlead)
	w := newWorld(t, kubernetes.Options{})
	w.deployWeb(time.Second)
	pod, weights := w.emptied()
	w.kubectl("annotate", "endpointslices", "--selector=kubernetes.io/service-name=web", "fairlead.dev/weights="+weights)
	w.kubectl("annotate", "service", "web", "fairlead.dev/scheduler=wlc")
	w.awaitRows(2, " weight 0")
	w.awaitRows(2, " scheduler wlc")
	w.spares(pod)
	w.kubectl("scale", "deployment/web", "--replicas=6")
	w.rolledOut()
	w.awaitRows(12, "backend default/web ")
	w.awaitRows(2, " weight 0")
	w.spares(pod)
	w.kubectl("annotate", "endpointslices", "--selector=kubernetes.io/service-name=web", "fairlead.dev/weights-")
	w.awaitRows(0, " weight 0")
	w.unbroken(func() {})
}

// emptied is a pod, and the annotation that gives both of its addresses weight 0.
func (w *world) emptied() (place, weights string) {
	w.Helper()
	list, err := w.plane.Client().CoreV1().Pods("default").List(w.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) == 0 {
		w.Fatal("no pod: ", err)
	}
	p := list.Items[0]
	var words []string
	for _, ip := range p.Status.PodIPs {
		words = append(words, ip.IP+"=0")
	}
	return string(kubernetes.PodPlace(p.Namespace, p.Name)), strings.Join(words, ",")
}

// awaitRows returns when the proxy has so many rows with a text.
func (w *world) awaitRows(n int, text string) {
	w.Helper()
	eventually.Nil(w, fmt.Sprintf("%d rows have %q", n, text), func() error {
		dump := exec.CommandContext(w.Context(), fairlead(w.T), "dump", w.command[len(w.command)-1])
		dump.Args[0] = "fairlead"
		out, err := dump.CombinedOutput()
		if got := strings.Count(string(out), text); err == nil && got != n {
			err = fmt.Errorf("there are %d", got)
		}
		if err != nil {
			err = fmt.Errorf("%w in\n%s", err, out)
		}
		return err
	})
}

// spares checks that a pod gets no connections, and all others do.
func (w *world) spares(pod string) {
	w.Helper()
	load := w.load()
	w.answers(load, 200)
	report := load.Stop()
	if len(report.Faults) > 0 {
		w.Error(report)
	}
	for place := range w.pods() {
		if got := report.Backends[place]; got > 0 == (place == pod) {
			w.Errorf("%s has weight 0: %s gets %d connections", pod, place, got)
		}
	}
}
