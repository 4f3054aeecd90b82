package ebpf_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// counted are the rows of the counters, without the tables.
func (c cluster) counted(p dataplane.Dataplane) string {
	c.t.Helper()
	counters, err := p.Counters(c.t.Context())
	check(c.t, err)
	for _, table := range counters.Tables {
		if table.Bytes == 0 && table.Name == "slots" {
			c.t.Errorf("table %s takes no memory", table.Name)
		}
	}
	counters.Tables = nil
	return counters.String()
}

// probe connects n times.
func (c cluster) probe(n int, from testbed.Place, p model.Protocol, to string) {
	c.t.Helper()
	for range n {
		_, err := c.Probe(c.t.Context(), testbed.Probe{
			From: from, Protocol: p, To: netip.MustParseAddrPort(to), Timeout: answerTime,
		})
		check(c.t, err)
	}
}

// The counters hold what backends served and frontends refused, whatever becomes of the tables.
func TestCounters(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	const web = `
backend default/web:http cluster 10.244.1.11:8080 local
backend default/kept:http cluster 10.244.1.12:8080 local
pool default/kept:http cluster affinity 1h0m0s
backend default/web:dns cluster 10.244.1.12:5353 local
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.12:80/tcp any forward default/kept:http cluster snat offcluster
frontend 10.96.0.10:53/udp any forward default/web:dns cluster snat offcluster
frontend 10.96.0.10:81/tcp any reject default/web:admin
guard 10.96.0.0/16 drop
guard 10.96.0.10/32 reject
pods 10.244.0.0/16
`
	before := parse(t, web)
	check(t, p.Sync(t.Context(), before))
	c.probe(3, "client", model.TCP, "10.96.0.10:80")
	c.probe(4, "client", model.TCP, "10.96.0.12:80")
	c.probe(2, testbed.Node, model.UDP, "10.96.0.10:53")
	c.probe(5, "client", model.TCP, "10.96.0.10:81")
	c.probe(6, "client", model.TCP, "10.96.0.10:82")
	want := `served default/kept:http cluster 10.244.1.12:8080 connections 4
served default/web:dns cluster 10.244.1.12:5353 connections 2
served default/web:http cluster 10.244.1.11:8080 connections 3
refused 10.96.0.10 reject 6 no-service-port
refused 10.96.0.10:81/tcp reject 5 no-endpoints
`
	if got := c.counted(p); got != want {
		t.Fatalf("got:\n%swant:\n%s", got, want)
	}
	c.probe(1, "client", model.TCP, "10.96.0.10:80")
	after := parse(t, strings.Replace(web, "web:http cluster 10.244.1.11:8080", "web:http cluster 10.244.2.13:8080", 1))
	check(t, p.Apply(t.Context(), after, model.Diff(before, after)))
	c.probe(1, "client", model.TCP, "10.96.0.10:80")
	check(t, p.Sync(t.Context(), after))
	c.probe(1, "client", model.TCP, "10.96.0.10:80")
	want = strings.Replace(want, "10.244.1.11:8080 connections 3", "gone connections 4\nserved default/web:http "+
		"cluster 10.244.2.13:8080 connections 2", 1)
	if got := c.counted(p); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	last := parse(t, "pods 10.244.0.0/16\n")
	check(t, p.Apply(t.Context(), last, model.Diff(after, last)))
	if got := c.counted(p); strings.Contains(got, "served") {
		t.Error(got)
	}
}

// Whatever is changed at the same time, no connection is counted twice or lost.
func TestCounters_changes(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	state := func(ports int) *model.State {
		text := "pods 10.244.0.0/16\nfrontend 10.96.0.1:80/tcp any forward default/a: cluster snat offcluster\n"
		for i := range ports {
			text += fmt.Sprintf("backend default/a: cluster 10.244.1.11:%d weight %d\n", 8080+i, 1+i)
		}
		return parse(t, text)
	}
	have := state(1)
	check(t, p.Sync(t.Context(), have))
	const probes = 500
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.probe(probes, "client", model.TCP, "10.96.0.1:80")
	}()
	for i := 0; ; i++ {
		want := state(1 + i%3)
		check(t, p.Apply(t.Context(), want, model.Diff(have, want)))
		if have = want; i%100 == 0 {
			check(t, p.Sync(t.Context(), have))
		}
		select {
		case <-done:
		default:
			continue
		}
		break
	}
	counters, err := p.Counters(t.Context())
	check(t, err)
	sum := uint64(0)
	for _, s := range counters.Served {
		sum += s.Connections
	}
	if sum != probes {
		t.Errorf("%d of %d connections were counted:\n%s", sum, probes, counters)
	}
}

// With the scheduler mh a client keeps to a backend, in every process.
func TestMaglev(t *testing.T) {
	c := newCluster(t)
	s := parse(t, strings.Replace(web, "pods 10.244.0.0/16", "pool default/web:http cluster scheduler mh\npods 10.244.0.0/16", 1))
	seen := map[string]bool{}
	for range 3 {
		p := c.open()
		check(t, p.Sync(t.Context(), s))
		c.audited(p, s)
		seen[c.answers("client", model.TCP, "10.96.0.10:80")] = true
		check(t, p.Close())
	}
	if len(seen) != 1 || strings.Contains(fmt.Sprint(seen), ",") {
		t.Error(seen)
	}
}
