package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/model"
)

// A virtual server of the kernel and its real servers go through these states:
//
//	wanted ─ set ─► in the kernel ─ no longer wanted: UDP ──────────────────────────────► deleted
//	                      ▲    └─ TCP, SCTP ─► leaving: weight 0 ─ no connections left ──────┘
//	                      └────── wanted again ───┘     (drain.go)    or DrainTimeout
//
// A plan lists requests. Each changes what is held when the kernel has performed it, so that after a refusal the rest
// is known still.

// server is a virtual server in the kernel, or as it should be.
type server struct {
	scheduler    string
	destinations map[netip.AddrPort]uint32 // weights
	// pool is what the pool wants where the kernel holds something else, see shaped; nil: what it holds.
	pool *server
	// order is that in which the kernel lists the real servers; only dh needs it, and then it is ordered.
	order   []netip.AddrPort
	ordered bool
	// leaving are those of the real servers that take no new connections and go when they have none
	// left; the time is when they go in any case, zero: never.
	leaving map[netip.AddrPort]time.Time
}

// servers are the virtual servers of ours.
type servers struct {
	client   *client
	options  Options
	held     map[ipvs.Key]*server
	draining drains
	// deadlines are the plane's, once the servers are.
	deadlines deadlines
	gone      []ipvs.Key // of which there is still a record
	turns     turns
}

// load reads back what the kernel holds of the virtual servers that are ours.
func (s *servers) load(ours func(ipvs.Key) bool) error {
	s.held, s.draining = map[ipvs.Key]*server{}, drains{}
	if err := s.client.fault("ipvs list"); err != nil {
		return err
	}
	counted, err := s.client.Count()
	if err != nil {
		return err
	}
	start := time.Now()
	all, err := s.client.Servers()
	if err != nil {
		return err
	}
	s.turns = turns{others: counted - s.client.Made(), due: listAgain(start, time.Now())}
	for key, found := range all {
		if !ours(key) {
			continue
		}
		destinations, err := s.client.Destinations(key)
		if err != nil {
			return err
		}
		s.held[key] = adopt(found, destinations)
	}
	s.prune()
	return nil
}

func newHeld(scheduler string) *server {
	return &server{
		scheduler: scheduler, destinations: map[netip.AddrPort]uint32{}, leaving: map[netip.AddrPort]time.Time{},
	}
}

// adopt is a virtual server that the kernel lists, whichever program made it. A value that differs from ours in a way
// that server's fields cannot say becomes one that is never wanted, so that it is corrected.
func adopt(found ipvs.Server, destinations []ipvs.Destination) *server {
	held := newHeld(schedulerOf(found))
	held.ordered = held.scheduler == "dh" || held.scheduler == "fo"
	for _, r := range destinations {
		held.destinations[r.Addr] = r.Weight
		if r.Method != ipvs.Masquerade {
			held.destinations[r.Addr] = ^uint32(0)
		}
		if held.ordered {
			held.order = append(held.order, r.Addr)
		}
	}
	return held
}

func schedulerOf(s ipvs.Server) string {
	if s.Flags != ipvs.FlagsOf(s.Scheduler) {
		return fmt.Sprintf("%s with flags %#x", s.Scheduler, s.Flags)
	}
	return s.Scheduler
}

func addressKey(k model.Key) ipvs.Key {
	return ipvs.Key{Addr: k.Addr, Port: k.Port, Protocol: k.Protocol, V6: k.Addr.Is6()}
}

// udp reports whether a virtual server is one of UDP. That of a mark tells by its pool's number, see numbers.
func udp(k ipvs.Key) bool {
	if k.Mark != 0 {
		return k.Mark%2 == 0
	}
	return k.Protocol == model.UDP
}

// backwards orders virtual servers that all go: the reverse of the order in which a process that has no list yet makes
// them.
func backwards(a, b ipvs.Key) int { return b.Compare(a) }

func deletions(keys []ipvs.Key) (requests []ipvs.Request) {
	for _, key := range keys {
		requests = append(requests, ipvs.DeleteServer(key, nil))
	}
	return requests
}

// plan is what leads from the held virtual servers to others: first what is new or changes, then, when
// nothing leads to it any more, what goes.
type plan struct {
	first, last []ipvs.Request
	ended       []ipvs.Key // whose connections may go on, see endAll
}

// set plans a virtual server; nil: none.
func (s *servers) set(key ipvs.Key, want *server, p *plan) {
	held := s.held[key]
	switch {
	case held == nil && want == nil:
		return
	case want == nil:
		s.end(key, held, p)
		return
	}
	made := s.shaped(key, held, want)
	if held == nil {
		held = newHeld(made.scheduler)
		held.ordered = want.scheduler == "dh"
		p.first = append(p.first, ipvs.NewServer(key, made.scheduler, func() { s.held[key] = held }))
	}
	if held.pool = want; made == want {
		held.pool = nil
	}
	// dh refuses clients while there is a real server without weight, so that it comes last.
	if made.scheduler != "dh" {
		held.setScheduler(key, made.scheduler, p)
	}
	for _, addr := range slices.SortedFunc(maps.Keys(made.destinations), netip.AddrPort.Compare) {
		s.setDestination(key, held, ipvs.Destination{Addr: addr, Weight: made.destinations[addr]}, p)
	}
	if made.scheduler == "dh" {
		held.setScheduler(key, made.scheduler, p)
	}
	for _, destination := range slices.SortedFunc(maps.Keys(held.destinations), netip.AddrPort.Compare) {
		if _, wanted := want.destinations[destination]; !wanted {
			s.leave(key, held, destination, p)
		}
	}
}

func (held *server) setScheduler(key ipvs.Key, name string, p *plan) {
	if held.scheduler != name {
		p.first = append(p.first, ipvs.SetServer(key, name, func() { held.scheduler = name }))
	}
}

