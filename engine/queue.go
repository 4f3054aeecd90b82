package engine

import (
	"cmp"
	"math"
	"slices"
	"time"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

// Objects wait in a queue for each namespace, so that a namespace with many changes does not delay the others.
//
//	inbox ─► put ─► namespace ─► a Service and its slices ─┐
//	                         └─► …                         ├─► take ─► Batch ─► Table.Update ─► Apply
//	                namespace ─► …                         │
//	                objects without a namespace ───────────┘
//
// A turn has a size. Namespaces with few changes go first, in a turn without the others if there was none just before:
// so they wait for one large turn at most. From the others a turn takes a piece of each, also of a Service with many
// slices. Those that got nothing come first in the next turn. An object that changes again before its turn keeps its
// place.

// queue is what has come and is not in the Table. It is for one goroutine.
type queue struct {
	began  time.Time                 // what happened before is of no interest
	owner  func(service.Name) string // the name of the Service of a slice in force; empty: the slice is not known
	size   size                      // nil: no Service is in force
	common service.Batch             // what the next turn has in any case
	times  unit                      // of that
	whole  bool                      // that is complete, so that it counts even if it is empty
	spaces map[string]*space         // that have something
	ring   []*space                  // the same, in the order of their turns
	Changes
	noted int  // times in all units
	quick bool // the last turn was without those that have much to do
}

// size is how many addresses with a port, and backends, a Service in force has.
type size func(service.Name) (frontends, backends int)

// space is what a namespace has.
type space struct {
	name   string
	units  map[string]*unit // by the name of the Service
	slices map[string]place // by the name of the slice
	order  []*unit          // as they came
	open   int              // so many of order were released: there is no rest among them
	at     time.Time        // when that is at the latest; zero: it is not known
}

// unit is what is new of a Service and its slices. They go together, unless they are too many.
type unit struct {
	service  string // name
	services service.Objects[service.Service]
	slices   service.Objects[service.Slice]
	problems []service.Problem // of these objects
	came     []time.Time
	happened []Happening
}

// place is where a slice is.
type place struct {
	*unit
	index int
}

// delivery is a Batch, and when it came.
type delivery struct {
	batch service.Batch
	at    time.Time
}

// taken is what a turn programs.
type taken struct {
	batch    service.Batch
	shares   []share     // whose it is
	came     []time.Time // when, each time once, sorted
	happened []Happening
	cut      bool // something is left of what was released
	full     bool // because the turn had no room for it
}

// commonWeight is that of what concerns all Services: no namespace shall pay for it.
const commonWeight = 1000

// share is how much of a turn is of a namespace.
type share struct {
	namespace string
	weight    int  // in rows, roughly
	done      bool // nothing is left of what was released
}

// putWhole adds what one turn has to take, whatever its size.
func (q *queue) putWhole(d delivery) {
	source.Add(&q.common, d.batch)
	q.whole = true
	if len(d.batch.Services)+len(d.batch.Slices) > 0 {
		q.note(&q.times, d.at)
	}
	for _, s := range d.batch.Slices.All() {
		q.date(&q.times, s, d.at)
	}
}

// put adds what has come.
func (q *queue) put(d delivery) {
	for name, s := range d.batch.Services.All() {
		u := q.space(name.Namespace).unit(name.Name)
		if len(u.services) == 0 {
			u.services.Set(name, nil)
			q.Services++
		}
		u.services[0].Is = s
		q.note(u, d.at)
	}
	for name, s := range d.batch.Slices.All() {
		u := q.slice(name, s)
		q.note(u, d.at)
		q.date(u, s, d.at)
	}
	for _, object := range d.batch.Resolved {
		if u := q.of(object); u != nil {
			u.problems = slices.DeleteFunc(u.problems, func(p service.Problem) bool { return p.Object == object })
		}
	}
	var others []service.Problem
	for _, p := range d.batch.Problems {
		switch u := q.of(p.Object); {
		case u == nil:
			others = append(others, p)
		case len(u.problems) < maxProblems && !slices.Contains(u.problems, p):
			u.problems = append(u.problems, p)
		}
	}
	d.batch.Services, d.batch.Slices, d.batch.Problems = nil, nil, others
	source.Add(&q.common, d.batch)
}

// maxProblems is how many problems a Service and its slices may have that wait: each change may bring others.
const maxProblems = 100

// of is where the object of a problem waits; nil: it does not.
func (q *queue) of(object string) *unit {
	kind, name := service.ObjectOf(object)
	s := q.spaces[name.Namespace]
	switch {
	case s == nil:
	case kind == "Service" || kind == "Endpoints":
		return s.units[name.Name]
	case kind == "EndpointSlice":
		return s.slices[name.Name].unit
	}
	return nil
}

// slice puts a slice into the unit of its Service. If it waits already, it keeps its place, also if it now belongs to
// another Service: the Table knows of both.
func (q *queue) slice(name service.Name, s *service.Slice) *unit {
	space := q.space(name.Namespace)
	if p, ok := space.slices[name.Name]; ok {
		p.slices[p.index].Is = s
		return p.unit
	}
	of := ""
	if s != nil {
		of = s.Service
	} else if q.owner != nil {
		of = q.owner(name)
	}
	u := space.unit(of)
	space.slices[name.Name] = place{u, len(u.slices)}
	u.slices.Set(name, s)
	q.Slices++
	return u
}

func (q *queue) space(name string) *space {
	s := q.spaces[name]
	if s == nil {
		s = &space{name: name, units: map[string]*unit{}, slices: map[string]place{}}
		if q.spaces == nil {
			q.spaces = map[string]*space{}
		}
		q.spaces[name] = s
		q.ring = append(q.ring, s)
	}
	return s
}

func (s *space) unit(service string) *unit {
	u := s.units[service]
	if u == nil {
		u = &unit{service: service}
		s.units[service] = u
		s.order = append(s.order, u)
	}
	return u
}

// close has what comes anew of a Service wait for another turn than the unit, so that this has an end.
func (s *space) close(u *unit) {
	if s.units[u.service] == u {
		delete(s.units, u.service)
	}
}

// maxNoted bounds how many times are remembered while nothing can be programmed.
const maxNoted = 100_000

// note remembers when what a unit has came. The first time is always known.
func (q *queue) note(u *unit, at time.Time) {
	if n := len(u.came); n == 0 || q.noted < maxNoted && !u.came[n-1].Equal(at) {
		u.came = append(u.came, at)
		q.noted++
	}
}

// date remembers when what a slice tells happened. The beginning is taken by the present wall clock: that may have been
// set since.
func (q *queue) date(u *unit, s *service.Slice, now time.Time) {
	if s == nil || q.noted >= maxNoted {
		return
	}
	began := now.Add(-now.Sub(q.began))
	if at := time.UnixMicro(s.Changed); at.After(began) {
		u.happened = append(u.happened, Happening{at, len(s.Endpoints) > 0 && s.Endpoints[0].Addr.Is6()})
		q.noted++
	}
}

// due is when the next turn can be: zero if at once. It is false if nothing waits. when tells from when on the changes
// of a namespace may go.
func (q *queue) due(when func(namespace string) time.Time) (at time.Time, waits bool) {
	if q.hasCommon() {
		return time.Time{}, true
	}
	for _, s := range q.ring {
		if s.open > 0 {
			return time.Time{}, true
		}
		if s.wait(when); !waits || s.at.Before(at) {
			at, waits = s.at, true
		}
	}
	return at, waits
}

// wait finds from when on what a namespace has may go. Once that is known, others do not put it off.
func (s *space) wait(when func(namespace string) time.Time) {
	if at := when(s.name); s.at.IsZero() || at.Before(s.at) {
		s.at = at
	}
}

func (q *queue) hasCommon() bool {
	b := &q.common
	return q.whole || len(b.Problems)+len(b.Resolved) > 0 || b.Node != nil || b.ServiceCIDRs != nil || b.Addrs != nil
}

// oldest is since when something waits; zero: nothing does.
func (q *queue) oldest() (at time.Time) {
	if len(q.times.came) > 0 {
		at = q.times.came[0]
	}
	for _, s := range q.ring {
		at = earlier(at, s.order[0].came[0])
	}
	return at
}

// earlier is the earlier of two times that are not zero.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// all takes everything.
func (q *queue) all() (t taken) {
	q.begin(&t)
	for _, s := range q.ring {
		s.open = len(s.order)
		q.give(s, math.MaxInt, &t)
	}
	q.end(&t, nil)
	return t
}

// take takes what the next turn has room for, of those namespaces whose changes may go now.
func (q *queue) take(size int, now time.Time, when func(namespace string) time.Time) (t taken) {
	q.begin(&t)
	var ready []*space
	for _, s := range q.ring {
		if s.wait(when); s.open == 0 && !s.at.After(now) {
			s.open, s.at = len(s.order), time.Time{}
		}
		if s.open > 0 {
			ready = append(ready, s)
		}
	}
	quantum := max(1, size/8)
	var little, much []*space
	for _, s := range ready {
		if s.weighs(quantum, q.size) {
			little = append(little, s)
		} else {
			much = append(much, s)
		}
	}
	if q.quick = !q.quick && len(little) > 0 && len(much) > 0; q.quick {
		much = nil
	}
	left := size
	served := map[*space]bool{}
	slices.SortStableFunc(little, func(a, b *space) int { return a.open - b.open })
	for _, s := range little {
		if left > size/4 || left > 0 && len(much) == 0 {
			left -= q.give(s, quantum, &t)
			served[s] = true
		}
	}
	for i, s := range much {
		if left > 0 || i == 0 {
			left -= q.give(s, left/(len(much)-i), &t)
			served[s] = true
		}
	}
	t.cut = slices.ContainsFunc(ready, func(s *space) bool { return s.open > 0 })
	t.full = t.cut && !q.quick
	q.end(&t, served)
	return t
}

// weighs reports whether what was released is no more than a limit.
func (s *space) weighs(limit int, inForce size) bool {
	for _, u := range s.order[:s.open] {
		if limit -= u.weight(inForce); limit < 0 {
			return false
		}
	}
	return true
}

// begin takes what is for any turn.
func (q *queue) begin(t *taken) {
	t.batch, t.came, t.happened = q.common, q.times.came, q.times.happened
	if b := &q.common; b.Node != nil || b.ServiceCIDRs != nil || b.Addrs != nil {
		t.shares = append(t.shares, share{weight: commonWeight, done: true})
	}
	q.noted -= len(t.came) + len(t.happened)
	q.common, q.times, q.whole = service.Batch{}, unit{}, false
}

// end leaves in the ring those that have more, first those that got nothing.
func (q *queue) end(t *taken, served map[*space]bool) {
	var ring, behind []*space
	for _, s := range q.ring {
		switch {
		case len(s.order) == 0:
			delete(q.spaces, s.name)
		case served[s]:
			behind = append(behind, s)
		default:
			ring = append(ring, s)
		}
	}
	q.ring = append(ring, behind...)
	slices.SortFunc(t.came, time.Time.Compare)
	t.came = slices.CompactFunc(t.came, time.Time.Equal)
}

// give takes of what a namespace has begun to give: units that are together within the limit, or a piece of one.
func (q *queue) give(s *space, limit int, t *taken) (weight int) {
	n := 0
	for weight < limit && n < s.open || n == 0 {
		u := s.order[n]
		w := u.weight(q.size)
		if n > 0 && weight+w > limit {
			break
		}
		if w > max(limit, 2*pieceSize) && len(u.slices) > 1 {
			weight += q.handPiece(s, u, max(limit, pieceSize), t)
			break
		}
		weight += w
		n++
		q.hand(s, u, t)
	}
	clear(s.order[:n])
	s.order, s.open = s.order[n:], s.open-n
	t.shares = append(t.shares, share{s.name, weight, s.open == 0})
	return weight
}

// hand takes a unit.
func (q *queue) hand(s *space, u *unit, t *taken) {
	q.handObjects(s, u, len(u.slices), t)
	t.batch.Problems = append(t.batch.Problems, u.problems...)
	t.came = append(t.came, u.came...)
	t.happened = append(t.happened, u.happened...)
	q.noted -= len(u.came) + len(u.happened)
	s.close(u)
}

// pieceSize is the weight of the smallest piece of a unit: that of a full slice in Kubernetes.
const pieceSize = 1000

// handPiece takes the Service, if it is new, and the first slices of a unit that is larger than the limit. Slices that
// are gone come last, and the controller of Kubernetes leaves an endpoint in its slice: none is missing between pieces.
func (q *queue) handPiece(s *space, u *unit, limit int, t *taken) int {
	slices.SortStableFunc(u.slices, func(a, b service.Object[service.Slice]) int {
		return cmp.Compare(weightOf(b.Is), weightOf(a.Is))
	})
	first := unit{services: u.services, slices: u.slices[:1]}
	n, weight := 1, first.weight(q.size)
	for ; n < len(u.slices)-1 && weight+weightOf(u.slices[n].Is) <= limit; n++ {
		weight += weightOf(u.slices[n].Is)
	}
	q.handObjects(s, u, n, t)
	s.close(u)
	return weight
}

// handObjects takes the Service and the first slices of a unit.
func (q *queue) handObjects(s *space, u *unit, n int, t *taken) {
	t.batch.Services = append(t.batch.Services, u.services...)
	t.batch.Slices = append(t.batch.Slices, u.slices[:n]...)
	q.Services -= len(u.services)
	q.Slices -= n
	for name := range u.slices[:n].All() {
		delete(s.slices, name.Name)
	}
	u.services, u.slices = nil, u.slices[n:]
	for i, o := range u.slices {
		s.slices[o.Name.Name] = place{u, i}
	}
}

// weight is how many rows may change, roughly. To remove a Service, or most of it, takes as long as to add it.
func (u *unit) weight(inForce size) (n int) {
	for name, s := range u.services.All() {
		frontends, backends := 0, 0
		if inForce != nil {
			frontends, backends = inForce(name)
		}
		if s == nil {
			n += 2 + frontends + backends
		} else {
			n += 1 + max(len(s.Ports)*(len(s.ClusterIPs)+len(s.ExternalIPs)+len(s.LoadBalancerIPs)), frontends)
		}
	}
	for _, s := range u.slices.All() {
		if n += weightOf(s); s == nil {
			n++
		}
	}
	return n
}

func weightOf(s *service.Slice) int {
	if s == nil {
		return 1
	}
	return 1 + len(s.Ports)*len(s.Endpoints)
}
