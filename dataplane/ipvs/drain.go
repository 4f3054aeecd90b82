package ipvs

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/internal/ipvs"
)

// A backend that is no longer in its pool takes no new connections. Its old ones end in ways that depend on the
// protocol:
//
//	TCP, SCTP   the backend ends them, or its silence tells the client. The real server stays with weight 0 until there
//	            are none, or until DrainTimeout is over
//	UDP         at once: a client that keeps its socket would go on sending to an address that is free, or by then
//	            another pod's. The real server goes, and the next packet chooses another one
//
// A backend of UDP that terminates but still serves has not left. It is in its pool, with weight 0, keeps its flows,
// and gets no new ones. The component that listed it decides how long: in Kubernetes, the pod's grace period does. When
// the pod is gone, or says that it does not serve, the backend has left. kube-proxy's other modes do the same
// (KEP-1669). In mode ipvs kube-proxy deletes the real servers of UDP and SCTP at once.

// drains are the virtual servers with real servers that leave. To look at one takes a listing of its real
// servers; so a change looks at those that it touches, and Audit at some each time, in turn.
type drains struct {
	looked map[ipvs.Key]int // when it was looked at last, as turn was then
	turn   int
	fresh  []ipvs.Key // where something has begun to leave since the last look
}

// maxLooked is how many virtual servers Audit looks at.
const maxLooked = 500

func (d *drains) begin(key ipvs.Key) {
	if d.looked == nil {
		d.looked = map[ipvs.Key]int{}
	}
	d.looked[key] = d.turn - 1
	d.fresh = append(d.fresh, key)
}

func (d *drains) end(key ipvs.Key) { delete(d.looked, key) }

// begun are those where something has begun to leave.
func (d *drains) begun() []ipvs.Key {
	fresh := d.fresh
	d.fresh = nil
	slices.SortFunc(fresh, ipvs.Key.Compare)
	return slices.Compact(fresh)
}

// next are some that have waited longest.
func (d *drains) next() (keys []ipvs.Key) {
	for key, turn := range d.looked {
		if turn != d.turn {
			keys = append(keys, key)
			d.looked[key] = d.turn
		}
		if len(keys) == maxLooked {
			return keys
		}
	}
	d.turn++
	return keys
}

// leave plans that a real server takes no new connections, and goes: at once if its connections shall
// end, otherwise when they have ended.
func (s *servers) leave(key ipvs.Key, held *server, addr netip.AddrPort, p *plan) {
	if udp(key) || defect.Is(defect.IPVSDraining) {
		p.last = append(p.last, s.deleteDestination(key, held, addr))
		return
	}
	if _, already := held.leaving[addr]; already && held.destinations[addr] == 0 {
		return
	}
	note := func() {
		held.destinations[addr], held.leaving[addr] = 0, s.deadline(key, addr)
		s.draining.begin(key)
	}
	if held.destinations[addr] == 0 { // it takes none already
		note()
		return
	}
	p.first = append(p.first, ipvs.NewRequest(ipvs.SetDestination, key, ipvs.Destination{Addr: addr}, note))
}

func (s *servers) deleteDestination(key ipvs.Key, held *server, addr netip.AddrPort) ipvs.Request {
	return ipvs.NewRequest(ipvs.DeleteDestination, key, ipvs.Destination{Addr: addr}, func() { s.drop(key, held, addr) })
}

// drop forgets a real server that is gone.
func (s *servers) drop(key ipvs.Key, held *server, addr netip.AddrPort) {
	s.stay(key, held, addr)
	delete(held.destinations, addr)
	held.order = slices.DeleteFunc(held.order, func(a netip.AddrPort) bool { return a == addr })
}

// stay forgets that a real server leaves.
func (s *servers) stay(key ipvs.Key, held *server, addr netip.AddrPort) {
	delete(held.leaving, addr)
	delete(s.deadlines, leaver{key, addr})
}

// leaver is a real server that leaves.
type leaver struct {
	server      ipvs.Key
	destination netip.AddrPort
}

// deadlines are when leavers go in any case. Sync, which reads everything else anew, leaves them as they are.
type deadlines map[leaver]time.Time

// deadline is when a real server that leaves goes in any case; zero: never.
func (s *servers) deadline(key ipvs.Key, addr netip.AddrPort) (t time.Time) {
	if s.options.DrainTimeout <= 0 {
		return t
	}
	l := leaver{key, addr}
	t, known := s.deadlines[l]
	if !known {
		t = time.Now().Add(s.options.DrainTimeout)
		s.deadlines[l] = t
	}
	return t
}

// prune forgets the deadlines of what the kernel does not hold any more.
func (s *servers) prune() {
	maps.DeleteFunc(s.deadlines, func(l leaver, _ time.Time) bool {
		held := s.held[l.server]
		if held == nil {
			return true
		}
		weight, exists := held.destinations[l.destination]
		return !exists || weight != 0
	})
}

// drain deletes leaving real servers that have no connections any more, or whose time is over. It looks at some virtual
// servers, and deletes those that become empty and that wanted does not report.
func (s *servers) drain(keys []ipvs.Key, wanted func(ipvs.Key) bool) error {
	if len(keys) == 0 {
		return nil
	}
	if err := s.client.fault("ipvs drain"); err != nil {
		return err
	}
	var p plan
	for _, key := range keys {
		if held := s.held[key]; held != nil && len(held.leaving) > 0 {
			if err := s.drainOne(key, held, wanted(key), &p); err != nil {
				return err
			}
		}
	}
	err := s.perform(p.last)
	var then plan
	for _, key := range keys {
		held := s.held[key]
		if held == nil || len(held.leaving) == 0 {
			s.draining.end(key)
		}
		if held != nil && held.pool != nil {
			s.set(key, held.pool, &then)
		}
	}
	if err != nil {
		return err
	}
	return s.perform(append(then.first, then.last...))
}

// drainOne plans what becomes of the real servers of one virtual server that leave.
func (s *servers) drainOne(key ipvs.Key, held *server, wanted bool, p *plan) error {
	destinations, err := s.client.Destinations(key)
	if err != nil {
		return err
	}
	connections := map[netip.AddrPort]uint32{}
	for _, r := range destinations {
		connections[r.Addr] = r.Connections
	}
	now := time.Now()
	left := len(held.destinations)
	var gone []ipvs.Request
	for addr, until := range maps.Clone(held.leaving) {
		n, there := connections[addr]
		over := !until.IsZero() && !now.Before(until)
		switch {
		case !there: // another program has deleted it
			s.drop(key, held, addr)
			left--
		case n == 0 || over:
			gone = append(gone, s.deleteDestination(key, held, addr))
			left--
		}
	}
	if left == 0 && !wanted {
		gone = []ipvs.Request{s.deleteServer(key)}
	}
	p.last = append(p.last, gone...)
	return nil
}

// endAll ends virtual servers to which no row leads any more: at once where there are no connections, and otherwise
// when they have ended. The kernel deletes a virtual server with all its real servers in one go. To change each of them
// takes much longer, as it seeks one after the other in a list of all.
func (s *servers) endAll(keys []ipvs.Key) error {
	var p plan
	for _, key := range keys {
		held := s.held[key]
		if held == nil {
			continue
		}
		destinations, err := s.client.Destinations(key)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(destinations, func(d ipvs.Destination) bool { return d.Connections > 0 }) {
			p.last = append(p.last, s.deleteServer(key))
			continue
		}
		for _, destination := range slices.SortedFunc(maps.Keys(held.destinations), netip.AddrPort.Compare) {
			s.leave(key, held, destination, &p)
		}
	}
	return s.perform(append(p.first, p.last...))
}
