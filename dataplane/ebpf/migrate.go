package ebpf

import (
	"errors"
	"fmt"
	"os"

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
		if from.Type() != to.Type() || from.KeySize() != to.KeySize() || from.ValueSize() != to.ValueSize() {
			continue
		}
		var err error
		switch name {
		case objectsMapAffinities:
			err = copyMissing[objectsAffinityKey, objectsAffinity](from, to)
		case objectsMapFlows:
			err = copyMissing[objectsFlowKey, objectsFlow](from, to)
		case packetsMapTranslations:
			err = copyMissing[packetsTuple, packetsTranslation](from, to)
		}
		if err != nil {
			return fmt.Errorf("take over %s: %w", name, err)
		}
	}
	return nil
}

// copyMissing copies elements that are missing, as far as there is room for them.
func copyMissing[K, V any](from, to *ebpf.Map) error {
	return each(from, func(key K, value V) error {
		err := to.Update(key, value, ebpf.UpdateNoExist)
		if errors.Is(err, ebpf.ErrKeyExist) || errors.Is(err, unix.E2BIG) {
			return nil
		}
		return err
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
