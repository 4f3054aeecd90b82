package engine

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// object is a Service of a namespace and a slice of it, of four rows.
func object(namespace string, i int) service.Batch {
	name := service.Name{Namespace: namespace, Name: fmt.Sprint("s", i)}
	return service.Batch{
		Services: service.One(name, &service.Service{
			Name: name, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
			Ports: []service.Port{{Protocol: model.TCP, Port: 80}},
		}),
		Slices: service.One(name, &service.Slice{
			Name: name, Service: name.Name, Ports: []service.SlicePort{{Protocol: model.TCP, Port: 8080}},
			Endpoints: []service.Endpoint{{Addr: netip.MustParseAddr("10.244.0.1"), Ready: true, Serving: true, Weight: 1}},
		}),
	}
}

// names are the objects that a turn takes, Services first.
func names(t taken) string {
	var all []string
	for name := range t.batch.Services.All() {
		all = append(all, name.String())
	}
	for name, s := range t.batch.Slices.All() {
		text := "slice " + name.String()
		if s == nil {
			text = "no " + text
		}
		all = append(all, text)
	}
	return strings.Join(all, ", ")
}

func services(t taken) string {
	t.batch.Slices = nil
	return names(t)
}

func anyone(string) time.Time { return time.Time{} }

// put adds objects of a namespace.
func put(q *queue, namespace string, from, to int) {
	for i := from; i < to; i++ {
		q.put(delivery{object(namespace, i), time.Unix(int64(i), 0)})
	}
}

// turns are the Services that turns of a size take, until nothing is left.
func turns(q *queue, size int) string {
	var all []string
	for len(q.ring) > 0 {
		all = append(all, services(q.take(size, time.Now(), anyone)))
	}
	return strings.Join(all, "; ")
}

// A turn of 32 rows has room for eight Services. A namespace with one goes at once, but not always before one with
// many.
func TestQueue_smallFirst(t *testing.T) {
	var q queue
	put(&q, "large", 0, 12)
	put(&q, "b", 20, 21)
	put(&q, "c", 21, 22)
	first := q.take(32, time.Now(), anyone)
	if got := services(first); got != "b/s20, c/s21" || !first.cut || first.full {
		t.Errorf("taken: %+v", got)
	}
	put(&q, "d", 23, 24)
	second := q.take(32, time.Now(), anyone)
	if got := services(second); got != "d/s23, large/s0, large/s1, large/s2, large/s3, large/s4, large/s5, large/s6" || !second.full {
		t.Errorf("taken: %s", got)
	}
	put(&q, "e", 24, 25)
	want := "e/s24; large/s7, large/s8, large/s9, large/s10, large/s11"
	if got := turns(&q, 32); got != want || len(q.spaces)+q.Services+q.Slices+q.noted != 0 {
		t.Errorf("taken: %s, want %s; left: %+v", got, want, q)
	}
}

// The namespace that has least goes first.
func TestQueue_manyNamespaces(t *testing.T) {
	var q queue
	for _, namespace := range []string{"a", "b", "c", "d", "e", "f"} {
		put(&q, namespace, 0, 2)
	}
	put(&q, "g", 0, 1)
	if got, want := turns(&q, 64), "g/s0, a/s0, a/s1, b/s0, b/s1, c/s0, c/s1, d/s0, d/s1, e/s0, e/s1, f/s0, f/s1"; got != want {
		t.Errorf("taken: %s, want %s", got, want)
	}
}

// A Service with many slices goes in pieces, its slices that are gone last, and others go between.
func TestQueue_manySlices(t *testing.T) {
	q := queue{owner: func(service.Name) string { return "s0" }}
	gone := service.Name{Namespace: "a", Name: "gone"}
	var big service.Batch
	for round := range 2 { // what has come again keeps its place
		big = object("a", 0)
		big.Slices = service.One[service.Slice](gone, nil)
		for i := range 5 {
			name := service.Name{Namespace: "a", Name: fmt.Sprint("s0-", i)}
			big.Slices.Set(name, &service.Slice{
				Name: name, Service: "s0", Ports: make([]service.SlicePort, 1), Endpoints: make([]service.Endpoint, 1000-round),
			})
		}
		q.put(delivery{big, time.Unix(1, 0)})
	}
	var got []string
	for len(q.ring) > 0 {
		taken := q.take(2500, time.Now(), anyone)
		got = append(got, fmt.Sprintf("%s: %d times", names(taken), len(taken.came)))
		if len(got) == 1 {
			put(&q, "b", 0, 1)
			q.put(delivery{batch: service.Batch{Slices: big.Slices[1:2]}})
		}
	}
	want := []string{
		"a/s0, slice a/s0-0, slice a/s0-1: 0 times",
		"b/s0, slice b/s0: 1 times",
		"slice a/s0-2, slice a/s0-3: 0 times",
		"slice a/s0-4, no slice a/gone: 1 times",
		"slice a/s0-0: 1 times",
	}
	if !slices.Equal(got, want) || len(q.spaces)+q.Services+q.Slices+q.noted != 0 {
		t.Errorf("taken\n%s\nleft: %+v", strings.Join(got, "\n"), q)
	}
}

