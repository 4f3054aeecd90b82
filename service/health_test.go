package service_test

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

// healthCluster is a Service with four backends in two zones, and options by annotations.
const healthCluster = `
kind: Service
metadata: {name: web, namespace: shop, annotations: {%s}}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
---
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 80}]
endpoints:
- {addresses: [10.244.1.1], zone: here%s}
- {addresses: [10.244.1.2], zone: here%s}
- {addresses: [10.244.1.3], zone: far%s}
- {addresses: [10.244.1.4], zone: far%s}
`

// health plays outcomes to a Table that learns five times a second, and writes down each change of weights.
type health struct {
	table   *service.Table
	state   *model.State
	options service.Options
	now     time.Time
	watch   bool // answers are told
	shares  string
	changes []string
}

func newHealth(t *testing.T, mode service.HealthMode, annotations string, hints bool) *health {
	t.Helper()
	h := &health{options: defaultOptions(), now: time.Date(2026, 1, 2, 10, 0, 0, 0, time.UTC)}
	h.options.Health = service.Health{
		Mode: mode, Failures: 3, Floor: 50, Time: 5 * time.Second, MaxTime: 5 * time.Minute, Slow: 10 * time.Second,
	}
	h.table = newTable(t, h.options)
	zone := [4]any{"", "", "", ""}
	if hints {
		here, far := ", hints: {forZones: [{name: zone-1}]}", ", hints: {forZones: [{name: zone-2}]}"
		zone = [4]any{here, here, far, far}
	}
	objects := readObjects(t, fmt.Appendf(nil, healthCluster, append([]any{annotations}, zone[:]...)...))
	objects.Node = testNode()
	objects.Node.Zone = "zone-1"
	h.state, _, _ = h.table.Update(objects)
	h.note()
	return h
}

// play runs a script for a time: "FROM-TO CLIENT RESULT BACKEND", in seconds, an outcome in each fifth of a second.
func (h *health) play(t *testing.T, seconds float64, script string) {
	t.Helper()
	begin := h.now
	type line struct {
		from, to       float64
		client, result string
		backend        int
	}
	var lines []line
	for text := range strings.Lines(strings.TrimSpace(script)) {
		var l line
		if _, err := fmt.Sscanf(strings.TrimSpace(text), "%g-%g %s %s %d", &l.from, &l.to, &l.client, &l.result, &l.backend); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		lines = append(lines, l)
	}
	results := map[string]model.Result{"answered": model.Answered, "unanswered": model.Unanswered, "refused": model.Refused}
	for tick := range int(seconds * 5) {
		at := float64(tick) / 5
		var outcomes []model.Outcome
		for _, l := range lines {
			weight := h.weight(l.backend)
			if l.result == "accepts" || at < l.from || at >= l.to || weight == 0 || results[l.result] == model.Answered && !h.watch {
				continue
			}
			outcomes = append(outcomes, model.Outcome{
				To: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: model.TCP, Client: addr(l.client),
				Backend: netip.AddrPortFrom(backendAddr(l.backend), 80), Result: results[l.result],
			})
		}
		h.now = begin.Add(time.Duration(at * float64(time.Second)))
		for _, ask := range h.table.Asks(100) { // answered as any client would be
			ask.Accepted = slices.ContainsFunc(lines, func(l line) bool {
				return at >= l.from && at < l.to && (l.result == "answered" || l.result == "accepts") && ask.Backend.Addr() == backendAddr(l.backend)
			})
			h.table.Asked(h.now, ask)
		}
		h.watch, _ = h.table.Learn(h.now, outcomes)
		h.state, _, _ = h.table.Update(service.Batch{})
		h.note()
	}
	h.now = begin.Add(time.Duration(seconds * float64(time.Second)))
}

func backendAddr(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, 1, byte(n)}) }

func (h *health) weight(backend int) uint16 {
	b, _ := h.state.Pools[model.PoolID{Service: "shop/web"}].At(netip.AddrPortFrom(backendAddr(backend), 80))
	return b.Weight
}

func (h *health) note() {
	shares := ""
	for n := 1; n <= 4; n++ {
		shares += fmt.Sprintf(" %d", h.weight(n))
	}
	if shares != h.shares {
		h.shares = shares
		h.changes = append(h.changes, h.now.Format("05.0")+shares)
	}
}

