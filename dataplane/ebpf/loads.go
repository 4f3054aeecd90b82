package ebpf

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// A pool whose scheduler is twos has each connection go to one of two backends that are drawn by weight: to that with
// fewer open connections for its weight. The programs count connections where they see them begin and end, and the
// agent corrects what they miss:
//
//	connect ─ a socket has a place ─► +1      it closes, or asks for something else ─► -1 ─┐
//	first packet of a flow ─────────► +1      both sides have ended, or one has reset ─► -1 ─┴─► loads[pool, backend]
//	Audit: sockets that have places ─┐
//	sweep: flows that are open ──────┴─ differ from the load, as they did at the look before ─► the lesser difference
//
// While agents look, connections begin and end. Only a difference that two looks have found is none of these. UDP
// sockets that are not connected do not count.

// loadsInterval is the time between two looks at sockets.
const loadsInterval = 2 * time.Second

// chosenByLoad reports whether the loads choose. With affinity a client's first connections must meet at one backend.
func chosenByLoad(p model.Pool) bool { return p.Scheduler == model.LeastOfTwo && p.Affinity == 0 }

// loads are those in the kernel. A nil one counts nothing.
type loads struct {
	*ebpf.Map
	pools atomic.Pointer[map[uint64]bool] // names of those that loads choose for; never modified

	mu     sync.Mutex                   // of who changes loads; guards what follows
	drifts [objectsBearerBEARERS]drifts // that the last look has found
	full   bool                         // some backends have no load: weights alone choose them

	pacer // of looks at sockets; of the plane's goroutine
}

// drifts are how many connections more there are than a load says.
type drifts map[objectsLoadKey]int32

func newLoads(m *ebpf.Map) *loads {
	l := &loads{Map: m}
	l.pools.Store(&map[uint64]bool{})
	return l
}

func loadKey(pool uint64, e objectsEndpoint) objectsLoadKey {
	return objectsLoadKey{Pool: pool, Backend: e}
}

// loadKey is of the backend that a flow loads.
func (t *packetsTranslation) loadKey() objectsLoadKey {
	return loadKey(t.Pool, objectsEndpoint{Addr: objectsAddr{Word: t.Dst.Addr.Word}, Port: t.Dst.Port})
}

// chooseFor are the names of pools that they choose for.
func (l *loads) chooseFor() map[uint64]bool {
	if l == nil {
		return nil
	}
	return *l.pools.Load()
}

// begin has a pool's backends have loads. Those that have some keep them.
func (l *loads) begin(pool uint64, backends []model.Backend) error {
	if known := l.chooseFor(); !known[pool] {
		known = maps.Clone(known)
		known[pool] = true
		l.pools.Store(&known)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range backends {
		if err := l.weigh(loadKey(pool, endpoint(b.AddrPort())), b.Weight); err != nil {
			return err
		}
	}
	return nil
}

// weigh sets the weight of a backend.
func (l *loads) weigh(key objectsLoadKey, weight uint16) error {
	var load objectsLoad
	err := l.Lookup(key, &load)
	if err == nil && load.Weight == uint32(weight) {
		return nil
	}
	load.Weight = uint32(weight)
	if ignoreMissing(err) == nil {
		err = l.Put(key, load)
	}
	if errors.Is(err, unix.E2BIG) {
		l.full = true
		return nil
	}
	return err
}

// add corrects a load. It may lose what a program adds at the same moment.
func (l *loads) add(key objectsLoadKey, by objectsBearer, n int32) error {
	var load objectsLoad
	if err := l.Lookup(key, &load); err != nil {
		return ignoreMissing(err)
	}
	load.Open[by] += n
	return ignoreMissing(l.Update(key, load, ebpf.UpdateExist))
}

// ended notes that a flow is removed.
func (l *loads) ended(t *packetsTranslation) error {
	if l == nil || t.Held&packetsHeldLOADS == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.add(t.loadKey(), objectsBearerBY_PACKETS, -1)
}

// correct compares loads with how many connections were seen to be open.
func (l *loads) correct(by objectsBearer, seen map[objectsLoadKey]int32) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, now := l.drifts[by], drifts{}
	err := each(l.Map, func(key objectsLoadKey, load objectsLoad) error {
		drift := seen[key] - load.Open[by]
		fix := lesser(drift, before[key])
		if drift != fix {
			now[key] = drift - fix
		}
		if fix == 0 {
			return nil
		}
		return l.add(key, by, fix)
	})
	l.drifts[by] = now
	return err
}

