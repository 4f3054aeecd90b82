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

	served map[model.PoolID]dataplane.Sum // when it was asked last
	total  dataplane.Sum
	top    top
	last   dataplane.Counters
	again  time.Time // when it is asked again
}

func newPlane(s *registry) plane {
	return plane{
		connections: s.scrapedCounter("fairlead_served_connections_total"),
		packets:     s.scrapedCounter("fairlead_served_packets_total"),
		bytes:       s.scrapedCounter("fairlead_served_bytes_total"),
		refused:     s.scrapedCounter("fairlead_refused_connections_total"),
		capacity:    s.scraped("fairlead_table_capacity"),
		used:        s.scraped("fairlead_table_used"),
		full:        s.scrapedCounter("fairlead_table_full_total"),
		evictions:   s.scrapedCounter("fairlead_table_evictions_total"),
		failed:      s.scrapedCounter("fairlead_failed_dials_total"),
		retried:     s.scrapedCounter("fairlead_retried_connections_total"),
		unanswered:  s.scrapedCounter("fairlead_unanswered_connections_total"),
		memory:      s.scraped("fairlead_table_bytes"),
		served:      map[model.PoolID]dataplane.Sum{},
		top:         newTop(s),
	}
}

// collect asks the plane, between two batches. If the engine does not answer in time, it tells what it heard last.
func (p *plane) collect(ctx context.Context, e Engine, to series) {
	c, err := p.ask(ctx, e)
	if err != nil && !c.Connections { // nothing was counted yet
		return
	}
	p.add(c.Served)
	if c.Connections {
		p.top.collect(to, c.Traffic)
		to.counter(p.connections, p.total.Connections)
	}
	if d := c.Dials; d != nil {
		to.counter(p.failed, d.Failed)
		to.counter(p.retried, d.Retried)
		to.counter(p.unanswered, d.Unanswered)
	}
	if c.Traffic {
		to.counter(p.packets, p.total.ToBackend.Packets, "backend")
		to.counter(p.packets, p.total.ToClient.Packets, "client")
		to.counter(p.bytes, p.total.ToBackend.Bytes, "backend")
		to.counter(p.bytes, p.total.ToClient.Bytes, "client")
	}
	for why, n := range refusedWhy(c.Refused) {
		to.counter(p.refused, n, why.verdict.String(), string(why.reason))
	}
	for _, t := range c.Tables {
		to.gauge(p.capacity, float64(t.Capacity), t.Name)
		if t.Counted {
			to.gauge(p.used, float64(t.Used), t.Name)
		}
		if t.Bytes > 0 {
			to.gauge(p.memory, float64(t.Bytes), t.Name)
		}
		if c.Dials != nil {
			to.counter(p.full, t.Full, t.Name)
			to.counter(p.evictions, t.Evictions, t.Name)
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
// meanwhile. Beside an error there is the last answer, too.
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
	return p.last, err
}

// add adds what was counted since the last time.
func (p *plane) add(served []dataplane.Served) {
	now := map[model.PoolID]dataplane.Sum{}
	for _, s := range served {
		now[s.Pool] = now[s.Pool].Plus(s.Sum)
	}
	ports := map[string]dataplane.Sum{}
	for id, n := range now {
		more := since(p.served[id], n)
		p.total = p.total.Plus(more)
		ports[id.Service] = ports[id.Service].Plus(more)
	}
	p.top.add(ports)
	p.served = now
}

// since is what was added to a sum. A number that is smaller than before has begun anew.
func since(had, has dataplane.Sum) dataplane.Sum {
	has = has.Max(had)
	return dataplane.Sum{
		Connections: has.Connections - had.Connections, Failed: has.Failed - had.Failed,
		ToBackend: dataplane.Traffic{
			Packets: has.ToBackend.Packets - had.ToBackend.Packets, Bytes: has.ToBackend.Bytes - had.ToBackend.Bytes,
		},
		ToClient: dataplane.Traffic{
			Packets: has.ToClient.Packets - had.ToClient.Packets, Bytes: has.ToClient.Bytes - had.ToClient.Bytes,
		},
	}
}
