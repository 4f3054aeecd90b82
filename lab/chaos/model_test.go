package chaos

import (
	"slices"
	"time"
)

const (
	patience = 5 * time.Second  // of a client
	mostOut  = 10 * time.Second // of a healthy backend; and until a dead one is out
	settles  = 3 * time.Second  // after a change of the EndpointSlices, a start or a switch
)

// model is what is true of the world. A fault is in it before it happens, and until it has been repaired.
type model struct {
	pods     [len(pods)]backend
	cut      bool // node-b
	mode     string
	ready    time.Time   // since when the agent is; zero: it is not
	changing bool        // the mode: the agent programs another one
	killed   time.Time   // the last time
	outage   time.Time   // the last time at which the agent was not ready
	relaying time.Time   // the last time at which the mode was userspace
	losses   []time.Time // when mode userspace was killed
	leaves   []span      // when another mode took its place
}

type span struct{ from, to time.Time }

type backend struct {
	dead   bool
	good   time.Time // since when it answers: it is neither dead nor cut off
	bad    time.Time // since when it does not
	listed bool      // in EndpointSlices
	told   time.Time // when that changed last
}

func newModel() (m model) {
	for i := range m.pods {
		m.pods[i].listed = true
	}
	return m
}

func (m *model) fails(i int) bool { return m.pods[i].dead || m.cut && i >= 2 }

// turn notes which pods answer from now on, after a change.
func (m *model) turn(change func()) {
	var before [len(pods)]bool
	for i := range m.pods {
		before[i] = m.fails(i)
	}
	change()
	for i := range m.pods {
		switch now := m.fails(i); {
		case now && !before[i]:
			m.pods[i].bad = time.Now()
		case !now && before[i]:
			m.pods[i].good = time.Now()
		}
	}
}

// settled is when the last change of what the agent knows of a pod was in effect.
func (m *model) settled(i int) time.Time { return later(m.pods[i].told, m.ready).Add(settles) }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// excused reports whether a pod may be the reason why a connection that began then has failed.
func (m *model) excused(i int, began time.Time) bool {
	b := &m.pods[i]
	if !m.fails(i) && b.good.Before(began) {
		return false
	}
	return b.listed || m.ready.IsZero() || m.changing || m.settled(i).After(began)
}

// relayed reports whether mode userspace may be the reason: it relays connections, and the process was dead meanwhile.
func (m *model) relayed(began time.Time) bool {
	if m.mode != userspace && m.relaying.Before(began) {
		return false
	}
	return m.ready.IsZero() || m.outage.After(began) || m.killed.After(began)
}

// young reports whether a session was too young to be kept, by when its first connection began and was answered. Mode
// userspace saves sessions about once a second. A connection that it is still making when another mode takes its place
// gives its client no session there.
func (m *model) young(first span) bool {
	return slices.ContainsFunc(m.losses, func(lost time.Time) bool {
		return lost.After(first.to) && lost.Sub(first.to) < settles
	}) || slices.ContainsFunc(m.leaves, func(s span) bool {
		return first.from.Before(s.to) && first.to.After(s.from)
	})
}

// healthy is since when a pod should be in use; zero: it should not.
func (m *model) healthy(i int) time.Time {
	if b := &m.pods[i]; m.fails(i) || !b.listed || m.ready.IsZero() || m.changing {
		return time.Time{}
	}
	return later(m.pods[i].good, m.settled(i))
}

// condemned is since when a pod should be out of use, as far as that depends on it; zero: it should not.
func (m *model) condemned(i int) time.Time {
	if b := &m.pods[i]; !m.fails(i) || !b.listed || m.ready.IsZero() || m.changing {
		return time.Time{}
	}
	return later(m.pods[i].bad, m.settled(i))
}

// room is how many of the listed pods may be out of use, and how many do not answer.
func (m *model) room() (room, failing int) {
	listed := 0
	for i := range m.pods {
		if m.pods[i].listed {
			listed++
			if m.fails(i) {
				failing++
			}
		}
	}
	return floorOf(listed), failing
}

// floorOf is how many of so many ready endpoints may be ejected by default.
func floorOf(ready int) int { return max(0, ready-max(1, (ready+1)/2)) }