// Removed Services weigh what they have in force, and so do those that lose most of it.
func TestQueue_removed(t *testing.T) {
	q := queue{size: func(name service.Name) (frontends, backends int) {
		if name.Namespace == "a" {
			return 20, 10
		}
		return 0, 0
	}}
	for i := range 3 {
		name := service.Name{Namespace: "a", Name: fmt.Sprint("s", i)}
		q.put(delivery{batch: service.Batch{Services: service.One[service.Service](name, nil)}})
	}
	put(&q, "a", 3, 4)
	if got, want := turns(&q, 64), "a/s0, a/s1; a/s2, a/s3"; got != want {
		t.Errorf("taken: %s, want %s", got, want)
	}
}

// Those that have much share a turn, and what is larger than a turn goes in one.
func TestQueue_roundRobin(t *testing.T) {
	var q queue
	big := object("a", 0)
	big.Slices[0].Is.Endpoints = make([]service.Endpoint, 1000)
	q.put(delivery{batch: big})
	for _, namespace := range []string{"b", "c"} {
		put(&q, namespace, 0, 40)
	}
	for _, want := range []string{"a1003", "b16 c16", "b16 c16"} {
		var got []string
		for _, s := range q.take(32, time.Now(), anyone).shares {
			got = append(got, fmt.Sprint(s.namespace, s.weight))
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("taken: %q, want %q", got, want)
		}
	}
}

// An object that changes again keeps its place, and a slice that goes is not parted from its Service.
func TestQueue_oneService(t *testing.T) {
	q := queue{owner: func(slice service.Name) string { return strings.TrimSuffix(slice.Name, "-old") }}
	put(&q, "a", 0, 3)
	old := service.Name{Namespace: "a", Name: "s1-old"}
	q.put(delivery{batch: service.Batch{Slices: service.One[service.Slice](old, nil)}})
	q.put(delivery{batch: service.Batch{Services: service.One[service.Service](service.Name{Namespace: "a", Name: "s0"}, nil)}})
	first := q.take(1, time.Now(), anyone)
	if got, want := names(first), "a/s0, slice a/s0"; got != want || first.batch.Services[0].Is != nil {
		t.Errorf("taken: %s, want %s, which is gone", got, want)
	}
	if got, want := names(q.take(1, time.Now(), anyone)), "a/s1, slice a/s1, no slice a/s1-old"; got != want {
		t.Errorf("taken: %s, want %s", got, want)
	}
}

// A problem is told with its object, and others at once.
func TestQueue_problems(t *testing.T) {
	var q queue
	b := object("a", 1)
	of := []service.Problem{
		{Object: "Service a/s1", Reason: "1"}, {Object: "EndpointSlice a/s1", Reason: "2"}, {Object: "Service a/s2"}, {Object: "x.yaml:1"},
	}
	b.Problems = of
	put(&q, "a", 0, 1)
	q.put(delivery{batch: b})
	q.put(delivery{batch: b})
	var got [][]service.Problem
	for range 2 {
		got = append(got, q.take(1, time.Now(), anyone).batch.Problems)
	}
	if !slices.Equal(got[0], slices.Repeat(of[2:], 2)) || !slices.Equal(got[1], of[:2]) {
		t.Errorf("%v", got)
	}
}

// Objects of a resting namespace stay in the queue. Objects whose turn has begun do not rest again.
func TestQueue_rests(t *testing.T) {
	var q queue
	now := time.Now()
	put(&q, "a", 0, 2)
	put(&q, "b", 5, 6)
	when := func(namespace string) time.Time {
		if namespace == "a" {
			return now.Add(time.Second)
		}
		return now
	}
	if at, waits := q.due(when); !waits || !at.Equal(now) {
		t.Error(at, waits)
	}
	if got := services(q.take(4, now, when)); got != "b/s5" {
		t.Error("taken:", got)
	}
	if at, waits := q.due(when); !waits || !at.Equal(now.Add(time.Second)) || !q.oldest().Equal(time.Unix(0, 0)) {
		t.Error(at, waits, q.oldest())
	}
	if got := services(q.take(4, time.Now(), anyone)); got != "a/s0" {
		t.Error("taken:", got)
	}
	put(&q, "a", 2, 3) // has to rest, s1 not
	if at, waits := q.due(when); !waits || !at.IsZero() {
		t.Error(at, waits)
	}
	if got := services(q.take(100, now, when)); got != "a/s1" {
		t.Error("taken:", got)
	}
	if got := services(q.take(100, now, when)); got != "" {
		t.Error("taken:", got)
	}
}

