package ebpf

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// A map of another size than the one that is pinned takes over its elements twice. The first time is before its
// programs are attached, so that they know the open flows. The second time adds what other programs have added
// meanwhile.
//
//	openMap ─► migrate ─► attach ─► migrate ─► settleMemory: the new map is pinned in place of the old one
//
// Until the last step the old map stays pinned. If a process is killed before that, the next one has the same task.

// migrate copies the elements of old maps that are laid out alike. Those of others are lost.
func (p *Plane) migrate() error {
	for name, from := range p.replaced {
		to := p.memory[name]
		if from.KeySize() != to.KeySize() || from.ValueSize() != to.ValueSize() {
			continue
		}
		var err error
		switch name {
		case objectsMapAffinities:
			err = p.migrateAffinities(from, to)
		case objectsMapFlows:
			err = copyMissing[objectsFlowKey, objectsFlow](from, to)
		case packetsMapTranslations:
			err = p.migrateFlows(from, to)
		}
		if err != nil {
			return fmt.Errorf("take over %s: %w", name, err)
		}
	}
	return nil
}

// copyMissing copies elements that are missing.
func copyMissing[K, V any](from, to *ebpf.Map) error {
	return each(from, func(key K, value V) error {
		_, err := add(to, key, value)
		return err
	})
}

// add reports whether an element was missing, and there was room for it.
func add[K, V any](to *ebpf.Map, key K, value V) (bool, error) {
	err := to.Update(key, value, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) || errors.Is(err, unix.E2BIG) {
		return false, nil
	}
	return err == nil, err
}

// carryAffinities does so with clients. Those of a table that forgets are an earlier version's, which did not say whose
// they are, and for how long.
func (p *Plane) migrateAffinities(from, to *ebpf.Map) error {
	if from.Type() != ebpf.LRUHash {
		return copyMissing[objectsAffinityKey, objectsAffinity](from, to)
	}
	type of struct{ owner, lasts uint16 }
	pools := map[uint64]of{}
	for id, pool := range p.tables.pools {
		lasts := time.Duration(p.tables.entries[pool.number].Affinity) * time.Second
		pools[poolName(id)] = of{uint16(ownerOf(id)), inTwos(lasts)}
	}
	return each(from, func(key objectsAffinityKey, a objectsAffinity) error {
		pool := pools[key.Pool]
		a.Owner, a.Lasts = pool.owner, pool.lasts
		if pool.lasts == 0 {
			return nil
		}
		_, err := add(to, key, a)
		return err
	})
}

// carryFlows does so with flows. Those of a table that forgets are an earlier version's, which held none of them, and
// said of connections only whether they were answered. They are held, as many as may be.
func (p *Plane) migrateFlows(from, to *ebpf.Map) error {
	if from.Type() != ebpf.LRUHash {
		return copyMissing[packetsTuple, packetsTranslation](from, to)
	}
	shares, unmap, err := mapFlowShares(p.memory)
	if err != nil {
		return err
	}
	defer unmap()
	owners := map[uint64]uint16{}
	for id := range p.tables.pools {
		owners[poolName(id)] = uint16(ownerOf(id))
	}
	return each(from, func(key packetsTuple, t packetsTranslation) error {
		if shares.held(everybody) >= shares.room {
			return nil
		}
		if err := adopt(from, key, &t, owners); err != nil {
			return err
		}
		added, err := add(to, key, t)
		if added && isWayBack(key, &t) {
			shares.lend(t.owner(), uint32(t.Held))
		}
		return err
	})
}

// adopt makes of an element what this version would have made.
func adopt(from *ebpf.Map, key packetsTuple, t *packetsTranslation, owners map[uint64]uint16) error {
	t.Near, t.Held = 0, 0 // the old one was the upper half of Packets
	switch {
	case key.Hook == packetsHookINGRESS && t.State&packetsStateBACK == 0:
		t.Held = t.lends()
		if key.Protocol != unix.IPPROTO_UDP && t.State&packetsStateANSWERED != 0 {
			t.State |= packetsStateLASTING
		}
	case isWayBack(key, t):
		var flow packetsTranslation
		err := from.Lookup(at(packetsHookINGRESS, key.Protocol, t.Dst, t.Src), &flow)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		t.Held = flow.lends()
		t.Pool = uint64(owners[t.Pool]) << packetsTermsTERMS_OWNER
	}
	return nil
}

// each calls f with the elements of a map.
func each[K, V any](m *ebpf.Map, f func(K, V) error) error {
	keys, values := make([]K, batch), make([]V, batch)
	for cursor := (ebpf.MapBatchCursor{}); ; {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return err
		}
		for i, key := range keys[:n] {
			if err := f(key, values[i]); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
	}
}

// settleMemory has the next process find the memory in use.
func (p *Plane) settleMemory() error {
	if err := p.migrate(); err != nil {
		return err
	}
	if p.replaced[objectsMapAffinities] != nil {
		if err := p.detach(); err != nil {
			return err
		}
	}
	for name, old := range p.replaced {
		if err := repin(p.memory[name], p.memoryPath(name)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		old.Close()
		delete(p.replaced, name)
	}
	return nil
}

// repin pins a map in place of another one, so that there is one at any time. A process that was killed during this has
// left its map beside.
func repin(m *ebpf.Map, path string) error {
	beside := path + "_new"
	if err := errors.Join(m.Unpin(), os.RemoveAll(beside)); err != nil {
		return err
	}
	if err := m.Pin(beside); err != nil {
		return err
	}
	return os.Rename(beside, path)
}
