package service

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Warnings are probable mistakes in a Service and its slices, though all of it is valid: packets to it, or to one of
// its ports, reach no endpoint. They are no Problems of Update: in a cluster they come and go with the pods.
func Warnings(s *Service, list []*Slice) (all []Problem) {
	add := func(field, format string, args ...any) {
		all = append(all, Problem{Object: "Service " + s.Name.String(), Field: field, Cause: Warning,
			Reason: fmt.Sprintf(format, args...)})
	}
	switch {
	case s.Ignored == NoClusterIP:
		add("spec.clusterIP", "is missing, and no API server gives it one; the Service is not served")
		return all
	case s.Ignored != "":
		return nil
	case len(filled(list)) == 0:
		add("", "has no endpoints; connections are refused")
		return all
	}
	for i := range s.Ports {
		if why := unserved(&s.Ports[i], list); why != "" {
			add(index("spec.ports", i)+".name", "%s; connections are refused", why)
		}
	}
	return all
}

// filled are the slices that count and have endpoints.
func filled(list []*Slice) []*Slice {
	return slices.DeleteFunc(slices.Clone(current(list)), func(s *Slice) bool { return len(s.Endpoints) == 0 })
}

// unserved says that there are endpoints, but none has a port of the Service; empty: one has, or there are none.
func unserved(p *Port, list []*Slice) string {
	list = filled(list)
	if len(list) == 0 || slices.ContainsFunc(list, func(s *Slice) bool { _, ok := s.port(p); return ok }) {
		return ""
	}
	var names []string
	for _, s := range list {
		for _, p := range s.Ports {
			names = append(names, fmt.Sprintf("%q for %s", p.Name, p.Protocol))
		}
	}
	slices.Sort(names)
	have := cmp.Or(strings.Join(slices.Compact(names), ", "), "none")
	return fmt.Sprintf("its EndpointSlices have no port %q for %s, only %s", p.Name, p.Protocol, have)
}
