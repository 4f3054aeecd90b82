package plugin

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/recorder"
	"fairlead.dev/fairlead/said"
)

const (
	// sampleInterval is how long a connection waits to be told.
	sampleInterval = 250 * time.Millisecond
	// The proxy is asked for counters once in askInterval, and for the rows if they have changed. It is asked less often
	// where the answer takes long: at most a share of the time.
	askInterval = time.Second
	askShare    = 50
)

// way is from a destination of clients to what answers them.
type way struct {
	to      model.Key
	backend netip.AddrPort
}

// opened are connections of one way.
type opened struct {
	clients []netip.AddrPort // the first few
	count   int
}

// sampler finds the connections that clients open, by what the plane in force has: flows of connection tracking, and
// the growth of its counters.
type sampler struct {
	ask   func(ctx context.Context, question string) ([]byte, error) // of the running proxy
	get   func(ctx context.Context, question string, to any) error
	plane string // of which it has told what it can tell
	flows *flowWatch

	due     time.Time         // of the counters
	counted bool              // the plane counts connections, and no flows tell of them
	before  map[string]uint64 // what the counters were; nil: they are not known
	events  []recorder.Event  // of the sample at hand

	rows    *model.State // as they were last; nil: they are not known
	changed atomic.Bool  // since then
	rowsDue time.Time    // they are not asked for earlier
}

