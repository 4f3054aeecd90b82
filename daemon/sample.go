package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

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

// opened are connections to one destination.
type opened struct {
	each     []connection // the first few
	backends map[netip.AddrPort]int
}

type connection struct{ client, backend netip.AddrPort }

// sampler tells a monitor of the connections that clients open, by what the plane in force has: flows of connection
// tracking, and the growth of its counters.
type sampler struct {
	daemon *Daemon
	plane  string // of which it has told what it can tell
	flows  *flowWatch

	due     time.Time         // of the counters
	counted bool              // the plane counts connections, and no flows tell of them
	before  map[string]uint64 // what the counters were; nil: they are not known
	events  []recorder.Event  // of the sample at hand
}

// run passes events to send until ctx ends.
func (s *sampler) run(ctx context.Context, send func(recorder.Event)) {
	defer func() { s.flows.close() }()
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	tell := func() {
		for _, e := range s.events {
			e.Time = time.Now()
			send(e)
		}
		s.events = nil
	}
	for ctx.Err() == nil {
		if plane := s.daemon.mode(); plane != s.plane {
			s.begin(plane)
			tell()
		}
		s.sample(ctx)
		tell()
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
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
	s.events = append(s.events, recorder.Event{Kind: recorder.Monitor,
		Message: fmt.Sprintf("data plane %s; new connections: %s", plane, how)})
}

// sample asks the loop, which owns the rows. When it is busy, the next sample has what this one lacks.
func (s *sampler) sample(ctx context.Context) {
	if now := time.Now(); now.Before(s.due) && s.flows == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_ = s.daemon.engine.Do(ctx, func(ctx context.Context, v engine.View) error {
		s.takeFlows(v.State)
		if now := time.Now(); !now.Before(s.due) {
			s.count(ctx, v)
			s.due = now.Add(max(countInterval, countShare*time.Since(now)))
		}
		return nil
	})
}

// takeFlows tells of the flows to Services.
func (s *sampler) takeFlows(state *model.State) {
	all, missed := s.flows.take()
	for key, o := range all {
		row, ok := state.Frontends[key]
		if !ok {
			key.Scope = model.Internal
			row, ok = state.Frontends[key]
		}
		if !ok { // another program translates
			continue
		}
		to := destination(key)
		for _, c := range o.each {
			s.events = append(s.events, recorder.Event{Kind: recorder.Connection, Verdict: recorder.Forwarded,
				Service: row.Service, Client: c.client.String(), Destination: to, Backends: []string{c.backend.String()},
				Count: 1, Message: fmt.Sprintf("%s to %s: backend %s", c.client, to, c.backend)})
			o.backends[c.backend]--
		}
		for _, b := range slices.SortedFunc(maps.Keys(o.backends), netip.AddrPort.Compare) {
			s.grown(row.Service, to, b, o.backends[b])
		}
	}
	if missed {
		s.events = append(s.events, recorder.Event{Kind: recorder.LeftOut,
			Message: "connections began faster than they could be followed"})
	}
}

// grown tells of connections that are not told one by one.
func (s *sampler) grown(service, to string, backend netip.AddrPort, n int) {
	if n == 0 {
		return
	}
	e := recorder.Event{Kind: recorder.Connection, Verdict: recorder.Forwarded, Service: service, Destination: to,
		Count: n, Backends: []string{backend.String()}, Message: said.Count(n, "connection")}
	if to != "" {
		e.Message += " to " + to
	}
	e.Message += ": backend " + backend.String()
	s.events = append(s.events, e)
}

func destination(k model.Key) string { return fmt.Sprintf("%s/%s", k.AddrPort(), k.Protocol) }

// count tells by how much counters have grown.
func (s *sampler) count(ctx context.Context, v engine.View) {
	counters, err := v.Plane.Counters(ctx)
	if err != nil {
		if s.before == nil && errors.Is(err, errors.ErrUnsupported) {
			s.before = map[string]uint64{}
			s.events = append(s.events, recorder.Event{Kind: recorder.Monitor,
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
		key := model.Key{Addr: x.Addr, Port: x.Port, Protocol: x.Protocol}
		if n := growth(fmt.Sprint(key, x.Verdict), x.Connections); n > 0 {
			s.refused(v.State, key, x.Verdict, n)
		}
	}
	for _, x := range counters.Served {
		if !s.counted || !x.Backend.IsValid() {
			continue
		}
		s.grown(x.Pool.Service, "", x.Backend, growth(x.Pool.String()+x.Backend.String(), x.Connections))
	}
	s.before = now
}

// refused tells of connections that a row refuses or drops, and why.
func (s *sampler) refused(state *model.State, key model.Key, verdict model.Verdict, n int) {
	e := recorder.Event{Kind: recorder.Refused, Verdict: recorder.Rejected, Count: n, Destination: destination(key)}
	if verdict == model.Drop {
		e.Verdict = recorder.Dropped
	}
	row, ok := state.Frontends[key]
	if internal := key; !ok {
		internal.Scope = model.Internal
		row, ok = state.Frontends[internal]
	}
	why := ""
	switch {
	case !key.Addr.IsValid():
		e.Destination, why = "addresses of Services", "no Service has them, or their port"
	case key.Port == 0:
		e.Destination, why = key.Addr.String(), "the Service has no such port"
	case !ok:
		why = "the row is gone"
	case row.Verdict == model.Forward && verdict == model.Drop && row.Allow != nil:
		why = "the client's address is not allowed"
	case row.Verdict == model.Forward:
		why = "a limit was reached"
	case row.Verdict == model.Drop:
		why = "no endpoint on this node is ready"
	default:
		why = "no endpoint is ready"
	}
	e.Service = row.Service
	e.Message = strings.Join([]string{said.Count(n, "connection"), "to", e.Destination, e.Verdict + ":", why}, " ")
	s.events = append(s.events, e)
}
