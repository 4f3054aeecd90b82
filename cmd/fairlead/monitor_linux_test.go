package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/recorder"
)

// watcher is a running fairlead monitor.
type watcher struct {
	*testbed.Cmd
	w      *world
	events chan recorder.Event
}

// monitor starts it, and waits for its first line.
func (w *world) monitor(flags ...string) (*watcher, recorder.Event) {
	w.Helper()
	c := w.command(append([]string{"monitor", "-o", "json", "--control-socket", w.socket}, flags...)...)
	out, in := io.Pipe()
	c.Stdout = in
	if err := c.Start(); err != nil {
		w.Fatal(err)
	}
	m := &watcher{c, w, make(chan recorder.Event, 1000)}
	go func() {
		defer close(m.events)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var e recorder.Event
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				w.Errorf("%s: %v", lines.Text(), err)
			}
			m.events <- e
		}
	}()
	w.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		_ = in.Close()
	})
	return m, m.next(recorder.Monitor)
}

// next is the next event of a kind. Others may come before it.
func (m *watcher) next(kind recorder.Kind) recorder.Event {
	m.w.Helper()
	var seen []string
	ctx, cancel := eventually.Context(m.w.Context())
	defer cancel()
	for {
		select {
		case e, ok := <-m.events:
			if e.Kind == kind && ok {
				return e
			}
			if seen = append(seen, fmt.Sprintf("%+v", e)); ok {
				continue
			}
		case <-ctx.Done():
		}
		m.w.Fatalf("no event %q, but:\n%s", kind, strings.Join(seen, "\n"))
	}
}

// watches wants to be told of what happens, with one plane.
func (w *world) watches(how string) {
	m, first := w.monitor("--service", "default/web")
	all, _ := w.monitor()
	if !strings.Contains(first.Message, how) {
		w.Errorf("first it says %q", first.Message)
	}
	who := w.probe("pod-a", clusterIP)
	backend := map[string]string{"pod-a": "10.244.1.2:8080", "pod-b": "10.244.2.2:8080"}[who]
	e := m.next(recorder.Connection)
	if e.Service != "default/web" || e.Verdict != recorder.Forwarded || fmt.Sprint(e.Backends) != "["+backend+"]" {
		w.Errorf("%s answered, and the event is %+v", who, e)
	}
	if each := strings.Contains(how, "each, from"); each && (e.Destination != "10.96.0.10:80/tcp" ||
		!strings.HasPrefix(e.Client, "10.244.1.2:")) {
		w.Errorf("the event is %+v", e)
	}
	w.write("web.yaml", strings.Replace(web, "- addresses: [POD-A]\n", "", 1))
	if e := m.next(recorder.Left); e.Service != "default/web" || e.Message != "10.244.1.2:8080" {
		w.Errorf("pod-a left, and the event is %+v", e)
	}
	w.write("web.yaml", web)
	if e := m.next(recorder.Joined); e.Service != "default/web" || e.Message != "10.244.1.2:8080" {
		w.Errorf("pod-a joined, and the event is %+v", e)
	}
	if e := all.next(recorder.Rows); e.Service != "default/web" || e.Details["set"] != "1" {
		w.Errorf("the event is %+v", e)
	}
	if err := m.Process.Signal(unix.SIGINT); err != nil {
		w.Fatal(err)
	}
	if err := m.Wait(); err != nil {
		w.Errorf("interrupted: %v", err)
	}
}

func TestMonitor(t *testing.T) {
	for mode, how := range map[string]string{
		"nftables":  "data plane nftables; new connections: each, from connection tracking",
		"iptables":  "data plane iptables; new connections: each, from connection tracking",
		"userspace": "data plane userspace; new connections: their number each second",
	} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t)
			w.start("--proxy-mode", mode)
			w.watches(how)
		})
	}
}

func TestRun_ipvsMonitor(t *testing.T) {
	if needIPVS(t) {
		return
	}
	w := newWorld(t)
	w.start("--proxy-mode", "ipvs")
	w.watches("data plane ipvs; new connections: each, from connection tracking")
}

func TestRun_ebpfMonitor(t *testing.T) {
	m := newMachine(t)
	p := m.start("--proxy-mode", "ebpf")
	m.watches("data plane ebpf; new connections: those of packets from connection tracking")
	refused, _ := m.monitor("--verdict", "refused,dropped")
	m.write("web.yaml", strings.SplitN(web, "---", 2)[0])
	p.await("a change is in force")
	for m.probe("pod-a", clusterIP) != testbed.Refused.String() {
	}
	if e := refused.next(recorder.Refused); e.Service != "default/web" || e.Verdict != recorder.Rejected || e.Count < 1 ||
		!strings.Contains(e.Message, "no endpoint is ready") {
		t.Errorf("%+v", e)
	}
}

// TestMonitor_repairs: the monitor tells of drifts and their repair, and ends when the agent does.
func TestMonitor_repairs(t *testing.T) {
	w := newWorld(t)
	p := w.start()
	m, _ := w.monitor()
	if out, err := w.bed.Command(t.Context(), testbed.Node, "nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if e := m.next(recorder.Drift); !strings.Contains(e.Details["by"], "nft") {
		t.Errorf("%+v", e)
	}
	if e := m.next(recorder.Repair); e.Count == 0 {
		t.Errorf("%+v", e)
	}
	if err := p.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(); m.ProcessState.ExitCode() != 1 {
		t.Errorf("the agent has ended: %v", err)
	}
}

func TestMonitor_usage(t *testing.T) {
	w := newWorld(t)
	for args, want := range map[string]string{
		"--verdict accepted":   `"accepted" is none of forwarded, refused, dropped`,
		"--service web":        `"web" is not namespace/name`,
		"--service a/b --nope": "unknown flag",
	} {
		status, out := w.execute(append([]string{"monitor", "--control-socket", w.socket}, strings.Fields(args)...)...)
		if status != 2 || !strings.Contains(out, want) {
			t.Errorf("monitor %s: exit status %d: %s", args, status, out)
		}
	}
}
