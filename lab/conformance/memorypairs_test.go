package conformance_test

import (
	"testing"

	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/lab/conformance"
)

// inMemory are planes of all natures, two of each, on one kernel. Where both serve, a comes before b.
func inMemory(node *conformance.Memory) []successor {
	open := func(name string, n memory.Nature) successor { return successor{name, node.Driver(name, n).Open} }
	return []successor{
		open("a tracked", memory.Tracked), open("a tabled", memory.Tabled), open("a carried", memory.Relayed),
		open("b tracked", memory.Tracked), open("b tabled", memory.Tabled), open("b carried", memory.Relayed),
	}
}

// TestMemory_sessions is TestSessions.
func TestMemory_sessions(t *testing.T) {
	t.Parallel()
	node := &conformance.Memory{}
	for _, s := range inMemory(node) {
		t.Run(s.name, func(t *testing.T) { testSessions(t, node, s.open) })
	}
}

// TestMemory_handedOver is TestAffinity_handedOver.
func TestMemory_handedOver(t *testing.T) {
	t.Parallel()
	node := &conformance.Memory{}
	all := inMemory(node)
	var tour []successor
	for i, from := range all {
		tour = append(tour, from)
		for _, to := range all[i+1:] {
			tour = append(tour, to, from)
		}
	}
	testHandedOver(t, node, tour)
}

// TestMemory_besides is TestSync_besides.
func TestMemory_besides(t *testing.T) {
	t.Parallel()
	n := len(inMemory(&conformance.Memory{}))
	for pair := range n * n {
		node := &conformance.Memory{}
		now, next := inMemory(node)[pair/n], inMemory(node)[pair%n]
		if now.name == next.name {
			continue
		}
		t.Run(next.name+" beside "+now.name, func(t *testing.T) {
			b := newBesides(t, node)
			b.serve(now)
			b.sync(next)
		})
	}
}