// Each change is reported once, with the time of its first arrival, also one that a later change has replaced.
func TestQueue_times(t *testing.T) {
	began := time.Now()
	q := queue{began: began}
	var came []time.Time
	var happened []Happening
	for i := range 4 {
		at := began.Add(time.Duration(i+1) * time.Second)
		b := object("a", i%2)
		b.Slices[0].Is.Changed = at.UnixMicro()
		q.put(delivery{b, at})
		came, happened = append(came, at), append(happened, Happening{time.UnixMicro(at.UnixMicro()), false})
	}
	b := object("a", 0)
	b.Slices[0].Is.Changed = began.Add(-time.Second).UnixMicro() // no process was there to follow
	q.put(delivery{b, came[3]})
	if q.Services != 2 || q.Slices != 2 {
		t.Errorf("%+v wait, want two of each", q.Changes)
	}
	first, second := q.take(1, time.Now(), anyone), q.take(1, time.Now(), anyone)
	if !slices.Equal(first.came, []time.Time{came[0], came[2], came[3]}) || !slices.Equal(second.came, []time.Time{came[1], came[3]}) {
		t.Errorf("came %v and %v of %v", first.came, second.came, came)
	}
	if !slices.Equal(first.happened, []Happening{happened[0], happened[2]}) ||
		!slices.Equal(second.happened, []Happening{happened[1], happened[3]}) {
		t.Errorf("happened %v and %v", first.happened, second.happened)
	}
}

// However changes are cut into pieces, the rows are the same in the end. A Service is never without its endpoints
// because another piece has the slice that replaces a deleted one.
func TestQueue_random(t *testing.T) {
	random := rand.New(rand.NewPCG(sample.Seed(t), 0))
	for range 20 {
		whole, pieces := newTable(t), newTable(t)
		q := queue{owner: func(slice service.Name) string { return pieces.ServiceOf(slice) }}
		current := map[service.Name]int{} // the slice that each Service has
		for range 200 {
			var b service.Batch
			for range 1 + random.IntN(5) {
				name := service.Name{Namespace: fmt.Sprint("n", random.IntN(4)), Name: fmt.Sprint("s", random.IntN(20))}
				at := netip.AddrFrom4([4]byte{10, 96, name.Namespace[1], name.Name[len(name.Name)-1]})
				b.Services.Set(name, &service.Service{
					Name: name, ClusterIPs: []netip.Addr{at}, Ports: []service.Port{{Protocol: model.TCP, Port: uint16(len(name.Name))}},
				})
				number := current[name]
				current[name] = number + 1
				of := func(n int) service.Name {
					return service.Name{Namespace: name.Namespace, Name: fmt.Sprint(name.Name, "-", n)}
				}
				if number > 0 {
					b.Slices.Set(of(number), nil)
				}
				b.Slices.Set(of(number+1), &service.Slice{
					Name: of(number + 1), Service: name.Name, Ports: []service.SlicePort{{Protocol: model.TCP, Port: 8080}},
					Endpoints: []service.Endpoint{{Addr: netip.AddrFrom4([4]byte{10, 244, byte(number >> 8), byte(number)}), Ready: true, Serving: true, Weight: 1}},
				})
			}
			whole.Update(b)
			q.put(delivery{batch: b})
			if random.IntN(3) == 0 {
				state, _, _ := pieces.Update(q.take(1+random.IntN(30), time.Now(), anyone).batch)
				for key, f := range state.Frontends {
					if f.Verdict != model.Forward {
						t.Fatalf("%v has no endpoints: %v", key, f)
					}
				}
			}
		}
		for len(q.ring) > 0 {
			pieces.Update(q.take(1+random.IntN(30), time.Now(), anyone).batch)
		}
		want, _, _ := whole.Update(service.Batch{})
		if got, _, _ := pieces.Update(service.Batch{}); got.String() != want.String() {
			t.Fatalf("the difference is %+v", model.Diff(got, want))
		}
	}
}
