package engine

import (
	"maps"
	"slices"

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
	kept map[string]map[string]kept // by namespace and object; the namespace of files is empty
	list []service.Problem          // for Status. A change replaces the list, as other goroutines read it
}

// kept is a problem. One that was read in the object lasts until its Source says otherwise.
type kept struct {
	service.Problem
	read bool
}

func newProblems() problems { return problems{kept: map[string]map[string]kept{}} }

// note takes in what a Batch has changed, and which problems newly arose and ceased. Remaining are those that the Table
// has found in an object, and that last.
func (p *problems) note(
	b *service.Batch, arisen []service.Problem, ceased []string, remaining func(object string) []service.Problem,
) (changed bool) {
	arisen = slices.Clip(arisen)
	again := func(object string, read bool) {
		if p.forget(object, read) {
			changed = true
			arisen = append(arisen, remaining(object)...)
		}
	}
	for name, s := range b.Services.All() {
		again("Service "+name.String(), s == nil)
	}
	for _, object := range ceased {
		again(object, false)
	}
	for _, object := range b.Resolved {
		again(object, true)
	}
	for _, problem := range b.Problems { // of one object, the latest are sure to last
		again(problem.Object, true)
	}
	for _, problem := range b.Problems {
		changed = p.keep(kept{problem, true}) || changed
	}
	for _, problem := range arisen {
		changed = p.keep(kept{problem, false}) || changed
	}
	if changed {
		p.list = p.shown()
	}
	return changed
}

// namespaceOf is that of an object in a problem, as "Service default/web" or "Namespace default".
func namespaceOf(object string) string {
	kind, name := service.ObjectOf(object)
	if kind == "Namespace" {
		return name.Name
	}
	return name.Namespace
}

// forget forgets the problem of an object, but one that was read only if that is over, too.
func (p *problems) forget(object string, read bool) bool {
	namespace := namespaceOf(object)
	if was, ok := p.kept[namespace][object]; !ok || was.read && !read {
		return false
	}
	if delete(p.kept[namespace], object); len(p.kept[namespace]) == 0 {
		delete(p.kept, namespace)
	}
	return true
}

// keep keeps the first problem of each object.
func (p *problems) keep(problem kept) bool {
	namespace := namespaceOf(problem.Object)
	of := p.kept[namespace]
	if _, ok := of[problem.Object]; ok || len(of) >= maxKept || of == nil && len(p.kept) >= maxNamespaces {
		return false
	}
	if of == nil {
		of = map[string]kept{}
		p.kept[namespace] = of
	}
	problem.Reason = said.Brief(problem.Reason)
	of[problem.Object] = problem
	return true
}

// shown are the first few of each namespace, sorted.
func (p *problems) shown() (list []service.Problem) {
	for _, namespace := range slices.Sorted(maps.Keys(p.kept)) {
		objects := slices.Sorted(maps.Keys(p.kept[namespace]))
		for _, object := range objects[:min(len(objects), maxShown)] {
			list = append(list, p.kept[namespace][object].Problem)
		}
	}
	return list[:min(len(list), maxListed)]
}
