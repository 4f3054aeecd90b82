package main

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

// lock keeps the iptables of the node from being changed, as another program does, until it is called.
func (m machine) lock() (unlock func()) {
	m.Helper()
	c := m.bed.Command(m.Context(), testbed.Node, "nsenter", "--mount="+m.mounts, "--",
		"flock", "/run/xtables.lock", "sh", "-c", "echo locked; exec cat")
	in, err := c.StdinPipe()
	if err != nil {
		m.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err == nil {
		_, err = out.Read(make([]byte, 1))
	}
	if err != nil {
		m.Fatal(err)
	}
	return func() {
		_ = in.Close()
		_ = c.Wait()
	}
}

// ordered is a "fairlead switch" that goes on.
type ordered struct {
	*testbed.Cmd
	out bytes.Buffer
}

func (w *world) order(plane string) *ordered {
	w.Helper()
	o := &ordered{Cmd: w.command("switch", plane, "--control-socket", w.socket)}
	o.Stdout, o.Stderr = &o.out, &o.out
	if err := o.Start(); err != nil {
		w.Fatal(err)
	}
	return o
}

func (o *ordered) ends(t *testing.T, status int, has string) {
	t.Helper()
	_ = o.Wait()
	if got := o.ProcessState.ExitCode(); got != status || !strings.Contains(o.out.String(), has) {
		t.Errorf("exit status %d, want %d, and %q in\n%s", got, status, has, o.out.String())
	}
}

// proxyMode is what /proxyMode says.
func (w *world) proxyMode() string {
	_, body := w.page(netip.MustParseAddrPort("127.0.0.1:10249"), "/proxyMode")
	return body
}

// switchTo switches and expects an exit status and text in what is printed.
func (w *world) switchTo(args string, status int, has ...string) string {
	w.Helper()
	return w.runs("fairlead", "switch "+args+" --control-socket "+w.socket, status, has...)
}

// TestSwitch changes the data plane by command while clients are served, and then says which one the next start takes.
func TestSwitch(t *testing.T) {
	w := newMachine(t)
	w.switchTo("iptables", 1, "no proxy listens on "+w.socket)
	w.write("sticky.yaml", strings.NewReplacer("web", "sticky", "10.96.0.10", "10.96.0.13", "30080", "30083",
		"type: NodePort", "type: NodePort\n  sessionAffinity: ClientIP").Replace(web))
	w.configure("nftables", "")
	p := w.start("--config", w.config(), "--cgroup-root", w.bed.Cgroup())
	// Few connections: see docs/operations.md about clients that are hidden.
	load := w.watch(40*time.Millisecond, everywhere())
	sticky := netip.MustParseAddrPort("192.0.2.1:30083")
	kept, own := w.probe(testbed.Outside, sticky), w.probe("pod-a", netip.MustParseAddrPort("10.96.0.13:80"))
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	w.switchTo("nftables", 0, "nftables is in force already")
	w.misuseSwitch()
	for i, plane := range []string{"iptables", "userspace", "ebpf", "userspace", "nftables", "ebpf", "iptables", "userspace", "nftables"} {
		for from, to := range everywhere() {
			open = append(open, w.dial(from, to))
		}
		out := w.switchTo(plane, 0, "opening "+plane, "programmed 5 frontends", "verified", "handed over session affinity", plane+" is in force", "done: "+plane)
		if warned := strings.Contains(out, "the configuration says mode nftables: the next start goes back to it"); warned == (plane == "nftables") {
			t.Errorf("to %s: of the configuration it says\n%s", plane, out)
		}
		if got := w.proxyMode(); got != plane {
			t.Errorf("/proxyMode says %s, want %s", got, plane)
		}
		w.runs("fairlead", "status --control-socket "+w.socket, 0, "data plane       "+plane)
		if err := load.Settle(t.Context(), 5); err != nil {
			t.Error(err)
		}
		if got := w.probe(testbed.Outside, sticky); got != kept {
			t.Errorf("after change %d, to %s, a client of %s moved from %s to %s", i, plane, sticky, kept, got)
		}
		if got := w.probe("pod-a", netip.MustParseAddrPort("10.96.0.13:80")); got != own {
			t.Errorf("after change %d, to %s, pod-a moved from %s to %s", i, plane, own, got)
		}
		for _, c := range open {
			w.talksOver(c, fmt.Sprintf("after change %d, to %s", i, plane))
		}
	}
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 120 {
		t.Errorf("while the data plane changed: %s", r)
	}
	// The file says something else, but not of the mode.
	w.switchTo("iptables -o json", 0, `{"step":"in-force","plane":"iptables",`, `{"step":"done"`)
	w.configure("nftables", "metricsBindAddress: 127.0.0.1:10250\n")
	moved := netip.MustParseAddrPort("127.0.0.1:10250")
	eventually.True(w, "the configuration is obeyed", func() bool { return w.get(moved, "/metrics") == 200 })
	if _, mode := w.page(moved, "/proxyMode"); mode != "iptables" {
		t.Errorf("the configuration was edited, and the data plane is %s", mode)
	}
	_, text := w.page(moved, "/metrics")
	if want := `fairlead_plane_switches_total{from="nftables",result="success",to="iptables"} 2`; !strings.Contains(text, want) {
		t.Errorf("no %s in the metrics", want)
	}
	_ = p.Process.Kill()
	_ = p.Wait()
	w.start("--config", w.config(), "--cgroup-root", w.bed.Cgroup())
	eventually.Equal(w, "the mode of the next start", "nftables", func() string {
		_, mode := w.page(moved, "/proxyMode")
		return mode
	})
	eventually.Equal(w, "tables", "fairlead fairlead-ebpf-ports", w.tablesOfIPv4) // the latter is for open connections
}

// TestSwitch_schedulers has a Service ask for a scheduler. The status names it while a data plane is in force that does
// not have it.
func TestSwitch_schedulers(t *testing.T) {
	w := newMachine(t)
	w.write("web.yaml", strings.Replace(web, "{name: web}", "{name: web, annotations: {fairlead.dev/scheduler: twos}}", 1))
	w.configure("nftables", "")
	w.start("--config", w.config(), "--cgroup-root", w.bed.Cgroup())
	for _, c := range []struct{ plane, problem string }{
		{"nftables", `mode nftables has no scheduler "twos" and chooses endpoints at random by weight`},
		{"ebpf", ""},
		{"iptables", `mode iptables has no scheduler "twos" and chooses endpoints at random by weight`},
		{"userspace", ""},
	} {
		w.switchTo(c.plane, 0)
		eventually.Nil(w, "the problems in mode "+c.plane, func() error {
			problems := w.status().Problems
			switch {
			case len(problems) != min(1, len(c.problem)):
			case c.problem == "", problems[0].Field == "metadata.annotations[fairlead.dev/scheduler]" &&
				strings.HasPrefix(problems[0].Reason, c.problem):
				return nil
			}
			return fmt.Errorf("%v", problems)
		})
	}
}

// TestSwitch_fails has switches be interrupted and refused; the data plane that was there stays, alone.
func TestSwitch_fails(t *testing.T) {
	w := newMachine(t)
	w.on(testbed.Node, "nsenter", "--mount="+w.mounts, "--", "mount", "-t", "tmpfs", "tmpfs", "/run")
	w.configure("nftables", "")
	flags := []string{"--config", w.config(), "--cgroup-root", "/does/not/exist", "--iptables-backend", "legacy"}
	p := w.start(flags...)
	load := w.watch(10*time.Millisecond, everywhere())
	rules := w.tables()
	stays := func() {
		t.Helper()
		eventually.Equal(w, "tables", rules, w.tables)
		if got := w.proxyMode(); got != "nftables" {
			t.Errorf("/proxyMode says %s", got)
		}
		if out := w.on(testbed.Node, "iptables-legacy-save"); strings.Contains(out, "KUBE-") {
			t.Errorf("there are rules of mode iptables:\n%s", out)
		}
	}
	w.switchTo("ebpf", 1, "the data plane nftables stays, as ebpf cannot take its place", "/does/not/exist")
	stays()
	w.configure("ebpf", "")
	p.await("the configuration was refused; the old one stays")
	stays()
	w.configure("nftables", "")
	p.await("the configuration is accepted again")

	// An external change keeps the new data plane from being programmed. Changes are followed meanwhile.
	for _, how := range []os.Signal{os.Interrupt, os.Kill} {
		unlock := w.lock()
		first := w.order("iptables")
		p.await("waiting for another program that changes iptables")
		w.switchTo("userspace", 1, "a change to the data plane iptables is under way")
		w.write("web.yaml", strings.Replace(web, "- addresses: [POD-B]\n", "", 1))
		w.reaches("pod-a")
		w.write("web.yaml", web)
		if err := first.Process.Signal(how); err != nil {
			t.Fatal(err)
		}
		if how == os.Interrupt {
			first.ends(t, 1, "cancelled: nftables stays in force")
		} else {
			_ = first.Wait()
			p.await("the data plane has not changed")
		}
		unlock()
		w.reaches("pod-b")
		stays()
	}
	w.editsWhileLocked(p)
	stays()

	unlock := w.lock()
	first := w.order("iptables")
	p.await("waiting for another program that changes iptables")
	unlock()
	first.ends(t, 0, "done: iptables has taken the place of nftables")

	// The process is killed in the middle.
	unlock = w.lock()
	first = w.order("nftables")
	p.await("waiting for another program that changes iptables")
	_ = p.Process.Kill()
	_ = p.Wait()
	first.ends(t, 1, "the proxy has ended")
	unlock()
	w.start(flags...)
	stays()
	if r := load.Stop(); len(r.Faults) > 0 {
		t.Errorf("while the data plane did not change: %s", r)
	}
}

// TestSwitch_takeOver: a switch does not wait for the removal of what kube-proxy has left, which waits for another program.
func TestSwitch_takeOver(t *testing.T) {
	w := newMachine(t)
	w.on(testbed.Node, "nsenter", "--mount="+w.mounts, "--", "mount", "-t", "tmpfs", "tmpfs", "/run")
	w.on(testbed.Node, "iptables-legacy", "-t", "nat", "-N", "KUBE-SERVICES")
	unlock := w.lock()
	p := w.start("--proxy-mode", "nftables")
	p.await("waiting for another program that changes iptables")
	w.switchTo("userspace", 0, "done: userspace has taken the place of nftables")
	if rules := w.on(testbed.Node, "iptables-legacy-save"); !strings.Contains(rules, "KUBE-SERVICES") {
		t.Errorf("no lock was needed to remove it:\n%s", rules)
	}
	unlock()
	p.await("removed kube-proxy's leftovers")
	w.reaches("pod-b")
}

func (w *world) misuseSwitch() {
	w.Helper()
	w.switchTo("nonsense", 2, `there is no data plane "nonsense"`, "nftables, iptables, ipvs, ebpf, userspace")
	w.switchTo("iptables -o yaml", 2, "--output")
	w.switchTo("", 2, "name a data plane, one of nftables, iptables, ipvs, ebpf, userspace")
}

// editsWhileLocked has the configuration want what another program keeps from being done, until the configuration is
// edited again, or the other program is ended.
func (m machine) editsWhileLocked(p *proxy) {
	m.Helper()
	unlock := m.lock()
	defer unlock()
	m.configure("iptables", "")
	p.await("waiting for another program that changes iptables")
	m.configure("nftables", "")
	p.await("the configuration has been edited again")
	m.configure("iptables", "")
	p.await("waiting for another program that changes iptables")
	answer, err := engine.Order(m.Context(), m.socket, http.MethodDelete, "/switch")
	if err != nil {
		m.Fatal(err)
	}
	answer.Close()
	p.await("the change of the data plane was cancelled")
	m.configure("nftables", "")
	p.await("the configuration is accepted again")
	_, text := m.page(netip.MustParseAddrPort("127.0.0.1:10249"), "/metrics")
	want := `fairlead_plane_switches_total{from="nftables",result="cancelled",to="iptables"} 4`
	if !strings.Contains(text, want) {
		m.Errorf("no %s in the metrics", want)
	}
}
