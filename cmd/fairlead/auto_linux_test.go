package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

// status asks the running daemon.
func (w *world) status() (r engine.Report) {
	w.Helper()
	answer, err := engine.Ask(w.Context(), w.socket, "/status")
	if err == nil {
		err = json.Unmarshal(answer, &r)
	}
	if err != nil {
		w.Fatal(err)
	}
	return r
}

// serves waits until a plane is in force for a mode.
func (w *world) serves(plane, mode string) (r engine.Report) {
	w.Helper()
	eventually.Nil(w, fmt.Sprintf("%s is in force for mode %s", plane, mode), func() error {
		if r = w.status(); r.Plane != plane || r.Mode != mode || r.InForceSince.IsZero() {
			return fmt.Errorf("the status is %+v", r)
		}
		return nil
	})
	return r
}

// end kills the daemon.
func (p *proxy) end() {
	_ = p.Process.Kill()
	_ = p.Wait()
}

// clean waits until nothing is left of what was measured.
func (m machine) clean() {
	m.Helper()
	eventually.Nil(m, "what was measured is gone", func() error {
		left, err := filepath.Glob(filepath.Join(m.bed.Cgroup(), "fairlead-test-*"))
		if len(left) > 0 {
			return fmt.Errorf("there is still %s", left)
		}
		return err
	})
}

// A machine on which nothing is has one chosen, by measuring. The next process does not choose again.
func TestRun_auto(t *testing.T) {
	w := newMachine(t)
	w.configure("auto", "")
	flags := []string{"--config", w.config(), "--cgroup-root", w.bed.Cgroup()}
	p := w.start(flags...)
	r := w.status()
	if !slices.Contains(daemon.Planes(), r.Plane) || r.Mode != "auto" || !strings.HasPrefix(r.Why, "Use "+r.Plane+" for ") {
		t.Fatalf("the status is %+v", r)
	}
	w.serves(r.Plane, "auto")
	w.clean()
	eventually.Equal(t, "/proxyMode", r.Plane, w.proxyMode)
	w.answers()
	if shown := w.runs("fairlead", "status --control-socket "+w.socket, 0); !strings.Contains(shown, r.Why) {
		t.Errorf("the status does not say why:\n%s", shown)
	}
	w.write("web.yaml", strings.ReplaceAll(web, "- addresses: [POD-B]\n", ""))
	w.reaches("pod-a") // changes come to the plane that was chosen
	p.end()

	p = w.start(flags...)
	if again := w.serves(r.Plane, "auto"); !strings.Contains(again.Why, "its rules were in the kernel") {
		t.Errorf("after a restart: %s", again.Why)
	}
	w.answers()
	p.end()
}

// Rules that other processes left stay, whatever they are. Modes that must not be chosen are not chosen.
func TestRun_autoKeeps(t *testing.T) {
	w := newMachine(t)
	flags := []string{"--config", w.config(), "--cgroup-root", w.bed.Cgroup()}
	for _, plane := range []string{"iptables", "ebpf", "userspace", "nftables"} {
		w.configure(plane, "")
		w.start(flags...).end()
		w.configure("auto", "")
		p := w.start(flags...)
		if r := w.serves(plane, "auto"); !strings.Contains(r.Why, "its rules were in the kernel") {
			t.Errorf("after %s: %s", plane, r.Why)
		}
		w.answers()
		p.end()
	}
}

// Leftovers for open connections alone do not decide which plane stays.
func TestRun_autoRetired(t *testing.T) {
	w := newMachine(t)
	flags := []string{"--config", w.config(), "--cgroup-root", w.bed.Cgroup()}
	w.configure("ebpf", "")
	p := w.start(flags...)
	open := w.dial(testbed.Outside, nodePort)
	defer open.Close()
	p.end()
	w.configure("nftables", "")
	p = w.start(flags...)
	if w.pins() == "" {
		t.Error("nothing is left for the connection")
	}
	p.end()
	w.configure("auto", "")
	p = w.start(flags...)
	w.serves("nftables", "auto")
	if err := talk(open); err != nil {
		t.Error(err)
	}
	p.end()
}

// A plane that an operator switched to stays, also over a restart.
func TestRun_autoSwitched(t *testing.T) {
	w := newMachine(t)
	w.configure("auto", "")
	flags := []string{"--config", w.config(), "--cgroup-root", w.bed.Cgroup()}
	p := w.start(flags...)
	other := "iptables"
	if w.status().Plane == other {
		other = "nftables"
	}
	w.clean()
	out := w.runs("fairlead", "switch "+other+" --control-socket "+w.socket, 0, "done: "+other)
	if strings.Contains(out, "next start") {
		t.Errorf("the next start keeps it, but:\n%s", out)
	}
	if r := w.serves(other, "auto"); !strings.Contains(r.Why, "by fairlead switch") {
		t.Errorf("the status is %+v", r)
	}
	w.answers()
	w.write("own.yaml", "") // a change that the plane has to hear of
	w.configure("auto", "iptables: {masqueradeAll: true}\n")
	p.await("configuration changed")
	w.serves(other, "auto")
	p.end()
	p = w.start(flags...)
	if r := w.serves(other, "auto"); !strings.Contains(r.Why, "its rules were in the kernel") {
		t.Errorf("the status is %+v", r)
	}
	p.end()
}

// A mode that is changed to auto, and back, changes no data plane.
func TestRun_autoConfigured(t *testing.T) {
	w := newMachine(t)
	w.configure("iptables", "")
	p := w.start("--config", w.config(), "--cgroup-root", w.bed.Cgroup())
	w.configure("auto", "")
	if r := w.serves("iptables", "auto"); !strings.Contains(r.Why, "chosen before mode auto was set") {
		t.Errorf("the status is %+v", r)
	}
	w.answers()
	w.configure("nftables", "")
	if r := w.serves("nftables", "nftables"); r.Why != "" {
		t.Errorf("the status is %+v", r)
	}
	p.end()
}

// Once is enough, and --init-only makes no rules.
func TestRun_autoOnce(t *testing.T) {
	w := newMachine(t)
	flags := " --proxy-mode auto --conntrack-max-per-core 0 --manifests DIR --node-ip 192.0.2.1 --cgroup-root " + w.bed.Cgroup()
	w.runs("fairlead", "run --init-only"+flags, 0)
	if rules, pins := w.ruleset(), w.pins(); rules != "" || pins != "" {
		t.Fatalf("after --init-only: %s\n%s", pins, rules)
	}
	w.runs("fairlead", "run --once"+flags, 0, "chose a data plane")
	w.answers()
	w.runs("fairlead", "run --once"+flags, 0, "kept a data plane")
}

// Without the right to make namespaces one is chosen at once.
func TestRun_autoUnmeasured(t *testing.T) {
	w := openWorld(t)
	args := []string{"run", "--manifests", w.manifests, "--once", "--node-ip", "192.0.2.1", "--conntrack-max-per-core=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0", "--proxy-mode", "auto"}
	out, err := w.unprivileged("-all,+net_admin", args...).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "by published figures") {
		t.Errorf("%v\n%s", err, out)
	}
	w.answers()
}

// answers fails the test unless a pod answers at the ClusterIP.
func (w *world) answers() {
	w.Helper()
	if got := w.probe(testbed.Node, clusterIP); !strings.HasPrefix(got, "pod-") {
		w.Errorf("%s answers %s", clusterIP, got)
	}
}