// run passes events to a monitor until ctx ends.
func (s *sampler) run(ctx context.Context, to chan<- []recorder.Event) {
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	defer func() { s.flows.close() }()
	for {
		s.events = nil
		s.sample(ctx)
		select {
		case to <- s.events:
		case <-ctx.Done():
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// sample finds what happened since the last one. If the proxy does not answer, the next sample has what is missing.
func (s *sampler) sample(ctx context.Context) {
	if now := time.Now(); !now.Before(s.due) {
		var r engine.Report
		if s.get(ctx, "/status", &r) == nil && r.Plane != "" && r.Plane != s.plane {
			s.begin(r.Plane)
		}
		s.count(ctx)
		s.due = now.Add(max(askInterval, askShare*time.Since(now)))
	}
	s.takeFlows(ctx)
}

// begin tells how it learns of connections of another plane.
func (s *sampler) begin(plane string) {
	s.flows.close()
	var err error
	s.plane, s.before = plane, nil
	s.flows, s.counted, err = watchFlows(plane)
	how := "each, from connection tracking"
	switch {
	case err != nil && !s.counted:
		how = "none: " + err.Error()
	case s.counted && s.flows != nil:
		how = "those of packets from connection tracking, of others their number each second"
	case s.counted:
		how = "their number each second"
	}
	s.add(recorder.Event{Kind: recorder.Monitor, Message: fmt.Sprintf("data plane %s; new connections: %s", plane, how)})
}

func (s *sampler) add(e recorder.Event) {
	e.Time = time.Now()
	s.events = append(s.events, e)
}

// takeFlows tells of the flows to Services.
func (s *sampler) takeFlows(ctx context.Context) {
	all, missed := s.flows.take()
	for at, o := range all {
		of, ok := s.service(ctx, at.to)
		if !ok { // another program translates
			continue
		}
		to := fmt.Sprintf("%s/%s", at.to.AddrPort(), at.to.Protocol)
		e := recorder.Event{Service: of, Destination: to, Backends: []string{at.backend.String()}}
		for _, client := range o.clients {
			s.forwarded(e, client.String(), 1)
		}
		s.forwarded(e, "", o.count-len(o.clients))
	}
	if missed {
		s.add(recorder.Event{Kind: recorder.LeftOut, Message: "connections began faster than they could be followed"})
	}
}

// service is that of a row. A row that it does not know may be new.
func (s *sampler) service(ctx context.Context, key model.Key) (name string, ok bool) {
	if !s.changed.Load() {
		if name, ok = s.known(key); ok {
			return name, true
		}
	}
	if now := time.Now(); !now.Before(s.rowsDue) {
		s.changed.Store(false)
		if text, err := s.ask(ctx, "/dump"); err == nil {
			s.rows, _ = model.ParseState(string(text)) // the proxy has written it
		}
		s.rowsDue = now.Add(max(askInterval, askShare*time.Since(now)))
	}
	return s.known(key)
}

func (s *sampler) known(key model.Key) (name string, ok bool) {
	if s.rows == nil {
		return "", false
	}
	for _, key.Scope = range []model.Scope{model.Any, model.Internal} {
		if row, ok := s.rows.Frontends[key]; ok {
			return row.Service, true
		}
	}
	return "", false
}

// forwarded tells of n connections to a backend: that of a client, or those that are not told one by one.
func (s *sampler) forwarded(e recorder.Event, client string, n int) {
	if n == 0 {
		return
	}
	e.Kind, e.Verdict, e.Client, e.Count = recorder.Connection, recorder.Forwarded, client, n
	e.Message = cmp.Or(client, said.Count(n, "connection"))
	if e.Destination != "" {
		e.Message += " to " + e.Destination
	}
	e.Message += ": backend " + e.Backends[0]
	s.add(e)
}

// counters are what a plane has counted, as the proxy says it.
type counters struct {
	Served []struct {
		Pool, Backend string
		Connections   uint64
	}
	Refused []refused
}

type refused struct {
	By, Verdict string
	Reason      dataplane.Reason
	Connections uint64
}

// count tells by how much counters have grown.
func (s *sampler) count(ctx context.Context) {
	var c counters
	if err := s.get(ctx, "/counters?format=json", &c); err != nil {
		if s.before == nil && s.plane != "" && ctx.Err() == nil {
			s.before = map[string]uint64{}
			s.add(recorder.Event{Kind: recorder.Monitor,
				Message: fmt.Sprintf("data plane %s does not say what it refuses or drops: %s", s.plane, err)})
		}
		return
	}
	now := make(map[string]uint64, len(c.Refused))
	growth := func(key string, n uint64) int {
		now[key] = n
		if was := s.before[key]; s.before != nil && n > was {
			return int(n - was)
		}
		return 0
	}
	for _, x := range c.Refused {
		if n := growth(fmt.Sprint(x.By, x.Verdict, x.Reason), x.Connections); n > 0 {
			s.refused(ctx, x, n)
		}
	}
	for _, x := range c.Served {
		if _, err := netip.ParseAddrPort(x.Backend); err != nil || !s.counted { // several backends together
			continue
		}
		of, _, _ := strings.Cut(x.Pool, " ")
		e := recorder.Event{Service: of, Backends: []string{x.Backend}}
		s.forwarded(e, "", growth(x.Pool+x.Backend, x.Connections))
	}
	s.before = now
}

// reasons are those of planes, for people.
var reasons = map[dataplane.Reason]string{
	dataplane.NoEndpoints:      "no endpoint is ready",
	dataplane.NoLocalEndpoints: "no endpoint on this node is ready",
	dataplane.SourceNotAllowed: "the client's address is not allowed",
	dataplane.NoServicePort:    "no Service has that address and port",
	dataplane.TableFull:        "a limit was reached",
	"":                         "the kernel has not taken what should serve them",
}

// refused tells of connections that a row refuses or drops, and why.
func (s *sampler) refused(ctx context.Context, x refused, n int) {
	e := recorder.Event{Kind: recorder.Refused, Verdict: recorder.Rejected, Count: n, Destination: x.By}
	if x.Verdict == model.Drop.String() {
		e.Verdict = recorder.Dropped
	}
	address, protocol, row := strings.Cut(x.By, "/")
	if at, err := netip.ParseAddrPort(address); err == nil && row {
		p, _ := model.ParseProtocol(protocol) // as the proxy has written it
		e.Service, _ = s.service(ctx, model.Key{Addr: at.Addr(), Port: at.Port(), Protocol: p})
	} else if _, err := netip.ParseAddr(x.By); err != nil { // all rows together
		e.Destination = "addresses of Services"
	}
	e.Message = fmt.Sprintf("%s to %s %s: %s", said.Count(n, "connection"), e.Destination, e.Verdict, reasons[x.Reason])
	s.add(e)
}
