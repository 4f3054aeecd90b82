package kube

import (
	"reflect"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/service"
)

// mirror is the cache.ReflectorStore of one kind: it knows what the reader was last told of each
// object, and writes into the Source's Batch what is different now.
type mirror struct {
	*kind
	source      *Source
	known       map[service.Name]any // the reader's own values, never changed
	bad         map[service.Name]flaw
	resolved    []string          // objects of which a problem is over, since update began
	problems    []service.Problem // that are new since then, and all that last of those objects
	listed      bool
	lastMessage atomic.Int64 // the API server's last message about it, or the first request, in Unix nanoseconds
	lists       atomic.Int64 // how often it was listed
}

// flaw is what is known of an object that has problems.
type flaw struct {
	uid      types.UID
	problems []service.Problem
}

func newMirror(k *kind, s *Source) *mirror {
	m := &mirror{kind: k, source: s, known: map[service.Name]any{}, bad: map[service.Name]flaw{}}
	m.lastMessage.Store(time.Now().UnixNano())
	return m
}

// update has f write into the Source's Batch.
func (m *mirror) update(f func(*service.Batch)) {
	m.source.update(func(b *service.Batch) {
		f(b)
		b.Resolve(m.resolved...)
		b.Problems = append(b.Problems, m.problems...)
		m.resolved, m.problems = nil, nil
	})
}

// Add takes an object that is new or has changed.
func (m *mirror) Add(o any) error {
	m.update(func(b *service.Batch) {
		m.set(b, o.(*compact))
		m.tell(b, o.(*compact).version)
	})
	return nil
}

// Update is Add.
func (m *mirror) Update(o any) error { return m.Add(o) }

// Delete forgets an object.
func (m *mirror) Delete(o any) error {
	m.update(func(b *service.Batch) {
		m.resolve(o.(*compact).name)
		m.remove(b, o.(*compact).name)
		m.tell(b, o.(*compact).version)
	})
	return nil
}

// Replace takes a complete list: what it does not name is gone.
func (m *mirror) Replace(objects []any, version string) error {
	m.update(func(b *service.Batch) {
		named := make(map[service.Name]bool, len(objects))
		for _, o := range objects {
			c := o.(*compact)
			named[c.name] = true
			m.set(b, c)
		}
		had, gone := len(m.known), 0
		for name := range m.known {
			if !named[name] {
				m.remove(b, name)
				gone++
			}
		}
		for name := range m.bad {
			if !named[name] {
				m.resolve(name)
			}
		}
		m.listed = true
		m.lists.Add(1)
		m.tell(b, version)
		m.UpdateResourceVersion("")
		if gone > 1 && gone == had {
			m.source.log.Warn("the API server reports no object of a kind any more; all count as deleted",
				"resource", m.resource, "count", gone)
		}
	})
	return nil
}

// UpdateResourceVersion is called for each event of a watch, bookmarks among them.
func (m *mirror) UpdateResourceVersion(string) { m.lastMessage.Store(time.Now().UnixNano()) }

// Resync has no meaning here: a reader keeps what it was told.
func (m *mirror) Resync() error { return nil }

func (m *mirror) set(b *service.Batch, c *compact) {
	m.report(c)
	if c.value == nil {
		m.remove(b, c.name)
		return
	}
	if old, ok := m.known[c.name]; ok && same(old, c.value) {
		return
	}
	m.known[c.name] = c.value
	m.put(b, m.known, c.name)
}

// same reports whether two values differ in their version at most. That of a slice with endpoints that terminate
// counts: a node that lists anew knows no earlier one, and waits until all have confirmed this one.
func same(a, b any) bool {
	if s, ok := a.(*service.Slice); ok && !s.Ends() {
		other := *s
		other.Version = b.(*service.Slice).Version
		a = &other
	}
	return reflect.DeepEqual(a, b)
}

// tell notes how far the reader has been told of slices. The watch delivers changes in the order of their versions.
func (m *mirror) tell(b *service.Batch, version string) {
	if m.resource == slicesResource {
		b.Version = number(version)
	}
}

// number is a resourceVersion that can be compared (KEP-5504); 0: it cannot.
func number(version string) uint64 {
	n, err := strconv.ParseUint(version, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func (m *mirror) remove(b *service.Batch, name service.Name) {
	if _, ok := m.known[name]; ok {
		if !defect.Is(defect.KubeDelete) {
			delete(m.known, name)
		}
		m.put(b, m.known, name)
	}
}

// report notes problems that the object did not have before. If one is over, it notes that, and all that last.
func (m *mirror) report(c *compact) {
	over := func(p service.Problem) bool { return !slices.Contains(c.problems, p) }
	if slices.ContainsFunc(m.bad[c.name].problems, over) {
		m.resolve(c.name)
	}
	for _, p := range c.problems {
		if !slices.Contains(m.bad[c.name].problems, p) {
			m.problems = append(m.problems, p)
		}
	}
	if len(c.problems) > 0 {
		m.bad[c.name] = flaw{c.uid, c.problems}
	}
}

// resolve notes that the problems that an object had are over.
func (m *mirror) resolve(name service.Name) {
	if was, ok := m.bad[name]; ok {
		m.resolved = append(m.resolved, was.problems[0].Object)
		delete(m.bad, name)
	}
}
