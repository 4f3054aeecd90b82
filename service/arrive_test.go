package service_test

import (
	"fmt"
	"strings"
	"testing"

	"fairlead.dev/fairlead/service"
)

// ready has these backends be ready, and no other endpoint.
func (h *health) ready(t *testing.T, backends string) {
	t.Helper()
	text := strings.Builder{}
	text.WriteString(`
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 80}]
endpoints:
`)
	for _, n := range backends {
		fmt.Fprintf(&text, "- {addresses: [10.244.1.%c]}\n", n)
	}
	h.state, _, _ = h.table.Update(readObjects(t, []byte(text.String())))
	h.note()
}

func TestTable_slowStart(t *testing.T) {
	type step struct {
		ready   string // backends from now on
		seconds float64
		script  string
	}
	const slow = "fairlead.dev/slow-start: 3s"
	for _, c := range []struct {
		name        string
		mode        service.HealthMode
		annotations string
		steps       []step
		want        string
	}{
		{name: "the share of a new endpoint grows", mode: service.HealthEject, annotations: slow,
			steps: []step{{ready: "123", seconds: 2}, {ready: "1234", seconds: 5}},
			want:  "00.0 1 1 1 1|00.0 1 1 1 0|02.0 16 16 16 2|03.0 16 16 16 4|04.0 16 16 16 8|05.0 1 1 1 1"},
		{name: "in every mode", mode: service.HealthOff, annotations: slow,
			steps: []step{{ready: "123", seconds: 2}, {ready: "1234", seconds: 5}},
			want:  "00.0 1 1 1 1|00.0 1 1 1 0|02.0 16 16 16 2|03.0 16 16 16 4|04.0 16 16 16 8|05.0 1 1 1 1"},
		{name: "the configured time does not slow down new endpoints", mode: service.HealthEject,
			steps: []step{{ready: "123", seconds: 2}, {ready: "1234", seconds: 5}},
			want:  "00.0 1 1 1 1|00.0 1 1 1 0|02.0 1 1 1 1"},
		{name: "nor does a time of zero", mode: service.HealthEject, annotations: "fairlead.dev/slow-start: 0s",
			steps: []step{{ready: "123", seconds: 2}, {ready: "1234", seconds: 5}},
			want:  "00.0 1 1 1 1|00.0 1 1 1 0|02.0 1 1 1 1"},
		{name: "the first endpoints have full shares", mode: service.HealthEject, annotations: slow,
			steps: []step{{ready: "", seconds: 2}, {ready: "12", seconds: 5}},
			want:  "00.0 1 1 1 1|00.0 0 0 0 0|02.0 1 1 0 0"},
		{name: "one that becomes ready again is new", mode: service.HealthObserve, annotations: slow,
			steps: []step{{ready: "12", seconds: 1}, {ready: "1", seconds: 1}, {ready: "12", seconds: 5}},
			want:  "00.0 1 1 1 1|00.0 1 1 0 0|01.0 1 0 0 0|02.0 16 2 0 0|03.0 16 4 0 0|04.0 16 8 0 0|05.0 1 1 0 0"},
		{name: "where the others leave, the new ones share alike", mode: service.HealthOff, annotations: slow,
			steps: []step{{ready: "12", seconds: 1}, {ready: "1234", seconds: 1}, {ready: "34", seconds: 1}},
			want:  "00.0 1 1 1 1|00.0 1 1 0 0|01.0 16 16 2 2|02.0 0 0 2 2|02.0 0 0 4 4"},
		{name: "a dead new endpoint is ejected", mode: service.HealthEject, annotations: slow,
			steps: []step{{ready: "123", seconds: 1},
				{ready: "1234", seconds: 3, script: "0-3 10.0.0.1 unanswered 4\n0-3 10.0.0.1 answered 2"}},
			want: "00.0 1 1 1 1|00.0 1 1 1 0|01.0 16 16 16 2|01.4 1 1 1 0"},
		{name: "in mode observe it keeps what a new one has", mode: service.HealthObserve, annotations: slow,
			steps: []step{{ready: "123", seconds: 1},
				{ready: "1234", seconds: 5, script: "0-5 10.0.0.1 unanswered 4\n0-5 10.0.0.1 answered 2"}},
			want: "00.0 1 1 1 1|00.0 1 1 1 0|01.0 16 16 16 2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHealth(t, c.mode, c.annotations, false)
			for _, s := range c.steps {
				h.ready(t, s.ready)
				h.play(t, s.seconds, s.script)
			}
			if got := strings.Join(h.changes, "|"); got != c.want {
				t.Errorf("shares of the backends:\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

// A new Table, as after a restart, takes all endpoints for known ones.
func TestTable_slowStartAfterRestart(t *testing.T) {
	h := newHealth(t, service.HealthOff, "fairlead.dev/slow-start: 3s", false)
	h.play(t, 1, "")
	if got := strings.Join(h.changes, "|"); got != "00.0 1 1 1 1" || h.table.Rises() {
		t.Errorf("shares of the backends:\n%s", got)
	}
}
