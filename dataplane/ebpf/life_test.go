package ebpf_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
)

// services are n Services of one backend each, from number first on.
func services(first, n int) string {
	var text strings.Builder
	for i := first; i < first+n; i++ {
		fmt.Fprintf(&text, "frontend 10.96.%d.%d:80/tcp any forward default/s%d:http cluster snat offcluster\n", 1+i/256, i%256, i)
		fmt.Fprintf(&text, "frontend 10.96.%d.%d:53/udp any forward default/s%d:dns cluster snat offcluster\n", 1+i/256, i%256, i)
		fmt.Fprintf(&text, "backend default/s%d:http cluster 10.244.1.11:8080 local\n", i)
		fmt.Fprintf(&text, "backend default/s%d:dns cluster 10.244.1.12:5353 local\n", i)
	}
	return text.String()
}

// Rows that do not fit into the tables find room, and what was there is served as before.
func TestGrows(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	var text string
	have := model.NewState()
	check(t, p.Sync(t.Context(), have))
	for first := 0; first < 3000; first += 500 {
		text += services(first, 500)
		want := parse(t, text+"pods 10.244.0.0/16\n")
		check(t, p.Apply(t.Context(), want, model.Diff(have, want)))
		c.audited(p, want)
		have = want
		for _, i := range []int{0, first, first + 499} {
			c.expect("pod-a source 10.244.1.20", "client", model.TCP, fmt.Sprintf("10.96.%d.%d:80", 1+i/256, i%256))
			c.expect("pod-b source 10.244.1.20", "client", model.UDP, fmt.Sprintf("10.96.%d.%d:53", 1+i/256, i%256))
		}
	}
	empty := model.NewState()
	check(t, p.Apply(t.Context(), empty, model.Diff(have, empty)))
	c.audited(p, empty)
}

// While two Services change their backends all the time, and slots go from one to the other, no connection
// reaches what was never its Service's.
func TestChanges(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	// Each Service has some ports of one pod.
	state := func(a, b int) *model.State {
		text := "pods 10.244.0.0/16\n"
		add := func(name, addr, pod string, ports int) {
			text += fmt.Sprintf("frontend %s:80/tcp any forward default/%s: cluster snat offcluster\n", addr, name)
			for i := range ports {
				text += fmt.Sprintf("backend default/%s: cluster %s:%d weight %d\n", name, pod, 8080+i, 1+i)
			}
		}
		add("a", "10.96.0.1", "10.244.1.11", a)
		add("b", "10.96.0.2", "10.244.1.12", b)
		return parse(t, text)
	}
	have := state(1, 1)
	check(t, p.Sync(t.Context(), have))
	done, failed := make(chan struct{}), make(chan error, 2)
	for to, want := range map[string]string{"10.96.0.1:80": "pod-a", "10.96.0.2:80": "pod-b"} {
		go func() {
			for {
				select {
				case <-done:
					failed <- nil
					return
				default:
				}
				o, err := c.Probe(t.Context(), testbed.Probe{From: "client", To: netip.MustParseAddrPort(to), Timeout: 5 * time.Second})
				if err != nil || o.Backend != want {
					failed <- fmt.Errorf("%s: %s %w", to, o, err)
					return
				}
			}
		}()
	}
	for i := range 3000 {
		want := state(1+i%3, 1+(i+1)%3)
		check(t, p.Apply(t.Context(), want, model.Diff(have, want)))
		have = want
	}
	close(done)
	check(t, errors.Join(<-failed, <-failed))
}

// A client keeps its backend across processes, whatever number of clients they remember.
func TestAffinity(t *testing.T) {
	c := newCluster(t)
	s := parse(t, strings.Replace(web, "pods 10.244.0.0/16", "pool default/web:http cluster affinity 1h0m0s\npods 10.244.0.0/16", 1))
	seen := map[string]bool{}
	for i := range uint32(6) {
		p := c.openSized(ebpf.Sizes{Affinities: 1000 * (1 + i%2)})
		check(t, p.Sync(t.Context(), s))
		c.audited(p, s)
		seen[c.answers("client", model.TCP, "10.96.0.10:80")] = true
		check(t, p.Close())
	}
	if len(seen) != 1 || strings.Contains(fmt.Sprint(seen), ",") {
		t.Error(seen)
	}
}

// Audit finds what somebody has removed, and Sync restores it.
func TestAudit(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	s := parse(t, web)
	check(t, p.Sync(t.Context(), s))
	for _, pin := range []string{"links/connect4", "memory/affinities"} {
		check(t, os.Remove(filepath.Join(c.pins, pin)))
	}
	check(t, os.Mkdir(filepath.Join(c.pins, "v0"), 0o700))
	check(t, os.Mkdir(filepath.Join(c.pins, "memory", "clocks"), 0o700))
	drifts, err := p.Audit(t.Context(), s)
	check(t, err)
	var classes []string
	for _, d := range drifts {
		classes = append(classes, d.Class+" "+filepath.Base(d.Object))
	}
	if !slices.Equal(classes, []string{"programs program at hook connect4", "pins affinities"}) {
		t.Error(drifts)
	}
	check(t, p.Sync(t.Context(), s))
	c.audited(p, s)
	c.expect("pod-b source 10.244.1.20", "client", model.UDP, "10.96.0.10:53")
	for _, name := range []string{"v0", "memory/clocks"} {
		if _, err := os.Stat(filepath.Join(c.pins, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s of another version is left: %v", name, err)
		}
	}
}
