package relay

import (
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/share"
	"fairlead.dev/fairlead/model"
)

// Counters are for dataplane.Observed. Refused are connections that a bound has kept out. Tables are the bounded
// resources.
func (p *Proxy) Counters() (c dataplane.Counters) {
	c.Connections, c.Traffic, c.Served = true, true, p.Rows.served()
	c.Refused = p.turned.refused()
	connections, flows := p.connections.Used(), p.flows.places.Used()
	c.Tables = []dataplane.Table{
		{Name: tooManyConnections, Capacity: uint32(p.options.MaxConnections), Used: uint32(connections), Counted: true},
		{Name: tooManyFlows, Capacity: uint32(p.options.MaxFlows), Used: uint32(flows), Counted: true},
		{Name: tooManyFiles, Capacity: uint32(share.Files())},
		{Name: tooManyDatagrams, Capacity: maxWaiting},
	}
	for i := range c.Tables {
		p.turned.report(&c.Tables[i])
	}
	c.Dials = &dataplane.Dials{Retried: p.retried.Load(), Unanswered: p.unanswered.Load()}
	for _, s := range c.Served {
		c.Dials.Failed += s.Failed
	}
	c.Sort()
	return c
}

// These names of the bounds are reasons why a connection is refused.
const (
	tooManyConnections = "connections"
	tooManyFlows       = "flows"
	tooManyFiles       = "files"
	tooManyDatagrams   = "datagrams" // that wait for their turn at one socket, in bytes
)

func (d *Directory) served() (out []dataplane.Served) {
	d.eachPool(func(p *pool) {
		for backend, n := range p.served {
			row := dataplane.Served{Pool: p.id, Backend: backend}
			row.Connections, row.Failed = n.connections, n.failed
			row.ToBackend, row.ToClient = traffic(&n.ToBackend), traffic(&n.ToClient)
			if n.connections+n.failed > 0 { // else it is being asked
				out = append(out, row)
			}
		}
	})
	return out
}

func traffic(s *socket.Sum) dataplane.Traffic {
	return dataplane.Traffic{Packets: s.Packets.Load(), Bytes: s.Bytes.Load()}
}

// report adds to what there is of a bound how many connections it has kept out, and ended.
func (t *turnedAway) report(bound *dataplane.Table) {
	t.mu.Lock()
	defer t.mu.Unlock()
	bound.Full, bound.Evictions = t.kept[bound.Name], t.ended[bound.Name]
}

func (t *turnedAway) refused() (out []dataplane.Refused) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, n := range t.byRow {
		verdict := model.Reject
		if key.Protocol == model.UDP {
			verdict = model.Drop
		}
		out = append(out, dataplane.Refused{
			Addr: key.Addr, Port: key.Port, Protocol: key.Protocol, Verdict: verdict,
			Reason: dataplane.TableFull, Connections: n,
		})
	}
	return out
}
