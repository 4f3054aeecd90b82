package ebpf

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
)

// A map of another size than the one that is pinned takes over its elements twice: before the programs that use it are
// in force, so that they know what goes on, and then what others have added meanwhile.
//
//	openMap ─► carry ─► attach ─► carry ─► settleMemory: the new map is pinned in place of the former one

// carry copies the elements of former maps that are laid out alike. Those of others are lost.
func (p *Plane) carry() error {
	for name, from := range p.former {
		to := p.memory[name]
		if from.KeySize() != to.KeySize() || from.ValueSize() != to.ValueSize() {
			continue
		}
		var err error
		switch name {
		case objectsMapAffinities:
			err = carry[objectsAffinityKey, objectsAffinity](from, to)
		case objectsMapFlows:
			err = carry[objectsFlowKey, objectsFlow](from, to)
		case packetsMapTranslations:
			err = carry[packetsTuple, packetsTranslation](from, to)
		}
		if err != nil {
			return fmt.Errorf("take over %s: %w", name, err)
		}
	}
	return nil
}

// carry copies elements that are missing.
func carry[K, V any](from, to *ebpf.Map) error {
	return each(from, func(key K, value V) error {
		if err := to.Update(key, value, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return err
		}
		return nil
	})
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
	if err := p.carry(); err != nil {
		return err
	}
	for name, former := range p.former {
		if err := repin(p.memory[name], p.memoryPath(name)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		former.Close()
		delete(p.former, name)
	}
	return nil
}

// repin pins a map in place of another one, so that there is one at any time. Who was killed while doing so has left
// his.
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
