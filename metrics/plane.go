package metrics

import (
	"context"
	"time"

	"k8s.io/component-base/metrics"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
)

// plane are the sums of what the data plane has counted, if it counts. Those of Services that are gone stay in them.
type plane struct {
	connections, packets, bytes, refused *metrics.Desc
	capacity, used, memory               *metrics.Desc
	full, evictions                      *metrics.Desc
	failed, retried, unanswered          *metrics.Desc

	served map[model.PoolID]sums // when it was asked last
	total  sums
	top    top
	last   dataplane.Counters
	again  time.Time // when it is asked again
}

// sums are of a pool, of a port of a Service, or of all.
type sums struct {
	connections, failed uint64
	toBackend, toClient dataplane.Traffic
}

func newPlane(s *registry) plane {
	const only, carried = " Data plane ebpf only.", " Data plane userspace only."
	const most = " Modes nftables and iptables count them if counters is backends."
	const seen = "; in mode ebpf of those that programs at devices translated, in mode userspace without headers." + most
	return plane{
		connections: s.scrapedCounter(fairlead("served_connections_total",
			"Connections that got a backend. Modes nftables and iptables count them unless counters is off.")),
		packets: s.scrapedCounter(fairlead("served_packets_total",
			"Packets of connections to backends, by destination; in mode ebpf those that programs at devices translated, "+
				"in mode userspace datagrams."+most, "to")),
		bytes: s.scrapedCounter(fairlead("served_bytes_total",
			"Bytes of packets of connections to backends, by destination"+seen, "to")),
		refused: s.scrapedCounter(fairlead("refused_connections_total",
			"Connections that were refused or dropped (for packets, each attempt), by verdict and reason: no-endpoints, "+
				"no-local-endpoints, source-not-allowed, no-service-port, and table-full in mode userspace.",
			"verdict", "reason")),
		capacity: s.scraped(fairlead("table_capacity", "Capacity of a table: elements in the kernel (data plane ebpf); "+
			"connections, UDP flows and files that may be open, and bytes of datagrams that may wait (userspace).",
			"table")),
		used: s.scraped(fairlead("table_used", "Elements in use in a table that can be full: translations and affinities "+
			"(data plane ebpf), connections and flows (userspace).", "table")),
		full: s.scrapedCounter(fairlead("table_full_total",
			"Connections that were refused, and datagrams that were dropped, because a table was full and the client had "+
				"its share."+carried, "table")),
		evictions: s.scrapedCounter(fairlead("table_evictions_total",
			"Connections that were reset because a table was full and the client had more than its share."+carried,
			"table")),
		failed: s.scrapedCounter(fairlead("failed_dials_total",
			"Attempts to connect that a backend refused or did not answer."+carried)),
		retried: s.scrapedCounter(fairlead("retried_connections_total",
			"Connections that a further backend answered after one had not."+carried)),
		unanswered: s.scrapedCounter(fairlead("unanswered_connections_total",
			"Connections that were reset because no backend answered."+carried)),
		memory: s.scraped(fairlead("table_bytes", "Memory of a table in the kernel."+only, "table")),
		served: map[model.PoolID]sums{},
		top:    newTop(s),
	}
}

func (p *plane) describe(to chan<- *metrics.Desc) {
	for _, d := range []*metrics.Desc{
		p.connections, p.packets, p.bytes, p.refused, p.capacity, p.used, p.memory, p.full, p.evictions,
		p.failed, p.retried, p.unanswered,
	} {
		to <- d
	}
	p.top.describe(to)
}

