package service

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"fairlead.dev/fairlead/model"
)

// A few lines of a Service can mean very many rows: ports × addresses, ports × source ranges, ports × endpoints. A
// Service is counted before it is compiled, in entries, which are some 150 bytes of this process and of the kernel
// each. As many as are in proportion to what its objects say are free. All that goes beyond is taken from a node's
// total, of which each namespace has a fair share (max-min fairness). Namespaces may use what others do not, and the
// largest give way first. In a namespace the older Services come first. A Service for which nothing is left is refused
// as a whole, by name. Two more things are shared in the same way. One is listening sockets for health checks, one for
// each port and address of the node. The other is the tables of schedulers that a Service chooses, one for each
// frontend in IPVS.
const (
	frontendEntries = 4  // a row, which a plane keeps with its key
	freeEntries     = 16 // for each port, address, source range and endpoint that the objects name
	sharedEntries   = 1 << 15
	freeAddresses   = 16 // of the node, for each NodePort: their number is not the Service's choice

	sharedListeners = 1 << 11
	sharedTables    = 1 << 11 // each of up to 32 KiB of the kernel's memory (net/netfilter/ipvs/ip_vs_mh.c)
)

// shares say which Services are served of those that need something of which the node has only so much.
type shares struct {
	total   int
	needs   map[Name]need
	changed bool // since it was decided last
}

// need is how much a Service needs.
type need struct {
	amount  int
	created int64
	served  bool
}

func newShares(total int) shares { return shares{total: total, needs: map[Name]need{}} }

// want notes what a Service needs; 0: nothing.
func (s *shares) want(name Name, amount int, created int64) {
	old, had := s.needs[name]
	switch {
	case amount <= 0 && had:
		delete(s.needs, name)
	case amount <= 0 || had && old.amount == amount && old.created == created:
		return
	default:
		s.needs[name] = need{amount, created, old.served}
	}
	s.changed = true
}

// refuses reports whether a Service does not get what it needs.
func (s *shares) refuses(name Name) bool {
	n, ok := s.needs[name]
	return ok && !n.served
}

// share notes what the Services need that changed, and decides which ones are served. Others are compiled again where
// that changes.
func (t *Table) share() {
	for _, e := range t.dirty {
		entries, listeners, tables, created := 0, 0, 0, int64(0)
		if s := e.service; s != nil && s.Ignored == "" {
			entries, listeners, created = t.excess(e.entry), s.listeners(&t.view), s.Created
			if s.Scheduler.hasTable() {
				tables = t.countFrontends(s, 0)
			}
		}
		t.entryShares.want(e.name, entries, created)
		t.listenerShares.want(e.name, listeners, created)
		t.tableShares.want(e.name, tables, created)
	}
	for _, shares := range []*shares{&t.entryShares, &t.listenerShares, &t.tableShares} {
		if shares.changed {
			shares.changed = false
			for _, name := range shares.decide() {
				t.touch(t.entry(name), name)
			}
		}
	}
}

// listeners is how many health checks of a Service count. One at a load balancer's address does not.
func (s *Service) listeners(v *View) (n int) {
	all := s.healthChecks(v)
	if slices.ContainsFunc(all, func(c claimed) bool { return c.at == model.LoadBalancerIP }) {
		return len(all) - 1
	}
	return len(all)
}

// excess is by how much a Service goes beyond what is free for it, at most.
func (t *Table) excess(e *entry) int {
	s := e.service
	ports, pools := len(s.Ports), 1
	if s.ExternalLocal || s.InternalLocal {
		pools = 2
	}
	stated := ports + len(s.ClusterIPs) + len(s.LoadBalancerIPs) + len(s.ExternalIPs) + len(s.SourceRanges)
	others := variants(s) * ports * len(s.LoadBalancerIPs) * len(s.SourceRanges)
	for _, slice := range e.slices {
		stated += len(slice.Ports) + len(slice.Endpoints)
		others += pools * min(ports, len(slice.Ports)) * len(slice.Endpoints)
	}
	return frontendEntries*t.countFrontends(s, freeAddresses) + others - freeEntries*stated
}

// countFrontends is how many a Service has at most. Those of NodePorts do not count on as many addresses of the node as
// are free.
func (t *Table) countFrontends(s *Service, free int) int {
	external, nodePorts := len(s.LoadBalancerIPs), 0
	if t.view.ExternalIPs {
		external += len(s.ExternalIPs)
	}
	for i := range s.Ports {
		if s.Ports[i].NodePort != 0 {
			nodePorts++
		}
	}
	return len(s.Ports)*(len(s.ClusterIPs)+variants(s)*external) + variants(s)*nodePorts*max(0, len(t.view.NodePorts)-free)
}

// variants is how many frontends there are for each address of others: those of clients elsewhere, and of the node's
// own.
func variants(s *Service) int {
	if s.ExternalLocal {
		return 2
	}
	return 1
}

// decide returns the Services that are served from now on and were not, or the other way round. Entries that the shares
// leave, because no Service fits, go to older ones that need more.
func (s *shares) decide() (changed []Name) {
	wanted := map[string]int{}
	for name, n := range s.needs {
		wanted[name.Namespace] += n.amount
	}
	names := slices.SortedFunc(maps.Keys(s.needs), func(a, b Name) int {
		return cmp.Or(cmp.Compare(s.needs[a].created, s.needs[b].created), compareNames(a, b))
	})
	share, used, left := fairShare(wanted, s.total), map[string]int{}, s.total
	served := map[Name]bool{}
	for _, name := range names {
		if n := s.needs[name].amount; used[name.Namespace]+n <= share {
			used[name.Namespace] += n
			left -= n
			served[name] = true
		}
	}
	for _, name := range names {
		n := s.needs[name]
		if !served[name] && n.amount <= left {
			left -= n.amount
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

func compareNames(a, b Name) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// fairShare is the most that one of them may have, so that those that want less have what they want, and those that
// want more have the same.
func fairShare(wanted map[string]int, total int) int {
	left := total
	for i, n := range slices.Sorted(maps.Values(wanted)) {
		if each := left / (len(wanted) - i); n > each {
			return each
		}
		left -= n
	}
	return total
}

// refusal says why a Service is not served; empty: it is.
func (t *Table) refusal(name Name) string {
	if !t.entryShares.refuses(name) {
		return ""
	}
	return fmt.Sprintf("its ports × (addresses + source ranges + endpoints) need %d entries more than the share of "+
		"namespace %s in the node's %d has free; the Service is not served: give it fewer ports or "+
		"addresses, or make several Services of it", t.entryShares.needs[name].amount, name.Namespace, sharedEntries)
}

// Refused are the Services that are not served because their namespace's share is used up, sorted.
func (t *Table) Refused() []Name {
	names := slices.SortedFunc(maps.Keys(t.entryShares.needs), compareNames)
	return slices.DeleteFunc(names, func(name Name) bool { return !t.entryShares.refuses(name) })
}
