package integration

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// TestDrain rolls a Deployment whose pods wait in their preStop hooks until no node uses them, and one whose pods end at
// once, which loses connections. Beside other tests there would not be 500 connections a second.
func TestDrain(t *testing.T) {
	for _, mode := range []string{"nftables", "ebpf"} {
		t.Run(mode, func(t *testing.T) { testDrain(newWorldIn(t, mode, kubernetes.Options{})) })
	}
}

func testDrain(w *world) {
	w.startAgents()
	w.mayNotTakeLocks()
	for _, c := range []struct {
		name, hook string
		loses      bool
	}{
		{"no hook", "", true},
		{"wait-drained", `["` + program + `", wait-drained]`, false},
		{"curl", `[curl, --silent, --show-error, --fail, --noproxy, "*", "http://192.0.2.1:10256/drained"]`, false},
	} {
		w.step(c.name, func(w *world) {
			r := w.roll(c.hook)
			for try := 1; c.loses && len(r.Faults) == 0 && try < 10; try++ { // some rollings lose none by chance
				r = w.roll(c.hook)
			}
			if loses := len(r.Faults) > 0; loses != c.loses {
				w.Error(r)
			}
		})
	}
	at := netip.MustParseAddrPort("127.0.0.1:10249")
	_, body, err := w.proxy.Get(w.Context(), at, "/metrics")
	answered := regexp.MustCompile(`(?m)^fairlead_drained_requests_total\{code="200"\} [1-9]`)
	if text := string(body); err != nil || !answered.MatchString(text) || !strings.Contains(text, "\nfairlead_drained_waiting 0\n") {
		w.Errorf("%v: no answers to pods are counted, or some still wait:\n%s", err, text)
	}
}

// An agent may write no Leases but those of agents, among which are locks of controllers.
func (w *world) mayNotTakeLocks() {
	w.Helper()
	const lock = `{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: kube-scheduler, namespace: kube-system}}`
	eventually.Nil(w, "the policy is in force", func() error {
		out, err := w.plane.Kubectl(w.Context(), lock, "create", "--dry-run=server", "-f", "-", "--as=system:serviceaccount:kube-system:fairlead")
		switch {
		case err == nil:
			return errors.New("a lock can be taken")
		case strings.Contains(out, "own node only"):
			return nil
		}
		return err
	})
}

// clientB is a pod on the second node.
const clientB testbed.Place = "client-b"

// startAgents has an agent on each node, with the rights of the deployment.
func (w *world) startAgents() {
	w.Helper()
	w.kubectl("apply", "-f", "../../deploy/kustomize/base/fairlead.yaml")
	if _, err := w.bed.AddPod(w.Context(), testbed.PodSpec{Name: string(clientB), Node: testbed.NodeB}); err != nil {
		w.Fatal(err)
	}
	config, err := w.relay.Kubeconfig(w.TempDir(), kubernetes.User{Name: "system:serviceaccount:kube-system:fairlead"})
	if err == nil {
		err = w.proxy.Terminate()
	}
	if err != nil {
		w.Fatal(err)
	}
	w.command = append(w.command, "--kubeconfig="+config)
	w.startProxy()
	second, err := kubernetes.StartProxy(context.WithoutCancel(w.Context()), kubernetes.ProxyOptions{
		Bed: w.bed, Place: testbed.NodeB, Command: append([]string{fairlead(w.T)}, append(kubernetes.ProxyArgs(config, "nftables"),
			"--hostname-override="+string(testbed.NodeB), "--control-socket="+filepath.Join(w.TempDir(), "socket"))...),
	})
	if err == nil {
		err = second.Ready(w.Context())
	}
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if w.Failed() {
			w.Logf("the second agent's log:\n%s", second.Log())
		}
	})
}

//go:embed testdata/drain.yaml
var drained string

// roll deploys pods that have a preStop hook, rolls them under load, and counts what fails.
func (w *world) roll(hook string) traffic.Report {
	w.Helper()
	const pods = 30
	if hook != "" {
		hook = "preStop: {exec: {command: " + hook + "}}"
	}
	w.kubectlStdin(strings.NewReplacer("HOOK", hook, "PODS", strconv.Itoa(pods)).Replace(drained), "apply", "-f", "-")
	w.rolledOut()
	var visits []traffic.Path
	for _, from := range []testbed.Place{client, clientB, testbed.Node, testbed.Outside} {
		to := netip.MustParseAddrPort("10.96.0.10:80")
		if from == testbed.Outside {
			to = netip.MustParseAddrPort("192.0.2.1:30080")
		}
		visits = append(visits, traffic.Path{From: from, To: to})
	}
	// 660 a second; a machine that is busy itself gets to some 500.
	load, err := traffic.StartWatch(context.WithoutCancel(w.Context()), w.bed, traffic.WatchSpec{
		Visits: visits, Interval: 6 * time.Millisecond, Ahead: 100, Timeout: 10 * time.Second,
	})
	if err != nil {
		w.Fatal(err)
	}
	before := len(w.kubelet.Hooks())
	w.answers(load, 100)
	start := time.Now()
	w.kubectl("set", "env", "deployment/web", fmt.Sprint("VERSION=", start.Unix()))
	w.rolledOut()
	took := time.Since(start)
	w.answers(load, 100)
	lasted := load.Elapsed()
	report := load.Stop()
	w.Logf("%d pods within %s; %d connections, %.0f a second, %d failed", pods, took.Round(100*time.Millisecond),
		report.Total().Attempts, float64(report.Total().Attempts)/lasted.Seconds(), len(report.Faults))
	for i, h := range w.kubelet.Hooks()[before:] {
		if i < 4 || h.Err != nil {
			w.Logf("%s: %s after %s, %v", h.Pod, h.Output, h.Took.Round(time.Millisecond), h.Err)
		}
		if h.Err != nil {
			w.Errorf("%s: %v", h.Pod, h.Err)
		}
	}
	return report
}
