package service

import (
	"iter"
	"net/netip"
	"slices"
)

// Batch is what changed.
type Batch struct {
	Services Objects[Service]
	Slices   Objects[Slice]
	// Version is the resourceVersion up to which all changes of Slices have been told; 0: as before, or unknown.
	Version uint64
	Node    *Node // nil: unchanged
	// ServiceCIDRs are the ranges from which ClusterIPs are allocated; nil: unchanged.
	ServiceCIDRs []netip.Prefix
	// Addrs are all addresses of this node's interfaces; nil: unchanged.
	Addrs []netip.Addr
	// Earlier Problems of these objects, or files, are over. They precede Problems, which name those that last.
	Resolved []string
	// Problems were found while the objects were read.
	Problems []Problem
}

// Resolve notes that what earlier Batches and this one said is wrong with these objects is over. It takes as long for
// all of them as for one: a tenant decides how many they are.
func (b *Batch) Resolve(objects ...string) {
	if len(objects) == 0 {
		return
	}
	over := make(map[string]bool, len(objects))
	for _, object := range objects {
		over[object] = true
	}
	b.Problems = slices.DeleteFunc(b.Problems, func(p Problem) bool { return over[p.Object] })
	for _, object := range b.Resolved {
		delete(over, object)
	}
	for _, object := range objects {
		if over[object] {
			b.Resolved = append(b.Resolved, object)
			delete(over, object)
		}
	}
}

// Objects are changed objects, in the order in which the changes became known. If a name comes several times, the last
// one counts. The order is that of memory, too, as objects are made when they come. Reading thousands in that order
// waits for memory half as long as reading them in the order of a map.
type Objects[T any] []Object[T]

// Object is what an object is now.
type Object[T any] struct {
	Name Name
	Is   *T // nil: it is gone
}

// One is a single object.
func One[T any](name Name, is *T) Objects[T] { return Objects[T]{{Name: name, Is: is}} }

// manyObjects is from how many on it is looked whether several are of one name: the consumer may take none for long,
// while they change again and again.
const manyObjects = 1 << 16

// Set adds what an object is now; nil: it is gone.
func (o *Objects[T]) Set(name Name, is *T) {
	if len(*o) >= manyObjects && len(*o) == cap(*o) {
		o.forgetPrevious()
	}
	*o = append(*o, Object[T]{name, is})
}

// Add lets later ones follow, whose memory it may go on using.
func (o *Objects[T]) Add(later Objects[T]) {
	if len(*o) == 0 {
		*o = later
		return
	}
	for name, is := range later.All() {
		o.Set(name, is)
	}
}

// forgetFormer leaves of each name only the last one.
func (o *Objects[T]) forgetPrevious() {
	last := make(map[Name]int, len(*o))
	for i := range *o {
		last[(*o)[i].Name] = i
	}
	left := (*o)[:0]
	for i, object := range *o {
		if last[object.Name] == i {
			left = append(left, object)
		}
	}
	clear((*o)[len(left):])
	*o = slices.Grow(left, len(left)) // so that it does not happen again soon
}

// All are the names and objects, in their order.
func (o Objects[T]) All() iter.Seq2[Name, *T] {
	return func(yield func(Name, *T) bool) {
		for i := range o {
			if !yield(o[i].Name, o[i].Is) {
				return
			}
		}
	}
}
