package service

import (
	"net/netip"
	"slices"
)

// barrierAnnotation on a Service has each node confirm that endpoints which terminate get no new connections from it.
const barrierAnnotation = "fairlead.dev/drain-barrier" // true or false

// Barrier is what a node confirms of the Services with that annotation.
type Barrier struct {
	Services int    // so many have it
	Ended    uint64 // resourceVersion of their newest EndpointSlice with terminating endpoints; 0: there is none
	// Used are the terminating endpoints that still get new connections, or a namespace that has many. Sorted.
	Used []string
}

// barrier is what a Service adds to that.
type barrier struct {
	used  []netip.Addr // terminating endpoints that get new connections
	ended uint64       // as in Barrier
}

// maxUsed is how many endpoints of a namespace Used names, as all nodes write it. Beyond that a namespace only blocks
// itself.
const maxUsed = 16

// Barrier is that of the State.
func (t *Table) Barrier() Barrier {
	b := Barrier{Services: len(t.barriers)}
	of := map[string][]string{}
	for name, one := range t.barriers {
		b.Ended = max(b.Ended, one.ended)
		for _, a := range one.used {
			of[name.Namespace] = append(of[name.Namespace], a.String())
		}
	}
	for namespace, all := range of {
		slices.Sort(all) // each is there once for each port
		if all = slices.Compact(all); len(all) > maxUsed {
			all = []string{namespace}
		}
		b.Used = append(b.Used, all...)
	}
	slices.Sort(b.Used)
	b.Used = slices.Compact(b.Used)
	return b
}

// keepBarrier notes what a compiled Service adds.
func (t *Table) keepBarrier(e named, rows *Rows) {
	if e.service == nil || !e.service.Barrier || e.service.Ignored != "" {
		delete(t.barriers, e.name)
		return
	}
	b := barrier{used: slices.Clone(rows.used)}
	for _, s := range e.slices {
		if s.Ends() {
			b.ended = max(b.ended, s.Version)
		}
	}
	t.barriers[e.name] = b
}

// Ends reports whether an endpoint of the slice terminates.
func (s *Slice) Ends() bool {
	return slices.ContainsFunc(s.Endpoints, func(e Endpoint) bool { return e.Terminating })
}

// Ending is what is known of an address as that of an endpoint.
type Ending struct {
	Addr     netip.Addr
	Services []Name // with the annotation, that have it; none: there are none
	Version  uint64 // of the newest EndpointSlice that says it terminates
	All      bool   // all of them say so
}

// In reports whether it is among what a node still uses, as in Barrier.Used.
func (e Ending) In(used []string) bool {
	return slices.ContainsFunc(used, func(name string) bool {
		return name == e.Addr.String() || slices.ContainsFunc(e.Services, func(s Name) bool { return name == s.Namespace })
	})
}

// HasBarrier reports whether there is such a Service, with the annotation.
func (t *Table) HasBarrier(name Name) bool {
	_, has := t.barriers[name]
	return has
}

// Ending looks an address up.
func (t *Table) Ending(a netip.Addr) Ending {
	found := Ending{Addr: a, All: true}
	for name := range t.barriers {
		for _, s := range t.entries[name].slices {
			for i := range s.Endpoints {
				e := &s.Endpoints[i]
				if e.Addr != a {
					continue
				}
				found.Services = append(found.Services, name)
				if found.All = found.All && e.Terminating; e.Terminating {
					found.Version = max(found.Version, s.Version)
				}
			}
		}
	}
	return found
}

// ending appends the terminating endpoints that take connections in a pool that is used.
func (s *selection) ending(all []netip.Addr, used [2]bool) []netip.Addr {
	for i := range s.candidates {
		c := &s.candidates[i]
		takes := used[clusterPool] && c.use[clusterPool] == serves || used[localPool] && c.use[localPool] == serves
		if c.endpoint.Terminating && takes {
			all = append(all, c.Addr())
		}
	}
	return all
}
