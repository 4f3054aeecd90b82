package integration

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// TestReadinessGate has pods become ready once the agent of their node has reached them.
func TestReadinessGate(t *testing.T) {
	t.Parallel()
	lack.Need(t, lack.Fairlead)
	w := newWorld(t, kubernetes.Options{})
	w.step("off", func(w *world) {
		w.gated("asks-nobody")
		w.runs("asks-nobody")
		if log := w.proxy.Log(); strings.Contains(log, "pods") {
			w.Errorf("without the setting the agent asks for pods:\n%s", log)
		}
	})
	w.command = append(w.command, "--readiness-gate")
	w.restart()
	eventually.True(w, "the log says what is forbidden", func() bool {
		return strings.Contains(w.proxy.Log(), "readinessGate needs the rights")
	})
	for _, rights := range []string{"pods=list,watch --resource=pods", "statuses=patch --resource=pods/status"} {
		name, what, _ := strings.Cut(rights, "=")
		w.kubectl(append([]string{"create", "clusterrole", name}, strings.Fields("--verb="+what)...)...)
		w.kubectl("create", "clusterrolebinding", name, "--clusterrole="+name, "--serviceaccount=kube-system:kube-proxy")
	}
	w.step("ready", func(w *world) {
		w.becomesReady("asks-nobody")
		_, metrics, err := w.proxy.Get(w.Context(), netip.MustParseAddrPort("127.0.0.1:10249"), "/metrics")
		if err != nil || !strings.Contains(string(metrics), `fairlead_watch_silence_seconds{resource="pods"}`) {
			w.Errorf("%v: the watch of pods is not measured:\n%s", err, metrics)
		}
	})
	w.step("not routed", func(w *world) {
		w.node("ip rule add pref 1 to 10.244.1.0/24 prohibit")
		w.gated("late")
		w.unroutedBecause("late", "permission denied")
		w.node(fmt.Sprintf("ip rule add pref 1 to %s prohibit", w.runs("late").Status.PodIP))
		w.node("ip rule del pref 1 to 10.244.1.0/24")
		w.gated("good")
		w.becomesReady("good")
		if ready(w.runs("late"), corev1.PodReady) {
			w.Error("a pod that the node does not reach is ready")
		}
	})
	w.step("silent", func(w *world) {
		w.node("nft add table ip t; add chain ip t out { type filter hook output priority 0 ; }; add rule ip t out ip daddr " +
			w.runs("late").Status.PodIP + " drop")
		w.node("ip rule del pref 1")
		w.unroutedBecause("late", "i/o timeout")
		w.node("nft delete table ip t")
		w.becomesReady("late")
	})
	w.step("restart", func(w *world) {
		before := w.conditions()
		w.restart()
		w.gated("next") // when it is ready, the agent has seen all others
		w.becomesReady("next")
		for uid, was := range before {
			if is := w.conditions()[uid]; is != was {
				w.Errorf("a restart changed %v to %v", was, is)
			}
		}
	})
	w.step("replaced", func(w *world) {
		w.kubectl("delete", "pod", "good", "--grace-period=1")
		w.node("ip rule add pref 1 to 10.244.1.0/24 prohibit")
		w.gated("good")
		w.unroutedBecause("good", "permission denied")
		w.node("ip rule del pref 1")
		w.becomesReady("good")
	})
}

// restart ends the agent, and starts it as it shall be now.
func (w *world) restart() {
	w.Helper()
	if err := w.proxy.Terminate(); err != nil {
		w.Fatal(err)
	}
	w.startProxy()
}

// gated makes a pod on the node that has the gate.
func (w *world) gated(name string) {
	w.Helper()
	w.kubectlStdin(strings.ReplaceAll(`
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  nodeName: node
  readinessGates: [{conditionType: fairlead.dev/routed}]
  containers: [{name: web, image: web, ports: [{containerPort: 8080}]}]
`, "NAME", name), "create", "-f", "-")
}

// node runs commands there.
func (w *world) node(command string) {
	w.Helper()
	words := strings.Fields(command)
	if program, rest, _ := strings.Cut(command, " "); program == "nft" {
		words = []string{program, rest}
	}
	if out, err := w.bed.Command(w.Context(), testbed.Node, words[0], words[1:]...).CombinedOutput(); err != nil {
		w.Fatalf("%s: %v: %s", command, err, out)
	}
}

// pod waits until a pod is as wanted.
func (w *world) pod(name, what string, is func(*corev1.Pod) bool) (p *corev1.Pod) {
	w.Helper()
	eventually.Nil(w, name+" "+what, func() (err error) {
		p, err = w.plane.Client().CoreV1().Pods("default").Get(w.Context(), name, metav1.GetOptions{})
		if err == nil && !is(p) {
			err = fmt.Errorf("its conditions are %v", p.Status.Conditions)
		}
		return err
	})
	return p
}

func (w *world) runs(name string) *corev1.Pod {
	w.Helper()
	return w.pod(name, "runs", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
}

func (w *world) becomesReady(name string) {
	w.Helper()
	w.pod(name, "is ready", func(p *corev1.Pod) bool { return ready(p, corev1.PodReady) })
}

// unroutedBecause waits until the condition, an Event and the log say why a pod stays unready.
func (w *world) unroutedBecause(name, why string) {
	w.Helper()
	p := w.pod(name, "has a reason", func(p *corev1.Pod) bool {
		c := routed(p)
		return c.Status == corev1.ConditionFalse && strings.Contains(c.Message, why)
	})
	if ready(p, corev1.PodReady) {
		w.Errorf("%s is ready", name)
	}
	eventually.Nil(w, "an Event has the reason", func() error {
		out, err := w.plane.Kubectl(w.Context(), "", "describe", "pod", name)
		if err == nil && !(strings.Contains(out, "NotRouted") && strings.Contains(out, why)) {
			err = fmt.Errorf("it has not:\n%s", out)
		}
		return err
	})
	if log := w.proxy.Log(); !strings.Contains(log, "Pod default/"+name) || !strings.Contains(log, why) {
		w.Errorf("the log does not say %q of %s:\n%s", why, name, log)
	}
}

func routed(p *corev1.Pod) corev1.PodCondition {
	for _, c := range p.Status.Conditions {
		if c.Type == "fairlead.dev/routed" {
			return c
		}
	}
	return corev1.PodCondition{}
}

func ready(p *corev1.Pod, t corev1.PodConditionType) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == t {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// conditions are those of all pods, by UID.
func (w *world) conditions() map[types.UID]string {
	w.Helper()
	list, err := w.plane.Client().CoreV1().Pods("default").List(w.Context(), metav1.ListOptions{})
	if err != nil {
		w.Fatal(err)
	}
	all := map[types.UID]string{}
	for _, p := range list.Items {
		c := routed(&p)
		all[p.UID] = fmt.Sprint(c.Status, c.Message, c.LastTransitionTime)
	}
	return all
}
