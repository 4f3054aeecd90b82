package file

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

// place is an object, and the content of a file that has it.
type place struct {
	file *file
	part *content
	object
}

// maxWarnings bounds what a dump of a cluster, whose Services may well have no pods, makes of the log.
const maxWarnings = 100

// warner finds what in Services is valid, but probably a mistake.
type warner struct {
	*view
	become bool // pods become endpoints, as in a cluster
	slices map[service.Name][]*service.Slice
	pods   map[string]map[string][]*workload // by namespace, and by each of their labels
	found  []service.Problem
}

// warnings are those of all Services.
func (v *view) warnings(become bool) []service.Problem {
	w := &warner{view: v, become: become, slices: map[service.Name][]*service.Slice{},
		pods: map[string]map[string][]*workload{}}
	for name, s := range v.slices {
		of := service.Name{Namespace: name.Namespace, Name: s.Service}
		w.slices[of] = append(w.slices[of], s)
	}
	v.places = map[service.Problem]place{}
	more := 0
	for _, p := range v.wanting {
		s := p.value.(*service.Service)
		if v.services[p.name] != s {
			continue // another one of that name is in force
		}
		for _, warning := range w.service(&p, s) {
			if len(w.found) >= maxWarnings {
				more++
				continue
			}
			w.found = append(w.found, warning)
			v.places[warning] = p
		}
	}
	if more > 0 {
		w.found = append(w.found, service.Problem{Object: "manifests", Cause: service.Warning,
			Reason: fmt.Sprintf("%d more warnings", more)})
	}
	return w.found
}

// locate names the lines of those problems that are warnings.
func (v *view) locate(problems []service.Problem) []service.Problem {
	for i, p := range problems {
		if at, ok := v.places[p]; ok {
			problems[i].File = at.locate(p.Field)
		}
	}
	return problems
}

// service are the warnings of one Service.
func (w *warner) service(p *place, s *service.Service) []service.Problem {
	list, pods := w.slices[p.name], w.selected(p)
	if w.become && s.Ignored != "" {
		allocated := *s // the cluster will give it an address
		allocated.Ignored = ""
		s = &allocated
	}
	warnings := service.Warnings(s, list)
	empty := s.Ignored == "" && !slices.ContainsFunc(list, func(s *service.Slice) bool { return len(s.Endpoints) > 0 })
	switch {
	case !empty || len(p.wants.selector) == 0:
	case len(pods) == 0 && (w.become || len(w.workloads) > 0):
		warnings[0].Field, warnings[0].Reason = "spec.selector", w.unselective(p)
	case w.become:
		warnings = nil
	default:
		warnings[0].Reason = "no EndpointSlice of the manifests has endpoints for it, and fairlead run makes none of pods; " +
			"connections are refused"
	}
	for i, t := range p.wants.targets {
		ports, misses := t.misses(pods)
		if !misses || len(pods) == 0 {
			continue
		}
		have := "no ports"
		if ports != nil {
			have = said.List(ports)
		}
		warnings = append(warnings, service.Problem{Object: "Service " + p.name.String(), Cause: service.Warning,
			Field: fmt.Sprintf("spec.ports[%d].targetPort", i),
			Reason: fmt.Sprintf("%s/%s is a port of no container that the Service selects; these have %s",
				t.port.String(), strings.ToLower(string(t.protocol)), have)})
	}
	return warnings
}

// unselective says that a selector selects nothing.
func (w *warner) unselective(p *place) string {
	labels := w.labels(p.name.Namespace)
	meant := ""
	for _, pair := range p.wants.selector {
		if labels[pair] == nil && meant == "" {
			meant = said.Meant(pair, slices.Sorted(maps.Keys(labels)))
		}
	}
	return fmt.Sprintf("%s selects no pod of namespace %s in the manifests; connections are refused%s",
		strings.Join(p.wants.selector, ","), p.name.Namespace, meant)
}

// selected are the workloads whose pods a Service selects.
func (w *warner) selected(p *place) []*workload {
	if len(p.wants.selector) == 0 {
		return nil
	}
	some := w.labels(p.name.Namespace)[p.wants.selector[0]]
	return slices.DeleteFunc(slices.Clone(some), func(of *workload) bool { return !p.wants.selects(of) })
}

// labels are the workloads of a namespace by each of their labels.
func (w *warner) labels(namespace string) map[string][]*workload {
	if known := w.pods[namespace]; known != nil {
		return known
	}
	all := map[string][]*workload{}
	for _, one := range w.workloads[namespace] {
		for _, pair := range one.labels {
			all[pair] = append(all[pair], one)
		}
	}
	w.pods[namespace] = all
	return all
}

// locate names the line of a field. The file may have changed since it was read: it is read again soon.
func (p *place) locate(field string) string {
	var in io.ReaderAt = bytes.NewReader(p.file.data)
	if p.file.data == nil {
		opened, err := os.Open(p.file.path)
		if err != nil {
			return p.file.path
		}
		defer opened.Close()
		in = opened
	}
	text := make([]byte, min(p.part.end-p.part.start, maxPart))
	if _, err := in.ReadAt(text, p.part.start); err != nil {
		return p.file.path
	}
	_, line, _ := find(tree(text), steps(p.path+"."+field))
	return fmt.Sprintf("%s:%d", p.file.path, p.part.line+line-1)
}

// Manifest is a text that is not in a file of its own.
type Manifest struct {
	Name string // as in messages
	Data []byte
}

// Check returns what is wrong with the objects of manifests, and what is probably a mistake, where a cluster gives out
// addresses and makes endpoints of pods. Its error is that of ctx.
func Check(ctx context.Context, manifests []Manifest) (problems []service.Problem, err error) {
	s := newSource(Options{})
	var files []*file
	for _, m := range manifests {
		f := &file{path: m.Name, data: m.Data}
		r := newReading(bytes.NewReader(m.Data), f, s)
		if err := r.all(ctx, int64(len(m.Data))); err != nil {
			return nil, err
		}
		problems = append(problems, f.take(r)...)
		files = append(files, f)
	}
	v := newView(files)
	return append(problems, v.locate(v.warnings(true))...), nil
}