// lesser is the lesser one of two differences; 0: they are opposed.
func lesser(a, b int32) int32 {
	switch {
	case a > 0 && b > 0:
		return min(a, b)
	case a < 0 && b < 0:
		return max(a, b)
	}
	return 0
}

// keep has the backends in some tables have loads, and no others.
func (l *loads) keep(t *tables) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	pools, want := map[uint64]bool{}, map[objectsLoadKey]uint16{}
	for id, p := range t.pools {
		if !p.byLoad {
			continue
		}
		name := poolName(id)
		pools[name] = true
		for _, b := range p.backends {
			want[loadKey(name, endpoint(b.AddrPort()))] = b.Weight
		}
	}
	err := each(l.Map, func(key objectsLoadKey, load objectsLoad) error {
		if weight, ok := want[key]; ok && load.Weight == uint32(weight) {
			delete(want, key)
		} else if !ok {
			return ignoreMissing(l.Delete(key))
		}
		return nil
	})
	for key, weight := range want { // another program has removed or changed it, or there was no room
		err = errors.Join(err, l.weigh(key, weight))
	}
	l.pools.Store(&pools)
	return err
}

// auditLoads looks at the sockets that are open, if loads choose for any pool.
func (p *Plane) auditLoads(s *model.State) error {
	l := p.loads
	if len(l.chooseFor()) == 0 || !l.due() {
		return nil
	}
	l.wait(loadsInterval, loadsInterval)
	full := l.full
	err := l.keep(p.tables)
	if err == nil {
		err = p.correctSockets(s)
	}
	if err != nil {
		return fmt.Errorf("loads: %w", err)
	}
	if l.full && !full {
		p.config.Logger().Warn("connections to some backends are not counted, and are spread at random; use the scheduler "+
			"twos for fewer Services", "limit", l.MaxEntries())
	}
	return nil
}

// asking is what sockets ask for that have places.
type asking struct {
	service  objectsEndpoint
	protocol uint8
	internal bool
}

// correctSockets counts the open sockets of each backend.
func (p *Plane) correctSockets(s *model.State) error {
	places, claims, unmap, err := p.socketPlaces()
	if err != nil {
		return err
	}
	defer unmap()
	pools, names, seen := p.loads.chooseFor(), map[asking]uint64{}, map[objectsLoadKey]int32{}
	for i := range places {
		at := &places[i]
		if atomic.LoadUint64(&claims[i]) == 0 || at.Protocol == 0 || at.Peer.Backend.Port == 0 {
			continue
		}
		asks := asking{at.Peer.Service, at.Protocol, at.Netns == p.netns}
		name, known := names[asks]
		if !known {
			name = p.poolFor(s, asks)
			names[asks] = name
		}
		if pools[name] {
			seen[loadKey(name, at.Peer.Backend)]++
		}
	}
	return p.loads.correct(objectsBearerBY_SOCKETS, seen)
}

// poolFor is the name of the pool that sockets are led to, as the programs' function bear_no_more has it; 0: none.
func (p *Plane) poolFor(s *model.State, asks asking) uint64 {
	service := asks.service.addrPort()
	key := model.Key{Addr: service.Addr(), Port: service.Port(), Protocol: model.Protocol(asks.protocol)}
	pods := packetsRowsPODS_KNOWN_V6
	if service.Addr().Is4() {
		pods = packetsRowsPODS_KNOWN_V4
	}
	scopes := []model.Scope{model.Internal, model.Any}
	if !asks.internal && podsKnown(s.Pods)&pods == 0 {
		scopes = scopes[1:]
	}
	for _, key.Scope = range scopes {
		if f, ok := s.Frontends[key]; ok {
			return poolName(f.Pool)
		}
	}
	return 0
}
