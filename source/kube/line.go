package kube

import (
	"sync"

	"fairlead.dev/fairlead/said"
)

// line is where Events wait to be handled: those of each namespace one after the other, the namespaces in turn. Each
// has its share of the places, so that a flood of one keeps out no other's Events, and does not delay them.
type line struct {
	some chan struct{} // has a token if there is one

	mu   sync.Mutex
	room said.Room
	of   map[string][]turn
	ring []string // those that have some
}

// turn is an Event in a line.
type turn struct {
	event Event
	ripe  bool // it has waited for its time: it is to be written
}

func newLine(size int) *line {
	return &line{some: make(chan struct{}, 1), room: said.Room{Size: size}, of: map[string][]turn{}}
}

// put returns false if there is no place. Ripe Events had one before.
func (l *line) put(t turn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	who := said.NamespaceOf(t.event.Object)
	if !t.ripe && !l.room.Enter(who) {
		return false
	}
	if len(l.of[who]) == 0 {
		l.ring = append(l.ring, who)
	}
	l.of[who] = append(l.of[who], t)
	l.signal()
	return true
}

// take takes the oldest Event of the namespace at the head of the ring, and moves that namespace to the end. So a
// namespace with many Events does not delay others.
func (l *line) take() (t turn, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ring) == 0 {
		return t, false
	}
	who := l.ring[0]
	t = l.of[who][0]
	if !t.ripe {
		l.room.Leave(who)
	}
	l.ring = l.ring[1:]
	if l.of[who] = l.of[who][1:]; len(l.of[who]) > 0 {
		l.ring = append(l.ring, who)
	} else {
		delete(l.of, who)
	}
	if len(l.ring) > 0 {
		l.signal()
	}
	return t, true
}

func (l *line) signal() {
	select {
	case l.some <- struct{}{}:
	default:
	}
}
