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

	bpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
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
	stop := c.probing("client", map[string]string{"10.96.0.1:80": "pod-a", "10.96.0.2:80": "pod-b"})
	for i := range 3000 {
		want := state(1+i%3, 1+(i+1)%3)
		check(t, p.Apply(t.Context(), want, model.Diff(have, want)))
		have = want
	}
	check(t, stop())
}

// probing connects to addresses, one connection after the other to each, until it is stopped. It reports what did not
// reach the pod that is named.
func (c cluster) probing(from testbed.Place, pods map[string]string) (stop func() error) {
	done, failed := make(chan struct{}), make(chan error, len(pods))
	for to, want := range pods {
		go func() {
			for {
				select {
				case <-done:
					failed <- nil
					return
				default:
				}
				o, err := c.Probe(c.t.Context(), testbed.Probe{From: from, To: netip.MustParseAddrPort(to), Timeout: answerTime})
				if err != nil || o.Backend != want {
					failed <- fmt.Errorf("%s: %s %w", to, o, err)
					return
				}
			}
		}()
	}
	return func() error {
		close(done)
		var errs []error
		for range pods {
			errs = append(errs, <-failed)
		}
		return errors.Join(errs...)
	}
}

// Sync has the programs read other tables, and no connection meets a part of each, or nothing. The programs stay.
func TestSyncs(t *testing.T) {
	c := newCluster(t)
	// Clients that reset a connection leave its flow for 10 s. On a slow machine probes make more than the usual table holds.
	p := c.openAs(ebpf.Options{Sizes: ebpf.Sizes{Translations: 1 << 17}})
	defer p.Close()
	const rows = `
frontend 10.96.0.1:80/tcp any forward default/a: cluster snat offcluster
frontend 10.96.0.2:80/tcp any forward default/b: cluster snat offcluster
frontend 192.0.2.1:30001/tcp any forward default/a: cluster snat offcluster
frontend 192.0.2.1:30002/tcp any forward default/b: cluster snat offcluster
backend default/a: cluster 10.244.1.11:8080 local
backend default/b: cluster 10.244.1.12:8080 local
pods 10.244.0.0/16
`
	states := []*model.State{parse(t, rows), parse(t, rows+services(0, 50))} // pools get other numbers
	check(t, p.Sync(t.Context(), states[0]))
	programs := c.programs()
	inside := c.probing("client", map[string]string{"10.96.0.1:80": "pod-a", "10.96.0.2:80": "pod-b"})
	outside := c.probing(testbed.Outside, map[string]string{"192.0.2.1:30001": "pod-a", "192.0.2.1:30002": "pod-b"})
	for i := range 30 {
		s := states[i%2]
		check(t, p.Sync(t.Context(), s))
		c.audited(p, s)
	}
	check(t, errors.Join(inside(), outside()))
	if now := c.programs(); now != programs {
		t.Errorf("other programs than before:\n%s\nand now:\n%s", programs, now)
	}
}

// programs are those that links have, by their numbers.
func (c cluster) programs() string {
	c.t.Helper()
	links, err := filepath.Glob(filepath.Join(c.pins, "links", "*"))
	check(c.t, err)
	var lines []string
	for _, path := range links {
		l, err := link.LoadPinnedLink(path, nil)
		check(c.t, err)
		info, err := l.Info()
		check(c.t, errors.Join(err, l.Close()))
		lines = append(lines, fmt.Sprintf("%s %d", filepath.Base(path), info.Program))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// A client keeps its backend across processes, whatever number of clients they remember.
func TestAffinity(t *testing.T) {
	c := newCluster(t)
	s := parse(t, strings.Replace(web, "pods 10.244.0.0/16", "pool default/web:http cluster affinity 1h0m0s\npods 10.244.0.0/16", 1))
	seen := map[string]bool{}
	for i := range uint32(6) {
		p := c.openSized(ebpf.Sizes{Affinities: 1 << (16 + i%2)})
		check(t, p.Sync(t.Context(), s))
		c.audited(p, s)
		seen[c.answers("client", model.TCP, "10.96.0.10:80")] = true
		check(t, p.Close())
	}
	if len(seen) != 1 || strings.Contains(fmt.Sprint(seen), ",") {
		t.Error(seen)
	}
}

// A process was killed when it had pinned a map beside the former one: the next one takes its own.
func TestAffinity_killed(t *testing.T) {
	c := newCluster(t)
	s := parse(t, web)
	p := c.openSized(ebpf.Sizes{Affinities: 1 << 16})
	check(t, p.Sync(t.Context(), s))
	check(t, p.Close())
	path := filepath.Join(c.pins, "memory", "affinities")
	m, err := bpf.LoadPinnedMap(path, nil)
	check(t, err)
	same, err := m.Clone()
	check(t, err)
	check(t, errors.Join(same.Pin(path+"_new"), same.Close(), m.Close()))
	p = c.openSized(ebpf.Sizes{Affinities: 1 << 17})
	defer p.Close()
	check(t, p.Sync(t.Context(), s))
	c.audited(p, s)
	m, err = bpf.LoadPinnedMap(path, nil)
	check(t, err)
	defer m.Close()
	if n := m.MaxEntries(); n != 1<<17 {
		t.Errorf("the next process finds a map of %d", n)
	}
}

// However small tables shall be, those that forget have room for what each processor puts by.
func TestSizes_processors(t *testing.T) {
	c := newCluster(t)
	p := c.openSized(ebpf.Sizes{Flows: 1})
	defer p.Close()
	check(t, p.Sync(t.Context(), parse(t, web)))
	for _, name := range []string{"flows", "refusals"} {
		m, err := bpf.LoadPinnedMap(filepath.Join(c.pins, "memory", name), nil)
		check(t, err)
		if n, least := m.MaxEntries(), uint32(256*bpf.MustPossibleCPU()); n < least {
			t.Errorf("%s has %d elements, less than %d", name, n, least)
		}
		check(t, m.Close())
	}
}

// Audit finds what another program has removed, and Sync restores it.
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
	report, err := p.Audit(t.Context(), s, dataplane.Quick)
	check(t, err)
	var classes []string
	for _, d := range report.Drifts {
		classes = append(classes, d.Class+" "+filepath.Base(d.Object))
	}
	if !slices.Equal(classes, []string{"programs program at hook connect4", "pins affinities"}) {
		t.Error(report.Drifts)
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