func TestTable_health(t *testing.T) {
	for _, c := range []struct {
		name        string
		mode        service.HealthMode
		annotations string
		hints       bool
		seconds     float64
		script      string
		want        string
	}{
		{name: "a dead backend goes after three failures, and clients try when the agent has in vain, after 5, 10, 20, and 40 s",
			mode: service.HealthEject, seconds: 79,
			script: "1-79 10.0.0.1 unanswered 1\n0-79 10.0.0.1 answered 2\n0-79 10.0.0.2 answered 3",
			want:   "00.0 1 1 1 1|01.4 0 1 1 1|17.0 1 16 16 16|17.2 0 1 1 1"},
		{name: "it comes back slowly", mode: service.HealthEject, seconds: 30,
			script: "1-5 10.0.0.1 refused 1\n5-30 10.0.0.1 answered 1\n0-30 10.0.0.1 answered 2\n0-30 10.0.0.2 answered 3",
			want:   "00.0 1 1 1 1|01.4 0 1 1 1|06.6 1 16 16 16|06.8 2 16 16 16|10.2 4 16 16 16|13.6 8 16 16 16|17.0 1 1 1 1"},
		{name: "without slow start", mode: service.HealthEject, annotations: "fairlead.dev/slow-start: 0s", seconds: 30,
			script: "1-5 10.0.0.1 refused 1\n5-30 10.0.0.1 answered 1\n0-30 10.0.0.1 answered 2\n0-30 10.0.0.2 answered 3",
			want:   "00.0 1 1 1 1|01.4 0 1 1 1|06.6 1 16 16 16|06.8 1 1 1 1"},
		{name: "observing changes nothing", mode: service.HealthObserve, seconds: 10,
			script: "1-10 10.0.0.1 unanswered 1\n0-10 10.0.0.1 answered 2", want: "00.0 1 1 1 1"},
		{name: "an annotation ejects", mode: service.HealthObserve, annotations: "fairlead.dev/backend-health: eject", seconds: 4,
			script: "1-4 10.0.0.1 unanswered 1\n0-4 10.0.0.1 answered 2", want: "00.0 1 1 1 1|01.4 0 1 1 1"},
		{name: "an annotation turns it off", mode: service.HealthEject, annotations: "fairlead.dev/backend-health: 'off'", seconds: 4,
			script: "1-4 10.0.0.1 unanswered 1\n0-4 10.0.0.1 answered 2", want: "00.0 1 1 1 1"},
		{name: "where no backend answers, none is ejected", mode: service.HealthEject, seconds: 10,
			script: "1-10 10.0.0.1 unanswered 1\n1-10 10.0.0.2 unanswered 2\n1-10 10.0.0.3 unanswered 3\n1-10 10.0.0.4 unanswered 4",
			want:   "00.0 1 1 1 1"},
		{name: "one client that no backend answers proves nothing", mode: service.HealthEject, seconds: 10,
			script: "1-10 10.0.0.1 unanswered 1\n0-10 10.0.0.2 answered 2\n0-10 10.0.0.3 answered 3", want: "00.0 1 1 1 1"},
		{name: "two such clients do", mode: service.HealthEject, seconds: 3,
			script: "1-3 10.0.0.1 unanswered 1\n1-3 10.0.0.4 unanswered 1\n0-3 10.0.0.2 answered 2",
			want:   "00.0 1 1 1 1|01.4 0 1 1 1"},
		{name: "failures at a backend that accepts a connection of the agent are the clients' own", mode: service.HealthEject, seconds: 20,
			script: "1-20 10.0.0.1 refused 1\n1-20 10.0.0.4 unanswered 1\n0-20 10.0.0.1 answered 2\n1-20 agent accepts 1",
			want:   "00.0 1 1 1 1"},
		{name: "failures that an answer follows soon, or is followed by, are the clients' own", mode: service.HealthEject, seconds: 4,
			script: "1-1.4 10.0.0.1 unanswered 1\n1-1.4 10.0.0.4 unanswered 1\n1.4-1.6 10.0.0.2 answered 1\n" +
				"1.6-3.2 10.0.0.1 unanswered 1\n1.6-3.2 10.0.0.4 unanswered 1\n0-4 10.0.0.1 answered 2",
			want: "00.0 1 1 1 1"},
		{name: "a backend that answers another client is not dead", mode: service.HealthEject, seconds: 10,
			script: "1-10 10.0.0.1 unanswered 1\n1-10 10.0.0.5 unanswered 1\n0-10 10.0.0.1 answered 2\n0-10 10.0.0.2 answered 1",
			want:   "00.0 1 1 1 1"},
		{name: "a floor of half stays, and where more are dead all do", mode: service.HealthEject, seconds: 8,
			script: "1-8 10.0.0.1 unanswered 1\n1-8 10.0.0.2 unanswered 2\n4-8 10.0.0.2 unanswered 3\n0-8 10.0.0.1 answered 4\n0-8 10.0.0.2 answered 4",
			want:   "00.0 1 1 1 1|01.4 0 0 1 1|04.4 1 1 1 1"},
		{name: "when all come back, the first that answers condemns no other", mode: service.HealthEject, seconds: 10,
			script: "1-6 10.0.0.1 unanswered 1\n1-6 10.0.0.2 unanswered 2\n1-6 10.0.0.2 unanswered 1\n1-6 10.0.0.1 unanswered 3\n" +
				"1-6.3 10.0.0.4 unanswered 4\n6-10 10.0.0.1 answered 2\n6.2-10 10.0.0.1 answered 1",
			want: "00.0 1 1 1 1"},
		{name: "those that do not come back go", mode: service.HealthEject, seconds: 10,
			script: "1-6 10.0.0.1 unanswered 1\n1-6 10.0.0.2 unanswered 2\n1-6 10.0.0.2 unanswered 3\n" +
				"6-10 10.0.0.1 answered 2\n6-10 10.0.0.1 unanswered 3",
			want: "00.0 1 1 1 1|06.4 1 1 0 1"},
		{name: "a dead zone spills", mode: service.HealthEject, hints: true, seconds: 3,
			script: "1-3 10.0.0.1 unanswered 1\n1-3 10.0.0.1 unanswered 2\n1-3 10.0.0.1 answered 3\n1-3 10.0.0.2 answered 4",
			want:   "00.0 1 1 0 0|01.4 1 1 1 1|01.6 0 0 1 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHealth(t, c.mode, c.annotations, c.hints)
			h.play(t, c.seconds, c.script)
			if got := strings.Join(h.changes, "|"); got != c.want {
				t.Errorf("shares of the backends:\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

// TestTable_judges: outcomes are looked at as long as a Service's annotation wants it.
func TestTable_judges(t *testing.T) {
	for annotations, want := range map[string]bool{
		"": false, "fairlead.dev/backend-health: eject": true, "fairlead.dev/backend-health: 'off'": false,
	} {
		h := newHealth(t, service.HealthOff, annotations, false)
		if h.table.Judges() != want {
			t.Errorf("with %q outcomes matter: %t", annotations, !want)
		}
		var b service.Batch
		b.Services.Set(service.Name{Namespace: "shop", Name: "web"}, nil)
		h.table.Update(b)
		if h.table.Judges() {
			t.Errorf("after a Service with %q, outcomes matter", annotations)
		}
	}
}

// Whatever outcomes come, the floor is kept and the last backend stays.
func TestTable_healthFloor(t *testing.T) {
	r := rand.New(rand.NewPCG(sample.Seed(t), 0))
	h := newHealth(t, service.HealthEject, "", false)
	for range 3000 {
		h.now = h.now.Add(time.Duration(r.IntN(1000)) * time.Millisecond)
		var outcomes []model.Outcome
		for range r.IntN(8) {
			outcomes = append(outcomes, model.Outcome{
				To: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: model.TCP, Client: backendAddr(100 + r.IntN(3)),
				Backend: netip.AddrPortFrom(backendAddr(1+r.IntN(4)), 80), Result: model.Result(r.IntN(3)),
			})
		}
		h.table.Learn(h.now, outcomes)
		h.state, _, _ = h.table.Update(service.Batch{})
		if err := h.state.Validate(); err != nil {
			t.Fatal(err)
		}
		in := 0
		for n := 1; n <= 4; n++ {
			if h.weight(n) > 0 {
				in++
			}
		}
		if in < 2 {
			t.Fatalf("%d backends are left of four:\n%s", in, h.state)
		}
	}
}
