package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Others know a client by its address alone. The choice of a network namespace counts for all its addresses:
//
//	affinities: by cookie of a namespace ─► one Memory for each address there
//	            by address               ─► one
//	Memory ─► affinities: by address, and by the cookie of each namespace that has it
//
// A namespace that this process may not enter is not known by its addresses.

// leftSessions are what this data plane, in whatever process, remembers of clients in the network namespace of the
// calling thread; see dataplane.Handover.
func leftSessions(ctx context.Context, c dataplane.Config, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		dirs, err := leftoverPins()
		if err != nil {
			yield(dataplane.Session{}, fmt.Errorf("ebpf: %w", err))
			return
		}
		for _, dir := range dirs {
			for m, err := range (&Plane{config: c, pins: dir}).Sessions(ctx, s) {
				if !yield(m, err) {
					return
				}
			}
		}
	}
}

// Sessions implements dataplane.Handover.
func (p *Plane) Sessions(ctx context.Context, s *model.State) iter.Seq2[dataplane.Session, error] {
	return func(yield func(dataplane.Session, error) bool) {
		wanted := true
		err := p.listSessions(s, func(m dataplane.Session) { wanted = wanted && yield(m, nil) })
		if err != nil && wanted {
			yield(dataplane.Session{}, fmt.Errorf("ebpf: sessions: %w", err))
			return
		}
		if p.behind != nil && wanted {
			p.behind.Sessions(ctx, s)(yield)
		}
	}
}

// listSessions calls f with each session of the map, which may be pinned by an earlier process. A session of a network
// namespace becomes one for each of its addresses in the pool's family.
func (p *Plane) listSessions(s *model.State, f func(dataplane.Session)) error {
	from := p.memory[objectsMapAffinities]
	if from == nil {
		var err error
		from, err = ebpf.LoadPinnedMap(p.memoryPath(objectsMapAffinities), nil)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		defer from.Close()
	}
	in, err := p.findSpaces()
	if err != nil {
		return err
	}
	return eachSession(from, s, func(key objectsAffinityKey, m dataplane.Session) {
		if cookie, ok := key.Client.cookie(); !ok {
			f(m)
		} else {
			for _, m.Client = range in.addrs[cookie] {
				if m.Client.Is6() == m.Pool.V6 {
					f(m)
				}
			}
		}
	})
}

// eachSession calls f with what a map has of the clients of pools. That of a network namespace has no Client.
func eachSession(from *ebpf.Map, s *model.State, f func(objectsAffinityKey, dataplane.Session)) error {
	names := map[uint64]model.PoolID{}
	for id, pool := range s.Pools {
		if pool.Affinity > 0 {
			names[poolName(id)] = id
		}
	}
	spec, err := loadObjects()
	if err != nil {
		return err
	}
	want := spec.Maps[objectsMapAffinities]
	if len(names) == 0 || from.KeySize() != want.KeySize || from.ValueSize() != want.ValueSize {
		return nil
	}
	clock, err := readClock()
	if err != nil {
		return err
	}
	return each(from, func(key objectsAffinityKey, a objectsAffinity) error {
		id, ok := names[key.Pool]
		if !ok {
			return nil
		}
		lasts := time.Duration(seconds(s.Pools[id].Affinity)) * time.Second
		m := dataplane.Session{Pool: id, Backend: a.Backend.addrPort(), Until: clock.time(a.Last).Add(lasts)}
		if _, ok := key.Client.cookie(); !ok {
			m.Client = key.Client.addr()
		}
		f(key, m)
		return nil
	})
}

// clock tells what the programs' time is in that of others.
type clock struct {
	wall      time.Time
	monotonic int64
}

func readClock() (clock, error) {
	var now unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	return clock{time.Now(), now.Nano()}, os.NewSyscallError("clock_gettime", err)
}

func (c clock) time(programs uint64) time.Time {
	return c.wall.Add(time.Duration(int64(programs) - c.monotonic))
}

// programs is below 0, as programs take it, before the machine was there: what another plane remembers may be older.
func (c clock) programs(t time.Time) uint64 {
	return uint64(c.monotonic + int64(t.Sub(c.wall)))
}

// Learn implements dataplane.Handover.
func (p *Plane) Learn(
	ctx context.Context, s *model.State, others iter.Seq2[dataplane.Session, error],
) (n int, err error) {
	if p.tables != nil {
		n, err = dataplane.Take(s, others, p.taker(s))
	} else if err = p.learnNode(); err == nil { // the node's addresses tell which rows are left to the plane behind
		n, err = p.learned.Keep(s, others)
	}
	switch {
	case err != nil || p.behind == nil:
	case p.serve == Behind:
		_, err = p.behind.Learn(ctx, s, others)
	default:
		err = p.left.learn(ctx, s, others)
	}
	return n, err
}

// taker takes what others remember in. The memory is open.
func (p *Plane) taker(s *model.State) dataplane.Taker {
	return func(others *dataplane.Sessions) (int, error) {
		n, err := p.takeIn(p.memory[objectsMapAffinities], s, others)
		if err != nil {
			err = fmt.Errorf("ebpf: take over sessions of another data plane: %w", err)
		}
		return n, err
	}
}

// takeIn writes other planes' sessions into the map: by address, and by the cookie of each namespace that has the
// address. A session that is there stays if it lasts as long, or longer, and its backend serves.
func (p *Plane) takeIn(to *ebpf.Map, s *model.State, others *dataplane.Sessions) (int, error) {
	in, err := p.findSpaces()
	if err != nil {
		return 0, err
	}
	known := map[objectsAffinityKey]time.Time{} // of namespaces
	err = eachSession(to, s, func(key objectsAffinityKey, own dataplane.Session) {
		if _, ok := key.Client.cookie(); !ok {
			others.Supersedes(own)
		} else if others.Serves(own) {
			known[key] = own.Until
		}
	})
	if err != nil {
		return 0, err
	}
	clock, err := readClock()
	if err != nil {
		return 0, err
	}
	n := 0
	wanted := map[objectsAffinityKey]objectsAffinity{}
	for m := range others.All() {
		n++
		lasts := others.Lasts(m.Pool)
		a := objectsAffinity{
			Backend: endpoint(m.Backend), Last: clock.programs(m.Until.Add(-lasts)),
			Owner: uint16(ownerOf(m.Pool)), Lasts: inTwos(lasts),
		}
		key := objectsAffinityKey{Client: address(m.Client), Pool: poolName(m.Pool)}
		wanted[key] = a
		for _, cookie := range in.cookies[m.Client] { // of several addresses the one that was used last
			key.Client = clientOf(cookie)
			if m.Until.After(known[key]) {
				known[key], wanted[key] = m.Until, a
			}
		}
	}
	if err := update(to, wanted); err != nil && !errors.Is(err, unix.E2BIG) { // what has no room is not remembered
		return n, err
	}
	return n, p.detach()
}

// update adds elements to a map, or replaces them.
func update[K comparable, V any](m *ebpf.Map, all map[K]V) error {
	for keys := range slices.Chunk(slices.Collect(maps.Keys(all)), batch) {
		values := make([]V, 0, len(keys))
		for _, key := range keys {
			values = append(values, all[key])
		}
		if err := putBatch(m, keys, values); err != nil {
			return err
		}
	}
	return nil
}
