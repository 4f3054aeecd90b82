package userspace

import (
	"context"
	"math"

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
	c.Refused = p.proxy.turned.refused()
	connections, flows := int(p.proxy.connections.Load()), p.proxy.flows.open()
	c.Tables = []dataplane.Table{
		{Name: tooManyConnections, Capacity: uint32(p.options.MaxConnections), Used: uint32(connections), Counted: true},
		{Name: tooManyFlows, Capacity: uint32(p.options.MaxFlows), Used: uint32(flows), Counted: true},
		{Name: tooManyFiles, Capacity: uint32(min(maxFiles(), math.MaxUint32))},
	}
	for i := range c.Tables {
		c.Tables[i].Full = p.proxy.turned.full(c.Tables[i].Name)
	}
	c.Dials = &dataplane.Dials{Rescued: p.proxy.rescued.Load(), Lost: p.proxy.lost.Load()}
	for _, s := range c.Served {
		c.Dials.Failed += s.Failed
	}
	c.Sort()
	return c, nil
}

// What keeps a connection out, by the names of the bounds.
const (
	tooManyConnections = "connections"
	tooManyFlows       = "flows"
	tooManyFiles       = "files"
)

func (d *directory) served() (out []dataplane.Served) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for id, p := range d.pools {
		p.mu.Lock()
		for backend, n := range p.served {
			out = append(out, dataplane.Served{Pool: id, Backend: backend, Connections: n.connections, Failed: n.failed})
		}
		p.mu.Unlock()
	}
	return out
}

// full is how many connections a bound has kept out.
func (t *turnedAway) full(bound string) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.totals[bound]
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