// collect asks the plane, between two batches, if the engine answers in time.
func (p *plane) collect(ctx context.Context, e Engine, to chan<- metrics.Metric) {
	c, err := p.ask(ctx, e)
	if err != nil {
		return
	}
	p.add(c.Served)
	counter := func(d *metrics.Desc, value uint64, labels ...string) {
		to <- metrics.NewLazyConstMetric(d, metrics.CounterValue, float64(value), labels...)
	}
	if c.Connections {
		p.top.collect(to, c.Traffic)
		counter(p.connections, p.total.connections)
	}
	if d := c.Dials; d != nil {
		counter(p.failed, d.Failed)
		counter(p.retried, d.Retried)
		counter(p.unanswered, d.Unanswered)
	}
	if c.Traffic {
		counter(p.packets, p.total.toBackend.Packets, "backend")
		counter(p.packets, p.total.toClient.Packets, "client")
		counter(p.bytes, p.total.toBackend.Bytes, "backend")
		counter(p.bytes, p.total.toClient.Bytes, "client")
	}
	for why, n := range refusedWhy(c.Refused) {
		counter(p.refused, n, why.verdict.String(), string(why.reason))
	}
	for _, t := range c.Tables {
		to <- metrics.NewLazyConstMetric(p.capacity, metrics.GaugeValue, float64(t.Capacity), t.Name)
		if t.Counted {
			to <- metrics.NewLazyConstMetric(p.used, metrics.GaugeValue, float64(t.Used), t.Name)
		}
		if t.Bytes > 0 {
			to <- metrics.NewLazyConstMetric(p.memory, metrics.GaugeValue, float64(t.Bytes), t.Name)
		}
		if c.Dials != nil {
			counter(p.full, t.Full, t.Name)
			counter(p.evictions, t.Evictions, t.Name)
		}
	}
}

type why struct {
	verdict model.Verdict
	reason  dataplane.Reason
}

// refusedWhy adds up by verdict and reason. Reasons of all planes are there from the start, as 0.
func refusedWhy(all []dataplane.Refused) map[why]uint64 {
	sums := map[why]uint64{
		{model.Reject, dataplane.NoEndpoints}: 0, {model.Reject, dataplane.NoServicePort}: 0,
		{model.Drop, dataplane.NoLocalEndpoints}: 0, {model.Drop, dataplane.SourceNotAllowed}: 0,
		{model.Drop, dataplane.NoServicePort}: 0,
	}
	for _, r := range all {
		sums[why{r.Verdict, r.Reason}] += r.Connections
	}
	return sums
}

// share is which part of the time the engine may take for answers: one in so many.
const share = 100

// ask asks the plane. Of a large plane it gives the last answer again for some time, as the engine does nothing else
// meanwhile.
func (p *plane) ask(ctx context.Context, e Engine) (dataplane.Counters, error) {
	if time.Now().Before(p.again) {
		return p.last, nil
	}
	var c dataplane.Counters
	var took time.Duration
	err := e.Do(ctx, func(ctx context.Context, v engine.View) (err error) {
		start := time.Now()
		c, err = v.Plane.Counters(ctx)
		took = time.Since(start)
		return err
	})
	if err == nil {
		p.last, p.again = c, time.Now().Add(share*took)
	}
	return c, err
}

// add adds what was counted since the last time.
func (p *plane) add(served []dataplane.Served) {
	now := map[model.PoolID]sums{}
	for _, s := range served {
		sum := now[s.Pool]
		sum.add(sums{s.Connections, s.Failed, s.ToBackend, s.ToClient})
		now[s.Pool] = sum
	}
	ports := map[string]sums{}
	for id, n := range now {
		more := n.since(p.served[id])
		p.total.add(more)
		port := ports[id.Service]
		port.add(more)
		ports[id.Service] = port
	}
	p.top.add(ports)
	p.served = now
}

func (s *sums) add(more sums) {
	s.connections += more.connections
	s.failed += more.failed
	s.toBackend.Packets += more.toBackend.Packets
	s.toBackend.Bytes += more.toBackend.Bytes
	s.toClient.Packets += more.toClient.Packets
	s.toClient.Bytes += more.toClient.Bytes
}

// since is what was added to sums.
func (s sums) since(had sums) sums {
	traffic := func(had, has dataplane.Traffic) dataplane.Traffic {
		return dataplane.Traffic{Packets: since(had.Packets, has.Packets), Bytes: since(had.Bytes, has.Bytes)}
	}
	return sums{
		since(had.connections, s.connections), since(had.failed, s.failed),
		traffic(had.toBackend, s.toBackend), traffic(had.toClient, s.toClient),
	}
}

// since is what was added to a sum. One that is smaller than before has begun anew.
func since(had, has uint64) uint64 { return max(had, has) - had }
