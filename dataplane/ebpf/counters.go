package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync/atomic"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// A program that takes a slot adds one to it, in memory that it has before it anyhow. Here that is read without a
// system call, and taken away: the sums are those of this process.
//
//	slots ─► collect ─► tally ─► Counters ◄── refusals, traffic

// tally is how many connections backends got. One without an address stands for all that have left their pool.
type tally map[counted]uint64

type counted struct {
	pool    model.PoolID
	backend netip.AddrPort
}

// used is a range of slots that a pool had.
type used struct {
	pool         model.PoolID
	first, count uint32
}

func (t *tables) discardSlots(id model.PoolID, p *pool) {
	t.ranges.discard(p.first, p.count)
	t.discardTurns(p.turns)
	if p.count > 0 {
		t.unused = append(t.unused, used{id, p.first, p.count})
	}
}

// collect takes what was counted since the last time.
func (t *tables) collect() {
	for id, p := range t.pools {
		t.collectSlots(used{id, p.first, p.count})
	}
	for _, u := range t.unused {
		t.collectSlots(u)
	}
}

// collectUnused does that for slots in which no program counts any more.
func (t *tables) collectUnused() {
	for _, u := range t.unused {
		t.collectSlots(u)
	}
	t.unused = nil
	t.counted.prune(t.pools)
}

func (t *tables) collectSlots(u used) {
	for i := range t.slots[u.first : u.first+u.count] {
		s := &t.slots[int(u.first)+i]
		if atomic.LoadUint32(&s.Connections) > 0 {
			t.counted[counted{u.pool, s.Backend.addrPort()}] += uint64(atomic.SwapUint32(&s.Connections, 0))
		}
	}
}

// prune forgets pools that are gone, and adds up backends that are.
func (c tally) prune(pools map[model.PoolID]*pool) {
	for k, n := range c {
		p := pools[k.pool]
		switch {
		case p == nil:
			delete(c, k)
		case k.backend.IsValid() && !hasBackend(p.backends, k.backend):
			delete(c, k)
			c[counted{pool: k.pool}] += n
		}
	}
}

func (c tally) add(o tally) {
	for k, n := range o {
		c[k] += n
	}
}

// hasBackend looks for one among those of a pool, which are sorted.
func hasBackend(backends []model.Backend, a netip.AddrPort) bool {
	_, found := model.Pool{Backends: backends}.At(a)
	return found
}

// keepCounters takes what tables have counted that are about to be closed. If programs still read them, because
// others could not take their place, what these count is lost.
func (p *Plane) keepCounters() {
	p.tables.collect()
	if p.counted == nil {
		p.counted = tally{}
	}
	p.counted.add(p.tables.counted)
}

// Counters implements dataplane.Observed.
func (p *Plane) Counters(context.Context) (dataplane.Counters, error) {
	if p.tables == nil {
		return dataplane.Counters{}, errors.New("ebpf: the kernel's content is not known")
	}
	p.tables.collect()
	p.counted.add(p.tables.counted)
	clear(p.tables.counted)
	p.counted.prune(p.tables.pools)
	served := dataplane.Tally{}
	for k, n := range p.counted {
		served.Add(dataplane.Served{Pool: k.pool, Backend: k.backend, Sum: dataplane.Sum{Connections: n}})
	}
	err := p.addTraffic(served)
	if err != nil {
		return dataplane.Counters{}, fmt.Errorf("ebpf: %w", err)
	}
	out := dataplane.Counters{Connections: true, Traffic: true, Served: served.Served()}
	if out.Refused, err = p.refused(); err != nil {
		return out, fmt.Errorf("ebpf: %w", err)
	}
	out.Tables = p.tableSizes()
	out.Sort()
	return out, nil
}

// addTraffic adds what has passed as packets.
func (p *Plane) addTraffic(served dataplane.Tally) error {
	traffic, err := p.traffic()
	if err != nil {
		return err
	}
	names := map[uint64]model.PoolID{}
	for id := range p.tables.pools {
		names[poolName(id)] = id
	}
	for key, sum := range traffic {
		id, known := names[key.Pool]
		if !known {
			continue
		}
		s := dataplane.Served{Pool: id, Backend: fromPackets(key.Backend)}
		if !hasBackend(p.tables.pools[id].backends, s.Backend) {
			s.Backend = netip.AddrPort{}
		}
		s.ToBackend.Packets = sum.Packets[packetsDirectionTO_BACKEND]
		s.ToBackend.Bytes = sum.Bytes[packetsDirectionTO_BACKEND]
		s.ToClient.Packets = sum.Packets[packetsDirectionTO_CLIENT]
		s.ToClient.Bytes = sum.Bytes[packetsDirectionTO_CLIENT]
		served.Add(s)
	}
	return nil
}

func fromPackets(e packetsEndpoint) netip.AddrPort {
	return objectsEndpoint{Addr: objectsAddr{Word: e.Addr.Word}, Port: e.Port}.addrPort()
}

// refused reads what was refused.
func (p *Plane) refused() (out []dataplane.Refused, err error) {
	err = each(p.memory[objectsMapRefusals], func(key objectsRefusal, n uint64) error {
		at := objectsFrontendKey{Addr: key.Addr, Port: key.Port, Protocol: key.Protocol}
		out = append(out, key.row(n, len(p.tables.sources[at]) > 0))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read what was refused: %w", err)
	}
	return out, nil
}

func (k objectsRefusal) row(n uint64, limited bool) dataplane.Refused {
	r := dataplane.Refused{
		Port: port(k.Port), Protocol: model.Protocol(k.Protocol), Verdict: model.Verdict(k.Verdict), Connections: n,
	}
	if k.Addr != (objectsAddr{}) {
		r.Addr = k.Addr.addr()
	}
	switch {
	case k.Port == 0:
		r.Reason = dataplane.NoServicePort
	case r.Verdict == model.Reject:
		r.Reason = dataplane.NoEndpoints
	case limited:
		r.Reason = dataplane.SourceNotAllowed
	default:
		r.Reason = dataplane.NoLocalEndpoints
	}
	return r
}

// tableSizes are what the kernel says of its tables.
func (p *Plane) tableSizes() (out []dataplane.Table) {
	all := maps.Clone(p.tables.Maps)
	maps.Copy(all, p.memory)
	for name, m := range all {
		t := dataplane.Table{Name: name, Capacity: m.MaxEntries()}
		if info, err := m.Info(); err == nil {
			t.Bytes, _ = info.Memlock()
		}
		switch {
		case name == packetsMapTranslations && p.sweep != nil:
			t.Counted, t.Used = true, uint32(p.sweep.inUse())
		case name == objectsMapAffinities:
			t.Used, t.Counted = p.attachedClients()
		}
		out = append(out, t)
	}
	return out
}
