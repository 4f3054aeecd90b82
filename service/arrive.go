package service

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// arrive forgets backends that are no endpoints any more. If the Service has the annotation slow-start, ready endpoints
// that were not ready before begin with a small share. The first that a Table knows of do not: after a restart all are
// unknown, and where all are new none would have more than the others.
func (t *Table) arrive(s *Service, id model.PoolID, candidates []candidate) {
	for at := range t.ports[id] {
		_, found := slices.BinarySearchFunc(candidates, at, func(c candidate, a netip.AddrPort) int { return c.Compare(a) })
		if !found {
			delete(t.ports[id], at)
		}
	}
	if !s.slowly() {
		delete(t.present, id)
		return
	}
	before, now := t.present[id], make([]netip.AddrPort, 0, len(candidates))
	var fresh []netip.AddrPort
	for i := range candidates {
		c := &candidates[i]
		if !c.endpoint.takes() || i > 0 && candidates[i-1].AddrPort == c.AddrPort {
			continue
		}
		now = append(now, c.AddrPort)
		if _, found := slices.BinarySearchFunc(before, c.AddrPort, netip.AddrPort.Compare); !found {
			fresh = append(fresh, c.AddrPort)
		}
	}
	t.present[id] = now
	if len(fresh) == 0 || len(fresh) == len(now) {
		return
	}
	p := t.port(id)
	for _, at := range fresh {
		if b := p[at]; b == nil || b.level == fullLevel { // else it has failed, and has less than its share
			p[at] = &backendHealth{level: slowLevel, fresh: true}
		}
	}
}

// fresh is how many backends of a pool have a smaller share because they are new.
func (s *selection) fresh(pool int) (n int) {
	for i := range s.candidates {
		if c := &s.candidates[i]; c.use[pool] == serves && c.lacks > 0 && c.known.fresh {
			n++
		}
	}
	return n
}

// slowly reports whether new endpoints begin with a small share. The configured time alone does not count: it is for
// backends that have failed.
func (s *Service) slowly() bool { return s != nil && s.slow > 1 }

// forgetPresent forgets the endpoints of ports that a Service has no more.
func (t *Table) forgetPresent(old, s *Service) {
	if !old.slowly() {
		return
	}
	for i := range old.Ports {
		name := old.Ports[i].Name
		if s == nil || !slices.ContainsFunc(s.Ports, func(p Port) bool { return p.Name == name }) {
			id := model.PoolID{Service: portName(old.Name, name)}
			delete(t.present, id)
			id.V6 = true
			delete(t.present, id)
		}
	}
}

// port finds or makes what is known of a Service's port.
func (t *Table) port(id model.PoolID) portHealth {
	if t.ports[id] == nil {
		t.ports[id] = portHealth{}
	}
	return t.ports[id]
}
