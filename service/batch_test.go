package service_test

import (
	"fmt"
	"maps"
	"testing"

	"fairlead.dev/fairlead/service"
)

// A consumer may take no objects for long, while they change again and again. Then it keeps no more than twice as many
// as there are names, or some ten thousand. Of each name the last object counts, and the order stays.
func TestObjects_bounded(t *testing.T) {
	t.Parallel()
	const names, rounds, most = 1000, 1000, 1 << 17
	named := func(i int) service.Name { return service.Name{Namespace: "default", Name: fmt.Sprint(i)} }
	gone := named(names)
	objects := service.One(gone, &service.Slice{})
	objects.Set(gone, nil)
	for round := range rounds {
		var later service.Objects[service.Slice]
		for i := range names {
			later.Set(named(i), &service.Slice{Changed: int64(round)})
		}
		objects.Add(later)
		if len(objects) > most {
			t.Fatalf("%d objects are kept after %d rounds", len(objects), round+1)
		}
	}
	last := maps.Collect(objects.All())
	if is, known := last[gone]; is != nil || !known {
		t.Errorf("the first one is %v (%v), want it gone", is, known)
	}
	for i := range names {
		if is := last[named(i)]; is == nil || is.Changed != rounds-1 {
			t.Fatalf("object %d is %v, want that of the last round", i, is)
		}
	}
	for i, object := range objects[len(objects)-names:] {
		if object.Name != named(i) {
			t.Fatalf("the last objects begin with %s in place %d, want %s", object.Name, i, named(i))
		}
	}
}