// takesNone reports whether there will be a real server that takes no connections.
func (held *server) takesNone(key ipvs.Key, want *server) bool {
	for _, weight := range want.destinations {
		if weight == 0 {
			return true
		}
	}
	if held == nil || udp(key) {
		return false
	}
	for destination := range held.destinations {
		if _, wanted := want.destinations[destination]; !wanted {
			return true
		}
	}
	return false
}

// setReal plans a real server and its weight.
func (s *servers) setDestination(key ipvs.Key, held *server, r ipvs.Destination, p *plan) {
	command := uint8(ipvs.SetDestination)
	switch have, exists := held.destinations[r.Addr]; {
	case !exists:
		command = ipvs.NewDestination
	case have == r.Weight:
		s.stay(key, held, r.Addr)
		return
	}
	p.first = append(p.first, ipvs.NewRequest(command, key, r, func() {
		held.destinations[r.Addr] = r.Weight
		held.added(r.Addr)
		s.stay(key, held, r.Addr)
	}))
}

// end plans the end of a virtual server: now, or when its connections have ended.
func (s *servers) end(key ipvs.Key, held *server, p *plan) {
	held.pool = nil
	if udp(key) || len(held.destinations) == 0 {
		p.last = append(p.last, s.deleteServer(key))
		return
	}
	p.ended = append(p.ended, key)
}

func (s *servers) deleteServer(key ipvs.Key) ipvs.Request {
	return ipvs.DeleteServer(key, func() { s.forget(key) })
}

func (s *servers) forget(key ipvs.Key) {
	if held := s.held[key]; held != nil {
		for addr := range held.leaving {
			delete(s.deadlines, leaver{key, addr})
		}
	}
	delete(s.held, key)
	s.draining.end(key)
	s.gone = append(s.gone, key)
}

// perform does the requests. With dataplane.ErrPartial all has been done but what the error names.
func (s *servers) perform(requests []ipvs.Request) error {
	refused, err := s.client.perform(requests)
	if err != nil {
		return err
	}
	return dataplane.Partial(refused...)
}

// verifyAll lists the virtual servers, and the real ones if that is wanted.
func (s *servers) verifyAll(withDestinations bool) (drifts []dataplane.Drift, err error) {
	listed, err := s.client.Servers()
	if err != nil {
		return nil, err
	}
	for key, held := range s.held {
		object := "virtual server " + key.String()
		found, ok := listed[key]
		if !ok {
			drifts = append(drifts, dataplane.Drift{Class: "servers", Object: object, Want: held.String()})
			continue
		}
		if have := schedulerOf(found); have != held.scheduler {
			drifts = append(drifts, dataplane.Drift{Class: "servers", Object: object, Want: held.scheduler, Have: have})
		}
		if !withDestinations {
			continue
		}
		destinations, err := s.client.Destinations(key)
		if err != nil {
			return nil, err
		}
		drifts = append(drifts, adopt(found, destinations).compareDestinations(key, held.destinations)...)
	}
	for key := range listed {
		if s.held[key] == nil && key.Mark&markMask == markBits {
			drifts = append(drifts, dataplane.Drift{Class: "servers", Object: "virtual server", Have: key.String()})
		}
	}
	return drifts, nil
}

// compare reports how the held virtual servers differ from what should be.
func (s *servers) compare(want map[ipvs.Key]*server) (drifts []dataplane.Drift) {
	for key, w := range want {
		held := s.held[key]
		if held != nil {
			w = s.shaped(key, held, w)
		}
		drifts = append(drifts, held.compare(key, w)...)
	}
	for key, held := range s.held {
		if _, wanted := want[key]; !wanted && !held.quiet(key) {
			drifts = append(drifts, dataplane.Drift{Class: "servers", Object: key.String(), Have: held.String()})
		}
	}
	return drifts
}

// quiet reports whether nothing is left of a virtual server but what drains.
func (held *server) quiet(key ipvs.Key) bool {
	for _, weight := range held.destinations {
		if weight != 0 {
			return false
		}
	}
	return len(held.destinations) > 0 && !udp(key)
}

func (held *server) compare(key ipvs.Key, want *server) (drifts []dataplane.Drift) {
	object := "virtual server " + key.String()
	if held == nil {
		return []dataplane.Drift{{Class: "servers", Object: object, Want: want.String()}}
	}
	if held.scheduler != want.scheduler {
		d := dataplane.Drift{Class: "servers", Object: object, Want: want.scheduler, Have: held.scheduler}
		drifts = append(drifts, d)
	}
	return append(drifts, held.compareDestinations(key, want.destinations)...)
}

func (held *server) compareDestinations(key ipvs.Key, want map[netip.AddrPort]uint32) (drifts []dataplane.Drift) {
	object := "virtual server " + key.String()
	for destination, weight := range want {
		if have, ok := held.destinations[destination]; !ok || have != weight {
			d := dataplane.Drift{Class: "reals", Object: object, Want: describeDestination(destination, weight)}
			if ok {
				d.Have = describeDestination(destination, have)
			}
			drifts = append(drifts, d)
		}
	}
	for destination, weight := range held.destinations {
		if _, ok := want[destination]; !ok && (weight != 0 || udp(key)) {
			have := describeDestination(destination, weight)
			drifts = append(drifts, dataplane.Drift{Class: "reals", Object: object, Have: have})
		}
	}
	return drifts
}

func (held *server) String() string {
	return fmt.Sprintf("scheduler %s, %d real servers", held.scheduler, len(held.destinations))
}

func describeDestination(destination netip.AddrPort, weight uint32) string {
	return fmt.Sprintf("real server %s weight %d", destination, weight)
}
