package userspace

import (
	"context"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Counters implements dataplane.Counted. What is refused are connections that a bound has kept out; the tables are
// what is bounded.
func (p *Plane) Counters(context.Context) (dataplane.Counters, error) {
	var c dataplane.Counters
	if p.proxy == nil {
		return c, nil
	}
	c.Served = p.proxy.rows.served()
	c.Refused = p.proxy.refused()
	c.Tables = []dataplane.Table{
		bounded("connections", p.options.MaxConnections, int(p.proxy.connections.Load())),
		bounded("flows", p.options.MaxFlows, p.proxy.flows.open()),
	}
	c.Sort()
	return c, nil
}

func bounded(name string, capacity, used int) dataplane.Table {
	return dataplane.Table{Name: name, Capacity: uint32(capacity), Used: uint32(used), Counted: true}
}

func (d *directory) served() (out []dataplane.Served) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for id, p := range d.pools {
		p.mu.Lock()
		for backend, n := range p.served {
			out = append(out, dataplane.Served{Pool: id, Backend: backend, Connections: n})
		}
		p.mu.Unlock()
	}
	return out
}

func (p *proxy) refused() (out []dataplane.Refused) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, n := range p.turned {
		verdict := model.Reject
		if key.Protocol == model.UDP {
			verdict = model.Drop
		}
		out = append(out, dataplane.Refused{
			Addr: key.Addr, Port: key.Port, Protocol: key.Protocol, Verdict: verdict, Connections: n,
		})
	}
	return out
}

func (l *flows) open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}
