package service

import (
	"fmt"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Summary is what this node makes of one Service: "fairlead services" prints it.
type Summary struct {
	Service  string        `json:"service"`           // namespace/name
	Ignored  string        `json:"ignored,omitempty"` // why this node does not serve it; empty: it does
	Affinity string        `json:"affinity,omitempty"`
	Ports    []PortSummary `json:"ports"`
	Slices   int           `json:"slices"` // EndpointSlices or Endpoints with endpoints
	Problems []Problem     `json:"problems,omitempty"`
}

// Counted is what the data plane has counted, if it does. The engine fills it in.
type Counted struct {
	Connections uint64 `json:"connections,omitempty"`
	Failed      uint64 `json:"failed,omitempty"` // attempts to connect to backends, in mode userspace
	Bytes       uint64 `json:"bytes,omitempty"`  // both ways
}

// PortSummary is one port of a Service, in both address families.
type PortSummary struct {
	Name      string           `json:"name,omitempty"`
	Port      string           `json:"port"`               // as 80/TCP
	NodePort  uint16           `json:"nodePort,omitempty"` // 0: none
	Unserved  string           `json:"unserved,omitempty"` // why no slice has the port, though there are endpoints
	Addresses []AddressSummary `json:"addresses"`
	Ready     int              `json:"ready"` // endpoints of each state; of the address family that has more
	Draining  int              `json:"draining"`
	Excluded  int              `json:"excluded"`
	Spill     string           `json:"spill,omitempty"` // what part of the zone's connections other zones get, and why
	Endpoints []EndpointState  `json:"endpoints,omitempty"`
	Counted
}

// AddressSummary is an address of a port, and what becomes of packets to it.
type AddressSummary struct {
	At      string `json:"address"`           // with the port
	Kind    string `json:"kind"`              // as "ClusterIP"
	Verdict string `json:"verdict"`           // forward, reject, drop or passthrough; pass: not served, as problems say
	Owner   string `json:"owner,omitempty"`   // the other Service that has it
	Sources int    `json:"sources,omitempty"` // how many ranges of sources may reach it; 0: all clients may
	Source  string `json:"source,omitempty"`  // the first of them
}

// Passthrough is the verdict of an address whose packets routing takes elsewhere, by externalFailoverPolicy.
const Passthrough = "passthrough"

// The states of an endpoint.
const (
	Ready    = "ready"    // takes new connections
	Draining = "draining" // keeps the connections it has
	Out      = "excluded" // gets no connections
)

// EndpointState is an endpoint of a port.
type EndpointState struct {
	At     string `json:"address"` // with the port
	Node   string `json:"node,omitempty"`
	State  string `json:"state"`
	Rule   string `json:"rule,omitempty"`   // why it does not take new connections: one word, as explain has it
	Reason string `json:"reason,omitempty"` // the same for people
	Object string `json:"object"`           // the EndpointSlice or Endpoints that has it
	// Outside is its state for clients from outside of the cluster, where a traffic policy makes a difference.
	Outside string `json:"outside,omitempty"`
	Weight  uint16 `json:"weight,omitempty"`
	Counted
}

// ServiceNames are those of all Services of a namespace (empty: of all), sorted.
func (t *Table) ServiceNames(namespace string) (names []Name) {
	for name, e := range t.entries {
		if e.service != nil && (namespace == "" || name.Namespace == namespace) {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, compareNames)
	return names
}

// Summarise says what this node makes of a Service, with its endpoints or only their numbers. It reads the Table's
// objects and changes nothing.
func (t *Table) Summarise(name Name, endpoints bool) (Summary, bool) {
	e := t.entries[name]
	if e == nil || e.service == nil {
		return Summary{}, false
	}
	s := e.service
	out := Summary{Service: name.String(), Ignored: s.Ignored, Problems: slices.Clone(t.reported[name])}
	if out.Ignored == "" {
		out.Ignored = t.refusal(name)
	}
	if s.Affinity > 0 {
		out.Affinity = s.Affinity.String()
	}
	out.Slices = len(filled(e.slices))
	for i := range s.Ports {
		out.Ports = append(out.Ports, t.summarisePort(e, &s.Ports[i], endpoints))
	}
	return out, true
}

func (t *Table) summarisePort(e *entry, p *Port, endpoints bool) PortSummary {
	out := PortSummary{Name: p.Name, Port: p.String(), NodePort: p.NodePort, Unserved: unserved(p, e.slices)}
	for _, ip := range e.service.ClusterIPs {
		inside, outside := clusterPool, -1 // of clients in the cluster, and of others if there is an address for them
		for _, at := range e.service.addresses(nil, &t.view, p, ip) {
			out.Addresses = append(out.Addresses, t.summariseAddress(e.service, at))
			variants := e.service.variants(nil, &t.view, at)
			switch pool := variants[len(variants)-1].pool; {
			case at.kind == model.ClusterIP:
				inside = pool
			case !at.Addr().IsLoopback():
				outside = pool
			}
		}
		selected := choose(&t.view, e.service, e.service.pool(p, ip),
			t.view.gather(nil, p, current(e.slices), ip.Is4()))
		if selected.hints.spill.is() && inside == clusterPool {
			out.Spill = selected.hints.spill.text(t.view.Zone)
		}
		ready, draining := 0, 0
		for i := range selected.candidates {
			c := &selected.candidates[i]
			switch c.use[inside].state() {
			case Ready:
				ready++
			case Draining:
				draining++
			}
			if endpoints {
				out.Endpoints = append(out.Endpoints, endpointState(&selected, c, inside, outside))
			}
		}
		out.Ready, out.Draining = max(out.Ready, ready), max(out.Draining, draining)
		out.Excluded = max(out.Excluded, len(selected.candidates)-ready-draining)
	}
	return out
}

func (t *Table) summariseAddress(s *Service, at address) AddressSummary {
	out := AddressSummary{At: at.String(), Kind: at.kind.String(), Verdict: model.Pass.String()}
	key := model.Key{Addr: at.Addr(), Port: at.Port(), Protocol: at.port.Protocol}
	row, ok := t.state.Frontends[key]
	if !ok && at.Addr().IsLoopback() {
		key.Scope = model.Internal // NodePorts of loopback addresses have only that one
		row, ok = t.state.Frontends[key]
	}
	if !ok && s.passes(at) {
		out.Verdict = Passthrough
	}
	if !ok {
		return out
	}
	if owner := rowOwner(row.Service); owner != s.Name {
		out.Owner = owner.String()
		return out
	}
	out.Verdict, out.Sources = row.Verdict.String(), len(row.Allow)
	if out.Sources > 0 {
		out.Source = row.Allow[0].String()
	}
	return out
}

// endpointState is the state of a candidate in the pool of clients in the cluster, and in that of others.
func endpointState(s *selection, c *candidate, inside, outside int) EndpointState {
	out := EndpointState{
		At: c.String(), Node: c.endpoint.Node.String(), Object: c.slice.object(),
		State: c.use[inside].state(), Reason: c.reason(inside),
	}
	if out.State == Ready {
		switch out.Weight = s.weight(c, inside); {
		case c.known == nil:
		case c.known.failed > 0:
			out.Reason = s.consequence(c)
		case c.known.fresh:
			out.Reason = fmt.Sprintf("is new: it gets %d sixteenths of its share, and more with time", fullLevel-c.lacks)
		}
	} else {
		out.Rule = c.use[inside].String()
	}
	if outside >= 0 && c.use[outside].state() != out.State {
		out.Outside = c.use[outside].state()
	}
	return out
}

func (u use) state() string {
	switch u {
	case serves:
		return Ready
	case drains, noWeight:
		return Draining
	}
	return Out
}
