package ebpf

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// Only the programs for packets read these parts of the rows: who is a pod, and who may use frontends that allow some
// sources only.

// allow lets the programs know the sources that frontends allow, before they know that there are such. It returns what
// is to go when they do.
func (t *tables) allow(s *model.State, c model.Change) (gone []packetsSourceKey, err error) {
	if !t.packets {
		return nil, nil
	}
	touched := map[objectsFrontendKey]model.Key{} // most frontends allow everyone: then there is nothing to look at
	touch := func(key model.Key) {
		if at := frontendKey(key); len(t.sources[at]) > 0 || limited(s, key) {
			touched[at] = key
		}
	}
	for key, f := range c.Frontends.Set.All() {
		if f.Allow != nil || len(t.sources) > 0 {
			touch(key)
		}
	}
	for _, key := range c.Frontends.Delete {
		touch(key)
	}
	for at, key := range touched {
		had, want := t.sources[at], bothSources(s, key)
		if len(had) == 0 && len(want) == 0 {
			continue
		}
		if err := t.fault("ebpf allow"); err != nil {
			return nil, err
		}
		if err := putAll(t.Maps[packetsMapSources], without(want, had)); err != nil {
			return nil, fmt.Errorf("frontend %s: %w", key, err)
		}
		gone = append(gone, without(had, want)...)
		if t.sources[at] = want; len(want) == 0 {
			delete(t.sources, at)
		}
	}
	return gone, nil
}

// limited reports whether one of both scopes of a key allows some sources only.
func limited(s *model.State, key model.Key) bool {
	for _, key.Scope = range []model.Scope{model.Any, model.Internal} {
		if s.Frontends[key].Allow != nil {
			return true
		}
	}
	return false
}

// sourceSet has elements of the table of those that frontends allow.
type sourceSet map[packetsSourceKey]struct{}

func without(keys, others sourceSet) (out []packetsSourceKey) {
	for key := range keys {
		if _, ok := others[key]; !ok {
			out = append(out, key)
		}
	}
	return out
}

func putAll(m *ebpf.Map, keys []packetsSourceKey) error {
	err := putBatch(m, keys, slices.Repeat([]uint32{1}, len(keys)))
	if errors.Is(err, ebpf.ErrNotSupported) { // of tries, before Linux 5.13
		err = putEach(m, keys)
	}
	if errors.Is(err, unix.ENOSPC) {
		return errFull
	}
	if err != nil {
		return fmt.Errorf("allowed sources: %w", err)
	}
	return nil
}

// putBatch adds elements, or replaces them, as many at once as there is memory for.
func putBatch[K, V any](m *ebpf.Map, keys []K, values []V) error {
	for len(keys) > 0 {
		n := 0
		err := insist(func() (err error) {
			n, err = m.BatchUpdate(keys, values, nil)
			if errors.Is(err, unix.ENOMEM) && 0 < n && n < len(keys) {
				err = nil // the rest is tried anew
			}
			return err
		})
		if err != nil {
			return err
		}
		keys, values = keys[n:], values[n:]
	}
	return nil
}

func putEach(m *ebpf.Map, keys []packetsSourceKey) error {
	for _, key := range keys {
		if err := insist(func() error { return m.Put(key, uint32(1)) }); err != nil {
			return err
		}
	}
	return nil
}

func fillPods(m *ebpf.Map, pods model.Pods) error {
	for _, prefix := range pods.Prefixes {
		if err := insist(func() error { return m.Put(guardKey(prefix), uint32(1)) }); err != nil {
			return fmt.Errorf("pods %s: %w", prefix, err)
		}
	}
	return nil
}

// bothSources are the elements that say who may use a frontend, of both scopes of a key.
func bothSources(s *model.State, key model.Key) sourceSet {
	keys := sourceSet{}
	for _, key.Scope = range []model.Scope{model.Any, model.Internal} {
		for _, scope := range scopesOf(s, key) {
			for _, prefix := range s.Frontends[key].Allow {
				keys[sourceKey(key, scope, prefix)] = struct{}{}
			}
		}
	}
	return keys
}

// scopesOf are the scopes for which a row counts, as the programs ask by scope. A row for any client, without an
// internal one beside it, counts for the node and its pods as well.
func scopesOf(s *model.State, key model.Key) []model.Scope {
	internal := key
	internal.Scope = model.Internal
	if _, both := s.Frontends[internal]; both {
		return []model.Scope{key.Scope}
	}
	return []model.Scope{key.Scope, model.Internal}
}

func countSources(s *model.State) (n int) {
	for key, f := range s.Frontends {
		if len(f.Allow) > 0 {
			n += len(scopesOf(s, key)) * len(f.Allow)
		}
	}
	return n
}
