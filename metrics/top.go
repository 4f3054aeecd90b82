package metrics

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/component-base/metrics"

	"fairlead.dev/fairlead/dataplane"
)

// top has the series of single ports of Services: of those with the most connections lately, and one of all others
// together. So their number is bounded, whatever the cluster has.
type top struct {
	connections, failed, bytes *metrics.Desc

	limit int // of ports with series of their own
	ports map[string]*port
	rest  dataplane.Sum // of ports, while they had no series of their own
}

// port is a port of a Service.
type port struct {
	name  string        // as rows have it: namespace/name:port
	sum   dataplane.Sum // while it has series
	score float64       // connections, of which older ones count less
	shown bool          // it has series
}

// fade is what remains of a score at the next scrape. A port with series keeps them until another one has keep times as
// much: series do not come and go where many ports have as much.
const (
	fade = 0.9
	keep = 1.5
)

func newTop(s *registry) top {
	return top{
		connections: s.scrapedCounter("fairlead_service_connections_total"),
		failed:      s.scrapedCounter("fairlead_service_failed_dials_total"),
		bytes:       s.scrapedCounter("fairlead_service_bytes_total"),
		ports:       map[string]*port{},
	}
}

// add takes in what each port got since the last time, and chooses the ports with series. Ports that are not there any
// more have none.
func (t *top) add(more map[string]dataplane.Sum) {
	all := make([]*port, 0, len(more))
	for name := range t.ports {
		if _, there := more[name]; !there {
			delete(t.ports, name)
		}
	}
	for name, n := range more {
		p := t.ports[name]
		if p == nil {
			p = &port{name: name}
			t.ports[name] = p
		}
		p.score = fade*p.score + float64(n.Connections+n.Failed)
		all = append(all, p)
	}
	rank := func(p *port) float64 {
		if p.shown {
			return keep * p.score
		}
		return p.score
	}
	slices.SortFunc(all, func(a, b *port) int {
		return cmp.Or(cmp.Compare(rank(b), rank(a)), strings.Compare(a.name, b.name))
	})
	for i, p := range all {
		if p.shown = i < t.limit && p.score > 0; p.shown {
			p.sum = p.sum.Plus(more[p.name])
		} else {
			t.rest = t.rest.Plus(more[p.name])
			p.sum = dataplane.Sum{}
		}
	}
}

func (t *top) collect(to series, traffic bool) {
	if t.limit == 0 {
		return
	}
	show := func(s dataplane.Sum, namespace, service, port string) {
		to.counter(t.connections, s.Connections, namespace, service, port)
		to.counter(t.failed, s.Failed, namespace, service, port)
		if traffic {
			to.counter(t.bytes, s.ToBackend.Bytes, namespace, service, port, "backend")
			to.counter(t.bytes, s.ToClient.Bytes, namespace, service, port, "client")
		}
	}
	for _, p := range t.ports {
		if p.shown {
			service, name, _ := strings.Cut(p.name, ":")
			namespace, service, _ := strings.Cut(service, "/")
			show(p.sum, namespace, service, name)
		}
	}
	show(t.rest, "", "", "")
}
