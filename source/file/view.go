package file

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// view is what all files say together.
type view struct {
	services map[service.Name]*service.Service
	slices   map[service.Name]*service.Slice
	node     *service.Node
	cidrs    []netip.Prefix
	skipped  map[string]int // objects of other kinds

	wrong      map[string]bool // objects that have problems
	twice      []object        // found more than once
	duplicates []service.Problem

	workloads map[string][]*workload // by namespace
	wanting   []place                // Services
	warned    []service.Problem
	places    map[service.Problem]place // of those
}

// newView puts the files together, in order: of an object that is in two of them, the last one wins.
// Endpoints count only for Services without an EndpointSlice: a cluster has both for the same pods.
func newView(files []*file) *view {
	v := &view{
		services: map[service.Name]*service.Service{},
		slices:   map[service.Name]*service.Slice{},
		skipped:  map[string]int{},
		wrong:    map[string]bool{},

		workloads: map[string][]*workload{},
	}
	var old []*service.Slice
	for _, f := range files {
		for i := range f.contents {
			c := &f.contents[i]
			for _, o := range c.objects {
				if o.wrong != "" {
					v.wrong[o.wrong] = true
				}
				if e, ok := o.value.([]*service.Slice); ok {
					old = append(old, e...)
				} else {
					v.add(o)
				}
				if o.wants != nil {
					v.wanting = append(v.wanting, place{f, c, o})
				}
			}
		}
	}
	v.cidrs = model.Disjoint(v.cidrs)
	v.addEndpoints(old)
	v.reportTwice(files)
	return v
}

func (v *view) add(o object) {
	known := false
	switch value := o.value.(type) {
	case *service.Service:
		_, known = v.services[o.name]
		v.services[o.name] = value
	case *service.Slice:
		if value != nil { // of no concern to a proxy
			_, known = v.slices[o.name]
			v.slices[o.name] = value
		}
	case *service.Node:
		known = v.node != nil
		v.node = value
	case []netip.Prefix:
		v.cidrs = append(v.cidrs, value...)
	case *workload:
		v.skipped[o.kind]++
		v.workloads[o.name.Namespace] = append(v.workloads[o.name.Namespace], value)
	case nil:
		v.skipped[o.kind]++
	}
	if known {
		v.twice = append(v.twice, o)
	}
}

func (v *view) addEndpoints(old []*service.Slice) {
	sliced := make(map[service.Name]bool, len(v.slices))
	for name, s := range v.slices {
		sliced[service.Name{Namespace: name.Namespace, Name: s.Service}] = true
	}
	for _, s := range old {
		if !sliced[service.Name{Namespace: s.Name.Namespace, Name: s.Service}] {
			v.slices[s.Name] = s
		}
	}
}

// maxDuplicates bounds what a file and its backup in the same directory make of the log.
const maxDuplicates = 20

// reportTwice reports each object that is in several places, and where.
func (v *view) reportTwice(files []*file) {
	report := func(object, format string, args ...any) {
		v.duplicates = append(v.duplicates, service.Problem{Object: object, Reason: fmt.Sprintf(format, args...)})
	}
	for i, o := range v.twice {
		if i == maxDuplicates {
			report("manifests", "%d more objects are defined more than once", len(v.twice)-i)
			return
		}
		var places []string
		for _, f := range files {
			if f.has(o) {
				places = append(places, f.path)
			}
		}
		report(o.String(), "is defined more than once, in %s; the last one is used", strings.Join(places, " and "))
	}
}

// batch is the difference from an earlier view.
func (v *view) batch(old *view) service.Batch {
	if v == old {
		return service.Batch{}
	}
	b := service.Batch{
		Services: changed(old.services, v.services),
		Slices:   changed(old.slices, v.slices),
	}
	switch {
	case v.node != nil && !reflect.DeepEqual(old.node, v.node):
		b.Node = v.node
	case v.node == nil && old.node != nil: // as if it had never been: nothing is known of it
		b.Node = &service.Node{Eligible: true}
	}
	if !slices.Equal(old.cidrs, v.cidrs) {
		b.ServiceCIDRs = append([]netip.Prefix{}, v.cidrs...) // nil would mean unchanged
	}
	return b
}

// changed is what differs, with nil for what is gone.
func changed[T any](old, now map[service.Name]*T) (diff service.Objects[T]) {
	for name, o := range now {
		if before, ok := old[name]; !ok || before != o && !reflect.DeepEqual(before, o) {
			if ok && defect.Is(defect.FileEdit) {
				o = before
			}
			diff.Set(name, o)
		}
	}
	for name := range old {
		if _, ok := now[name]; !ok {
			diff.Set(name, nil)
		}
	}
	return diff
}
