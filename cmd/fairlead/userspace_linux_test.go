package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
)

// callers are clients and their destinations in the tests of the data plane userspace.
func callers() map[testbed.Place]netip.AddrPort {
	return map[testbed.Place]netip.AddrPort{
		testbed.Node: clusterIP, "pod-a": clusterIP, testbed.Outside: nodePort, "pod-b": nodePort,
	}
}

// routing is what leads packets to the process.
func (w *world) routing() (out string) {
	w.Helper()
	for _, family := range []string{"-4", "-6"} {
		out += w.on(testbed.Node, "ip", family, "rule", "show", "priority", "99")
		out += w.on(testbed.Node, "ip", family, "route", "show", "table", "all", "proto", "250")
		out += w.on(testbed.Node, "ip", family, "route", "show", "table", "all", "proto", "251")
	}
	return out
}

// TestRun_userspace has the process be killed, and others follow it. Its connections end with it. Clients that connect
// while there is none wait for the next one.
func TestRun_userspace(t *testing.T) {
	w := newWorld(t)
	w.configure("userspace", "")
	flags := []string{"--config", w.config()}
	p := w.start(flags...)
	metrics := netip.MustParseAddrPort("127.0.0.1:10249")
	eventually.Equal(t, "/proxyMode", "userspace", w.proxyMode)
	w.countsDials(metrics)
	for range 2 {
		open := map[testbed.Place]net.Conn{}
		for from, to := range callers() {
			open[from] = w.dial(from, to)
			defer open[from].Close()
		}
		_ = p.Process.Kill()
		_ = p.Wait()
		for from, c := range open {
			if err := talk(c); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("an open connection from %s after the process was killed: %v", from, err)
			}
		}
		answers := make(chan error)
		for from, to := range callers() {
			o, err := w.bed.Probe(t.Context(), testbed.Probe{From: from, To: to, Timeout: time.Second})
			if err != nil || o.Result != testbed.TimedOut {
				t.Errorf("from %s, where no process is: %s, %v", from, o, err)
			}
			go func() {
				o, err := w.bed.Probe(t.Context(), testbed.Probe{From: from, To: to, Timeout: eventually.Patience()})
				if err == nil && o.Result != testbed.Answered {
					err = fmt.Errorf("from %s, who began before there was a process: %s", from, o)
				}
				answers <- err
			}()
		}
		p = w.start(flags...)
		for range callers() {
			if err := <-answers; err != nil {
				t.Error(err)
			}
		}
	}
	_ = p.Process.Kill()
	_ = p.Wait()
	w.runs("fairlead", "clean", 0, "userspace: removed what there was")
	if left := w.ruleset() + w.routing(); left != "" {
		t.Errorf("after fairlead clean there is\n%s", left)
	}
}

// countsDials looks for the counters of a Service whose only backend is missing.
func (w *world) countsDials(metrics netip.AddrPort) {
	w.Helper()
	w.write("half.yaml", strings.NewReplacer("web", "half", "NodePort", "ClusterIP", ", nodePort: 30080", "",
		"10.96.0.10", "10.96.0.12", "port: 8080", "port: 9").Replace(web)) // where no socket listens
	half := netip.MustParseAddrPort("10.96.0.12:80")
	eventually.True(w, "a Service none of whose backends is there", func() bool {
		return w.probe(testbed.Outside, half) == testbed.Refused.String()
	})
	lost := regexp.MustCompile(`\nfairlead_unanswered_connections_total ([1-9]\d*)\n`)
	eventually.Equal(w, "dials are counted as often as it was tried", "", func() string {
		_, body := w.page(metrics, "/metrics")
		_, counters := w.execute("dump", "--counters", "--control-socket", w.socket)
		all := "\n" + body + "\n" + counters
		tried := 0 // a busy machine may have been too slow for the first answer
		if m := lost.FindStringSubmatch(all); m != nil {
			tried, _ = strconv.Atoi(m[1])
		}
		for _, want := range []string{
			fmt.Sprintf("\nfairlead_failed_dials_total %d\n", 2*tried), "\nfairlead_retried_connections_total 0\n",
			"\nfairlead_table_full_total{table=\"connections\"} 0\n", "\nfairlead_table_used{table=\"connections\"} 0\n",
			fmt.Sprintf("\ndials failed %d retried 0 unanswered %d\n", 2*tried, tried),
			fmt.Sprintf(" default/half cluster 10.244.1.2:9 connections 0 failed %d\n", tried),
		} {
			if tried == 0 || !strings.Contains(all, want) {
				return "tried " + strconv.Itoa(tried) + " times, but there is no " + want
			}
		}
		return ""
	})
}

// TestRun_userspaceFollows: connections that another data plane has translated live on.
func TestRun_userspaceFollows(t *testing.T) {
	w := newWorld(t)
	for _, mode := range []string{"nftables", "iptables"} {
		w.configure(mode, "")
		p := w.start("--config", w.config())
		open := map[testbed.Place]net.Conn{}
		for from, to := range callers() {
			open[from] = w.dial(from, to)
			defer open[from].Close()
		}
		w.configure("userspace", "")
		eventually.Equal(w, "tables after mode "+mode, "fairlead-userspace", w.tablesOfIPv4)
		for from, c := range open {
			if err := talk(c); err != nil {
				t.Errorf("an open connection from %s that mode %s has made: %v", from, mode, err)
			}
		}
		for from, to := range callers() {
			if err := talk(w.dial(from, to)); err != nil {
				t.Errorf("a new connection from %s: %v", from, err)
			}
		}
		_ = p.Process.Kill()
		_ = p.Wait()
	}
}

// TestRun_rootless has a process without any rights serve what it may listen on, and complain of nothing afterwards.
func TestRun_rootless(t *testing.T) {
	w := newWorld(t)
	w.inside = []string{"setpriv", "--bounding-set=-all", "--inh-caps=-all"}
	p := w.start("--proxy-mode", "userspace")
	for _, from := range []testbed.Place{testbed.Outside, testbed.Node, "pod-a"} {
		if who := w.probe(from, nodePort); who != "pod-a" && who != "pod-b" {
			t.Errorf("from %s: %s", from, who)
		}
	}
	if made := w.ruleset() + w.routing(); made != "" {
		t.Errorf("in the kernel there is\n%s", made)
	}
	if err := errors.Join(p.Process.Signal(os.Interrupt), p.Wait()); err != nil {
		t.Error(err)
	}
	for len(p.lines) > 0 {
		if line := <-p.lines; strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			t.Error(line)
		}
	}
}
