package service

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// A few lines of a Service can mean very many rows: ports × addresses, ports × source ranges, ports × endpoints. What a
// Service needs is counted before it is compiled, in entries, which are some 150 bytes of this process and of the
// kernel each. As many as are in proportion to what its objects say are free. All that goes beyond is taken from a
// node's total, of which each namespace has a fair share (max-min fairness): what one does not use others may, and the
// largest give way first. In a namespace the older Services come first. A Service for which nothing is left is refused
// as a whole, by name.
const (
	frontendEntries = 4  // a row, which a plane keeps with its key
	freeEntries     = 16 // for each port, address, source range and endpoint that the objects name
	sharedEntries   = 1 << 16
	freeAddresses   = 16 // of the node, for each NodePort: their number is not the Service's choice
)

// shares say which Services that need more than is free are served.
type shares struct {
	needs   map[Name]need // of those that need more
	changed bool          // since it was decided last
}

// need is how many entries a Service needs beyond those that are free.
type need struct {
	entries int
	created int64
	served  bool
}

func newShares() shares { return shares{needs: map[Name]need{}} }

// share notes what the Services need that changed, and decides who is served. The others are compiled again if that changes.
func (t *Table) share() {
	for _, e := range t.dirty {
		old, had := t.shares.needs[e.name]
		n := need{entries: t.excess(e.entry)}
		if n.entries <= 0 {
			if had {
				delete(t.shares.needs, e.name)
				t.shares.changed = true
			}
			continue
		}
		if n.created = e.service.Created; !had || old.entries != n.entries || old.created != n.created {
			n.served = old.served
			t.shares.needs[e.name] = n
			t.shares.changed = true
		}
	}
	if t.shares.changed {
		t.shares.changed = false
		for _, name := range t.shares.decide() {
			t.touch(t.entry(name), name)
		}
	}
}

// excess is by how much a Service goes beyond what is free for it, at most.
func (t *Table) excess(e *entry) int {
	s := e.service
	if s == nil || s.Ignored != "" {
		return 0
	}
	ports, nodePorts := len(s.Ports), 0
	for i := range s.Ports {
		if s.Ports[i].NodePort != 0 {
			nodePorts++
		}
	}
	lanes, pools, external := 1, 1, len(s.LoadBalancerIPs)
	if s.ExternalLocal {
		lanes = 2
	}
	if s.ExternalLocal || s.InternalLocal {
		pools = 2
	}
	if t.view.ExternalIPs {
		external += len(s.ExternalIPs)
	}
	stated := ports + len(s.ClusterIPs) + len(s.LoadBalancerIPs) + len(s.ExternalIPs) + len(s.SourceRanges)
	frontends := ports*(len(s.ClusterIPs)+lanes*external) + lanes*nodePorts*max(0, len(t.view.NodePorts)-freeAddresses)
	others := lanes * ports * len(s.LoadBalancerIPs) * len(s.SourceRanges)
	for _, slice := range e.slices {
		stated += len(slice.Ports) + len(slice.Endpoints)
		others += pools * min(ports, len(slice.Ports)) * len(slice.Endpoints)
	}
	return frontendEntries*frontends + others - freeEntries*stated
}

// decide returns the Services that are served from now on and were not, or the other way round. What the shares leave, as
// no Service fits, older ones get that need more.
func (s *shares) decide() (changed []Name) {
	wanted := map[string]int{}
	for name, n := range s.needs {
		wanted[name.Namespace] += n.entries
	}
	names := slices.SortedFunc(maps.Keys(s.needs), func(a, b Name) int {
		return cmp.Or(cmp.Compare(s.needs[a].created, s.needs[b].created),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	share, used, left := fairShare(wanted, sharedEntries), map[string]int{}, sharedEntries
	served := map[Name]bool{}
	for _, name := range names {
		if n := s.needs[name].entries; used[name.Namespace]+n <= share {
			used[name.Namespace] += n
			left -= n
			served[name] = true
		}
	}
	for _, name := range names {
		n := s.needs[name]
		if !served[name] && n.entries <= left {
			left -= n.entries
			served[name] = true
		}
		if served[name] != n.served {
			n.served = served[name]
			s.needs[name] = n
			changed = append(changed, name)
		}
	}
	return changed
}

// fairShare is the most that one of them may have, so that those who want less have what they want, and those who want
// more have the same.
func fairShare(wanted map[string]int, total int) int {
	amounts := make([]int, 0, len(wanted))
	for _, n := range wanted {
		amounts = append(amounts, n)
	}
	slices.Sort(amounts)
	left := total
	for i, n := range amounts {
		if each := left / (len(amounts) - i); n > each {
			return each
		}
		left -= n
	}
	return total
}

// refused says why a Service is not served; nil: it is.
func (s *shares) refused(name Name) *Problem {
	n, ok := s.needs[name]
	if !ok || n.served {
		return nil
	}
	return &Problem{"Service " + name.String(), "spec", fmt.Sprintf(
		"its ports × (addresses + source ranges + endpoints) need %d entries beyond those that are free, which the share of "+
			"namespace %s in the node's %d does not have; the Service is not served: give it fewer ports or addresses, or "+
			"make several Services of it", n.entries, name.Namespace, sharedEntries)}
}

// Refused are the Services that are not served because their namespace's share is used up, sorted.
func (t *Table) Refused() []Name {
	var all []Name
	for name, n := range t.shares.needs {
		if !n.served {
			all = append(all, name)
		}
	}
	slices.SortFunc(all, func(a, b Name) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return all
}
