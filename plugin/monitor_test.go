package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/recorder"
)

// tellAll has a monitor tell events, and returns those that it prints.
func tellAll(service string, verdicts []string, f func(*monitor)) (got []recorder.Event) {
	out := func(e recorder.Event) error {
		got = append(got, e)
		return nil
	}
	f(newMonitor(out, service, verdicts))
	return got
}

func TestMonitor_filters(t *testing.T) {
	events := []recorder.Event{
		{Kind: recorder.Monitor, Message: "first"},
		{Kind: recorder.Rows, Service: "default/web"},
		{Kind: recorder.Connection, Service: "default/web:http", Verdict: recorder.Forwarded},
		{Kind: recorder.Refused, Service: "default/web:http", Verdict: recorder.Dropped},
		{Kind: recorder.Refused, Service: "default/web2:http", Verdict: recorder.Rejected},
		{Kind: recorder.Problem, Details: map[string]string{"object": "Service default/web"}},
		{Kind: recorder.Info},
	}
	for _, c := range []struct{ service, verdicts, want string }{
		{"", "", "[0 1 2 3 4 5 6]"},
		{"default/web", "", "[0 1 2 3 5]"},
		{"default/web:http", "", "[0 2 3]"},
		{"", "refused,dropped", "[0 3 4]"},
		{"default/web", "forwarded", "[0 2]"},
		{"default/nothing", "refused", "[0]"},
		{"default/web2", "refused,dropped", "[0 4]"},
	} {
		var verdicts []string
		if c.verdicts != "" {
			verdicts = strings.Split(c.verdicts, ",")
		}
		got := tellAll(c.service, verdicts, func(m *monitor) {
			for i, e := range events {
				e.Count = i
				if err := m.tell(e); err != nil {
					t.Fatal(err)
				}
			}
		})
		var which []int
		for _, e := range got {
			which = append(which, e.Count)
		}
		if fmt.Sprint(which) != c.want {
			t.Errorf("%+v: %v", c, which)
		}
	}
}

// TestMonitor_rate: a busy namespace has its share of the lines, others go on, and it says how many lines it left out.
func TestMonitor_rate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := tellAll("", nil, func(m *monitor) {
			for range 1000 {
				_ = m.tell(recorder.Event{Kind: recorder.Connection, Service: "busy/web"})
			}
			_ = m.tell(recorder.Event{Kind: recorder.Connection, Service: "quiet/web"})
			bubble.Pass(time.Second)
			_ = m.tellLeftOut()
			_ = m.tell(recorder.Event{Kind: recorder.Connection, Service: "busy/web"})
		})
		n := len(got)
		if n != maxLines+3 || got[maxLines].Service != "quiet/web" || got[n-1].Service != "busy/web" {
			t.Fatalf("%d lines", n)
		}
		if e := got[n-2]; e.Kind != recorder.LeftOut || e.Count != 1000-maxLines || !strings.Contains(e.Message, "busy") {
			t.Errorf("%+v", e)
		}
	})
}

// TestSampler: what a proxy has counted becomes events, with the Services of its rows.
func TestSampler(t *testing.T) {
	at := netip.MustParseAddr("10.96.0.10")
	row := func(port uint16, v model.Verdict, why dataplane.Reason, n uint64) dataplane.Refused {
		return dataplane.Refused{Addr: at, Port: port, Protocol: model.TCP, Verdict: v, Reason: why, Connections: n}
	}
	const none, noLocal = dataplane.NoEndpoints, dataplane.NoLocalEndpoints
	c := dataplane.Counters{
		Refused: []dataplane.Refused{row(80, model.Reject, none, 5), row(81, model.Drop, noLocal, 1)},
		Served:  []dataplane.Served{{Pool: model.PoolID{Service: "default/web"}, Backend: netip.MustParseAddrPort("10.244.1.2:8080")}},
	}
	s := &sampler{ask: func(context.Context, string) ([]byte, error) {
		return []byte(`
backend default/web cluster 10.244.1.2:8080
frontend 10.96.0.10:80/tcp any reject default/web
frontend 10.96.0.10:81/tcp internal drop default/web:b
frontend 10.96.0.10:82/tcp any forward default/web cluster snat never allow 10.0.0.0/8
frontend 10.96.0.10:83/tcp any forward default/web cluster snat never
`), nil
	}}
	s.get = func(_ context.Context, question string, to any) error {
		if question == "/status" {
			return json.Unmarshal([]byte(`{"plane":"userspace"}`), to)
		}
		text, err := json.Marshal(c)
		return errors.Join(err, json.Unmarshal(text, to))
	}
	s.sample(t.Context())
	if len(s.events) != 1 || !strings.Contains(s.events[0].Message, "data plane userspace") {
		t.Errorf("what was counted before is told, or not the data plane: %+v", s.events)
	}
	c.Refused = []dataplane.Refused{
		row(80, model.Reject, none, 7), row(81, model.Drop, noLocal, 2), row(82, model.Drop, dataplane.SourceNotAllowed, 1),
		row(83, model.Reject, dataplane.TableFull, 1), row(0, model.Reject, dataplane.NoServicePort, 1),
		{Verdict: model.Drop, Reason: dataplane.NoServicePort, Connections: 4},
		{Verdict: model.Drop, Reason: dataplane.SourceNotAllowed, Connections: 2},
	}
	c.Served[0].Connections = 3
	s.events, s.due = nil, time.Time{}
	s.sample(t.Context())
	var got []string
	for _, e := range s.events {
		got = append(got, fmt.Sprint(e.Kind, "|", e.Service, "|", e.Verdict, "|", e.Message))
	}
	want := []string{
		"refused|default/web|refused|2 connections to 10.96.0.10:80/tcp refused: no endpoint is ready",
		"refused|default/web:b|dropped|1 connection to 10.96.0.10:81/tcp dropped: no endpoint on this node is ready",
		"refused|default/web|dropped|1 connection to 10.96.0.10:82/tcp dropped: the client's address is not allowed",
		"refused|default/web|refused|1 connection to 10.96.0.10:83/tcp refused: a limit was reached",
		"refused||refused|1 connection to 10.96.0.10 refused: no Service has that address and port",
		"refused||dropped|4 connections to addresses of Services dropped: no Service has that address and port",
		"refused||dropped|2 connections to addresses of Services dropped: the client's address is not allowed",
		"connection|default/web|forwarded|3 connections: backend 10.244.1.2:8080",
	}
	if runtime.GOOS == "windows" { // whose data plane counts no connections
		want = want[:len(want)-1]
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
