package share

import (
	"container/list"
	"sync"
)

// A Pool has room for so much. Its methods may be called from any goroutine.
type Pool struct {
	replaces bool

	mu       sync.Mutex
	capacity int
	root     *node
	nodes    map[key]*node
	clock    int64 // counts what has entered
}

// New makes a Pool that refuses a newcomer whose client has most.
func New(capacity int) *Pool {
	return &Pool{capacity: capacity, root: &node{}, nodes: map[key]*node{}}
}

// NewReplacing makes a Pool that gives a newcomer the place of its client's quietest holder instead.
func NewReplacing(capacity int) *Pool {
	p := New(capacity)
	p.replaces = true
	return p
}

// A Place is taken until Leave, or until its holder yields. The zero value is one that is not taken. It is part of its
// holder.
type Place struct {
	holder Holder
	size   int
	leaf   *node
	at     *list.Element // of the leaf's places; nil: it is left
	since  int64         // on the pool's clock, when the place was taken, or found to be in use
	used   int64         // by its holder, as it was then
}

// Enter takes a place of a size for a holder. It reports false if that would have more than its share.
func (p *Pool) Enter(q *Place, o Owner, size int, h Holder) (ok bool) {
	p.mu.Lock()
	leaf := p.leaf(o)
	leaf.add(size)
	var yielding []Holder
	for p.root.used > p.capacity {
		other := p.quietest(leaf)
		if other == nil {
			break
		}
		yielding = append(yielding, other.holder)
		p.drop(other)
	}
	if ok = p.root.used <= p.capacity; ok {
		q.holder, q.size, q.used = h, size, h.Used()
		p.put(q, leaf)
	} else {
		leaf.add(-size)
		p.prune(leaf)
	}
	p.mu.Unlock()
	for _, y := range yielding {
		y.Yield()
	}
	return ok
}

// Borrow takes a place that cannot be taken back. So some of the room is always left for other owners: a namespace may
// take eight times of what is free, a Service four times and a client twice.
func (p *Pool) Borrow(q *Place, o Owner, size int) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	leaf := p.leaf(o)
	leaf.add(size)
	for n := leaf; n.parent != nil; n = n.parent {
		if n.used > n.level.may()*(p.capacity-p.root.used) {
			leaf.add(-size)
			p.prune(leaf)
			return false
		}
	}
	q.size = size
	p.put(q, leaf)
	return true
}

// Leave gives a place back, unless that was done, or it is another's by now.
func (p *Pool) Leave(q *Place) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop(q)
}

// Prove moves a place to its client, now that this is known to be one.
func (p *Pool) Prove(q *Place) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q.at == nil || !q.leaf.Owner.Unproven {
		return
	}
	o := q.leaf.Owner
	o.Unproven = false
	p.drop(q)
	leaf := p.leaf(o)
	leaf.add(q.size)
	p.put(q, leaf)
}

// Clear has all holders yield, and refuses all newcomers.
func (p *Pool) Clear() {
	p.mu.Lock()
	p.capacity = -1
	var all []Holder
	for _, n := range p.nodes {
		for e := n.places.Front(); e != nil; e = n.places.Front() {
			q := e.Value.(*Place)
			all = append(all, q.holder)
			n.places.Remove(e)
			q.at = nil
		}
	}
	p.root, p.nodes = &node{}, map[key]*node{}
	p.mu.Unlock()
	for _, h := range all {
		h.Yield()
	}
}

// Next takes out the oldest holder of the client whose turn it is. Turns go round the namespaces, then the Services of
// a namespace, then the clients of a Service. nil: the pool is empty.
func (p *Pool) Next() Holder {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.root
	for n.places.Len() == 0 {
		first := n.turns.Front()
		if first == nil {
			return nil
		}
		n.turns.MoveToBack(first)
		n = first.Value.(*node)
	}
	q := n.places.Front().Value.(*Place)
	p.drop(q)
	return q.holder
}

// Used is how much is taken.
func (p *Pool) Used() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.root.used
}

// Capacity is for how much there is room.
func (p *Pool) Capacity() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.capacity
}

// quietest is the place that is to yield for a newcomer, which is counted already; nil: none does.
func (p *Pool) quietest(newcomer *node) *Place {
	const looks = 32 // among places that are all in use one is as good as another
	for i := 0; ; i++ {
		n := p.most(newcomer)
		if n == newcomer && !p.replaces || n.places.Len() == 0 {
			return nil
		}
		q := n.places.Front().Value.(*Place)
		used := q.holder.Used()
		if used == q.used || i == looks {
			return q
		}
		q.used = used
		p.stamp(q)
		n.places.MoveToBack(q.at)
		n.fix()
	}
}

// most is the leaf that has most. Of those that have as much it is the newcomer's, as the others were there before. If
// newcomers replace, it is the client whose place has been quiet for longest.
func (p *Pool) most(newcomer *node) *node {
	var mine [levels]*node
	for n := newcomer; n != nil; n = n.parent {
		mine[n.level] = n
	}
	n := p.root
	for len(n.children) > 0 {
		first := n.children[0]
		own := mine[first.level]
		if own != nil && own.parent == n && own.used == first.used && !(p.replaces && own == newcomer) {
			first = own
		}
		n = first
	}
	return n
}

// put has a place be the last of a leaf, which counts it already.
func (p *Pool) put(q *Place, leaf *node) {
	p.stamp(q)
	q.leaf, q.at = leaf, leaf.places.PushBack(q)
	leaf.fix()
}

func (p *Pool) stamp(q *Place) {
	p.clock++
	q.since = p.clock
}

// drop takes a place out.
func (p *Pool) drop(q *Place) {
	if q.at == nil {
		return
	}
	q.leaf.places.Remove(q.at)
	q.at = nil
	q.leaf.add(-q.size)
	p.prune(q.leaf)
}

// leaf is the node of an owner.
func (p *Pool) leaf(o Owner) *node {
	path, depth := o.path()
	if n := p.nodes[path[depth-1]]; n != nil {
		return n
	}
	n := p.root
	for _, k := range path[:depth] {
		next := p.nodes[k]
		if next == nil {
			next = newNode(n, k)
			p.nodes[k] = next
		}
		n = next
	}
	return n
}

// prune forgets the nodes above a leaf that have nothing.
func (p *Pool) prune(n *node) {
	for n.parent != nil && n.used == 0 {
		n.leave()
		delete(p.nodes, n.key)
		n = n.parent
	}
}
