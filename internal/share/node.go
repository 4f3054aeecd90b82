package share

import (
	"container/heap"
	"container/list"
	"math"
)

// level is how much of an Owner a node is about.
type level uint8

const (
	everybody level = iota
	namespace
	service
	unproven // all clients of a Service of whom nothing is proven
	client
	levels
)

// may is how many times of what is free an owner may borrow.
func (l level) may() int { return [levels]int{namespace: 8, service: 4, unproven: 2, client: 2}[l] }

// key is how a node is found.
type key struct {
	Owner
	level level
}

// path are the nodes that an owner is in, without the root.
func (o Owner) path() (path [levels - 1]key, depth int) {
	all := Owner{Namespace: o.Namespace}
	path[0] = key{all, namespace}
	all.Service = o.Service
	path[1] = key{all, service}
	if depth = 2; o.Unproven {
		all.Unproven = true
		path[depth] = key{all, unproven}
		depth++
	}
	path[depth] = key{o, client}
	return path, depth + 1
}

// node is an owner that has something.
type node struct {
	key
	parent   *node
	used     int
	children nodes         // a heap: the one that has most is the first
	at       int           // in the parent's children
	turns    list.List     // the children, as they have their turns
	turn     *list.Element // in the parent's turns
	places   list.List     // of a client: those that were quiet when they were looked at last are the first
}

func newNode(parent *node, k key) *node {
	n := &node{key: k, parent: parent}
	n.turn = parent.turns.PushBack(n)
	heap.Push(&parent.children, n)
	return n
}

func (n *node) leave() {
	heap.Remove(&n.parent.children, n.at)
	n.parent.turns.Remove(n.turn)
}

// add counts what is taken, or with a negative size given back.
func (n *node) add(size int) {
	for ; n != nil; n = n.parent {
		n.used += size
		n.fix()
	}
}

func (n *node) fix() {
	if n.parent != nil {
		heap.Fix(&n.parent.children, n.at)
	}
}

// since is when the first place was taken, or found to be in use.
func (n *node) since() int64 {
	if first := n.places.Front(); first != nil {
		return first.Value.(*Place).since
	}
	return math.MaxInt64
}

// nodes are a heap.
type nodes []*node

func (h nodes) Len() int { return len(h) }

func (h nodes) Less(i, j int) bool {
	if h[i].used != h[j].used {
		return h[i].used > h[j].used
	}
	return h[i].since() < h[j].since()
}

func (h nodes) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

func (h *nodes) Push(x any) {
	n := x.(*node)
	n.at = len(*h)
	*h = append(*h, n)
}

func (h *nodes) Pop() any {
	last := len(*h) - 1
	n := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return n
}
