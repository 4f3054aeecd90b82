package engine

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

const (
	// maxKept bounds the objects with problems that are kept of one namespace, maxNamespaces those of which any are.
	maxKept       = 100
	maxNamespaces = 100
	// maxShown is how many of a namespace the status names, maxListed how many at all.
	maxShown  = 3
	maxListed = 50
)

// problems are those that objects have now, as far as "fairlead status" names them. Each namespace has its place, so
// that one with very many does not hide the others'.
type problems struct {
	kept map[string]map[string]service.Problem // by namespace and object; the namespace of files is empty
	list []service.Problem                     // what is shown; never modified
}

func newProblems() problems { return problems{kept: map[string]map[string]service.Problem{}} }

// note takes in what a Batch has changed, and which problems newly arose and ceased. Remaining are those that the
// objects of a Service have after as before.
func (p *problems) note(
	b *service.Batch, arisen []service.Problem, ceased []string, remaining func(service.Name) []service.Problem,
) (changed bool) {
	for name := range b.Slices.All() {
		kind, object := "EndpointSlice ", name.String()
		if endpoints, _, mirrored := strings.Cut(name.Name, "/"); mirrored {
			kind, object = "Endpoints ", name.Namespace+"/"+endpoints
		}
		changed = p.forget(kind+object) || changed
	}
	for _, object := range ceased {
		changed = p.forget(object) || changed
	}
	again := func(object string, name service.Name) {
		if p.forget(object) {
			changed = true
			arisen = append(arisen[:len(arisen):len(arisen)], remaining(name)...)
		}
	}
	for name := range b.Services.All() {
		again("Service "+name.String(), name)
	}
	for _, object := range b.Resolved {
		namespace, name, _ := strings.Cut(strings.TrimPrefix(object, "Service "), "/")
		again(object, service.Name{Namespace: namespace, Name: name})
	}
	for _, problem := range arisen {
		changed = p.keep(problem) || changed
	}
	if changed {
		p.list = p.shown()
	}
	return changed
}

// namespaceOf is that of an object in a problem, as "Service default/web" or "Namespace default".
func namespaceOf(object string) string {
	kind, name, isObject := strings.Cut(object, " ")
	namespace, _, namespaced := strings.Cut(name, "/")
	if kind == "Namespace" {
		return name
	}
	if !isObject || !namespaced {
		return ""
	}
	return namespace
}

func (p *problems) forget(object string) bool {
	namespace := namespaceOf(object)
	if _, ok := p.kept[namespace][object]; !ok {
		return false
	}
	if delete(p.kept[namespace], object); len(p.kept[namespace]) == 0 {
		delete(p.kept, namespace)
	}
	return true
}

// keep keeps the first problem of each object.
func (p *problems) keep(problem service.Problem) bool {
	namespace := namespaceOf(problem.Object)
	of := p.kept[namespace]
	if _, ok := of[problem.Object]; ok || len(of) >= maxKept || of == nil && len(p.kept) >= maxNamespaces {
		return false
	}
	if of == nil {
		of = map[string]service.Problem{}
		p.kept[namespace] = of
	}
	problem.Reason = said.Brief(problem.Reason)
	of[problem.Object] = problem
	return true
}

// shown are the first few of each namespace, sorted.
func (p *problems) shown() (list []service.Problem) {
	for _, namespace := range slices.Sorted(maps.Keys(p.kept)) {
		of := slices.SortedFunc(maps.Values(p.kept[namespace]), func(a, b service.Problem) int {
			return cmp.Compare(a.Object, b.Object)
		})
		list = append(list, of[:min(len(of), maxShown)]...)
	}
	return list[:min(len(list), maxListed)]
}
