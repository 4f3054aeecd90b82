package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/recorder"
	"fairlead.dev/fairlead/said"
)

const (
	// sampleInterval is how long a connection waits to be told. Counters are read once in countInterval, and less often
	// where reading them takes long: at most a share of the time.
	sampleInterval = 250 * time.Millisecond
	countInterval  = time.Second
	countShare     = 50
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
	daemon *Daemon
	plane  string // of which it has told what it can tell
	flows  *flowWatch

	due     time.Time         // of the counters
	counted bool              // the plane counts connections, and no flows tell of them
	before  map[string]uint64 // what the counters were; nil: they are not known
	events  []recorder.Event  // of the sample at hand
}

// begin tells how it learns of connections of another plane.
func (s *sampler) begin(plane string) {
	s.flows.close()
	var err error
	s.plane, s.before, s.due = plane, nil, time.Time{}
	s.flows, s.counted, err = s.daemon.node.watchFlows(plane)
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

// sample returns what happened since the last one. It asks the loop, which owns the rows. When that is busy, the next
// sample has what this one lacks.
func (s *sampler) sample(ctx context.Context) []recorder.Event {
	s.events = nil
	if plane := s.daemon.mode(); plane != s.plane {
		s.begin(plane)
	}
	if s.flows == nil && time.Now().Before(s.due) {
		return s.events
	}
	soon, cancel := context.WithTimeout(ctx, sampleInterval)
	defer cancel()
	_ = s.daemon.engine.Do(soon, func(_ context.Context, v engine.View) error {
		s.takeFlows(v.State)
		if now := time.Now(); !now.Before(s.due) {
			s.count(ctx, v)
			s.due = now.Add(max(countInterval, countShare*time.Since(now)))
		}
		return nil
	})
	return s.events
}

// takeFlows tells of the flows to Services.
func (s *sampler) takeFlows(state *model.State) {
	all, missed := s.flows.take()
	for at, o := range all {
		row, ok := rowOf(state, at.to)
		if !ok { // another program translates
			continue
		}
		for _, client := range o.clients {
			s.forwarded(row.Service, client.String(), destination(at.to), at.backend, 1)
		}
		s.forwarded(row.Service, "", destination(at.to), at.backend, o.count-len(o.clients))
	}
	if missed {
		s.add(recorder.Event{Kind: recorder.LeftOut, Message: "connections began faster than they could be followed"})
	}
}

// rowOf is the row of an address for clients outside of the cluster, or else for those in it.
func rowOf(state *model.State, key model.Key) (row model.Frontend, ok bool) {
	if row, ok = state.Frontends[key]; !ok {
		key.Scope = model.Internal
		row, ok = state.Frontends[key]
	}
	return row, ok
}

// forwarded tells of n connections to a backend: that of a client, or those that are not told one by one.
func (s *sampler) forwarded(service, client, to string, backend netip.AddrPort, n int) {
	if n == 0 {
		return
	}
	what := cmp.Or(client, said.Count(n, "connection"))
	if to != "" {
		what += " to " + to
	}
	s.add(recorder.Event{Kind: recorder.Connection, Verdict: recorder.Forwarded, Service: service, Client: client,
		Destination: to, Backends: []string{backend.String()}, Count: n, Message: what + ": backend " + backend.String()})
}

func destination(k model.Key) string { return fmt.Sprintf("%s/%s", k.AddrPort(), k.Protocol) }

// count tells by how much counters have grown.
func (s *sampler) count(ctx context.Context, v engine.View) {
	counters, err := v.Plane.Counters(ctx)
	if err != nil {
		if s.before == nil && errors.Is(err, errors.ErrUnsupported) {
			s.before = map[string]uint64{}
			s.add(recorder.Event{Kind: recorder.Monitor,
				Message: fmt.Sprintf("data plane %s does not count what it refuses or drops", s.plane)})
		}
		return
	}
	now := make(map[string]uint64, len(counters.Refused))
	growth := func(key string, n uint64) int {
		now[key] = n
		if was := s.before[key]; s.before != nil && n > was {
			return int(n - was)
		}
		return 0
	}
	for _, x := range counters.Refused {
		if n := growth(fmt.Sprint(x.By(), x.Verdict, x.Reason), x.Connections); n > 0 {
			s.refused(v.State, x, n)
		}
	}
	for _, x := range counters.Served {
		if s.counted && x.Backend.IsValid() {
			s.forwarded(x.Pool.Service, "", "", x.Backend, growth(x.Pool.String()+x.Backend.String(), x.Connections))
		}
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
func (s *sampler) refused(state *model.State, x dataplane.Refused, n int) {
	e := recorder.Event{Kind: recorder.Refused, Verdict: recorder.Rejected, Count: n, Destination: x.By()}
	if x.Verdict == model.Drop {
		e.Verdict = recorder.Dropped
	}
	if !x.Addr.IsValid() {
		e.Destination = "addresses of Services"
	}
	row, _ := rowOf(state, model.Key{Addr: x.Addr, Port: x.Port, Protocol: x.Protocol})
	e.Service = row.Service
	e.Message = fmt.Sprintf("%s to %s %s: %s", said.Count(n, "connection"), e.Destination, e.Verdict, reasons[x.Reason])
	s.add(e)
}
