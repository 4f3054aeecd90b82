package conformance_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/dataplane"
	serves "fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/conformance"
	"fairlead.dev/fairlead/lab/testbed"
)

func TestEBPF_vandalism(t *testing.T) {
	t.Parallel()
	root := testbed.NeedBPFFS(t)
	pins := ""
	new := func(c dataplane.Config) (dataplane.Dataplane, error) {
		cgroup, err := threadCgroup()
		if err != nil {
			return nil, err
		}
		pins = filepath.Join(root, filepath.Base(cgroup))
		o := serves.Options{Serve: serves.TC, Packets: plane, Cgroup: cgroup, Pins: pins}
		o.Sizes.Translations = 1 << 14
		return serves.New(o)(c)
	}
	inMaps := func(_ context.Context, s *conformance.Site) (conformance.Deed, error) { return mapDeed(s, pins) }
	conformance.RunVandalism(t, new, testbed.Spec{Cgroup: true}, oneOf(
		func(_ context.Context, s *conformance.Site) (conformance.Deed, error) { return pinDeed(s, pins) },
		func(_ context.Context, s *conformance.Site) (conformance.Deed, error) { return linkDeed(s, pins) },
		inMaps, inMaps, inMaps))
}

// pinDeed removes a pin of the memory.
func pinDeed(s *conformance.Site, pins string) (d conformance.Deed, err error) {
	entries, err := os.ReadDir(filepath.Join(pins, "memory"))
	if err != nil || len(entries) == 0 {
		return d, err
	}
	path := filepath.Join(pins, "memory", entries[s.IntN(len(entries))].Name())
	return conformance.Deed{What: "rm " + path, Names: []string{"pin " + path}}, os.Remove(path)
}

// linkDeed detaches a program.
func linkDeed(s *conformance.Site, pins string) (d conformance.Deed, err error) {
	entries, err := os.ReadDir(filepath.Join(pins, "links"))
	if err != nil || len(entries) == 0 {
		return d, err
	}
	name := entries[s.IntN(len(entries))].Name()
	path := filepath.Join(pins, "links", name)
	d = conformance.Deed{What: "detach " + name, Names: []string{"hook " + name}}
	if strings.Contains(name, "-") { // a device's
		d.Names = []string{"at device"}
	}
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return d, err
	}
	defer l.Close()
	if err := l.Detach(); err != nil && !errors.Is(err, link.ErrNotSupported) {
		return d, err
	}
	return d, nil
}

// victims are the maps of the set that is in force, by name.
func victims(pins string) (map[string]*ebpf.Map, error) {
	l, err := link.LoadPinnedLink(filepath.Join(pins, "links", "connect4"), nil)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return nil, err
	}
	program, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil, err
	}
	defer program.Close()
	of, err := program.Info()
	if err != nil {
		return nil, err
	}
	ids, _ := of.MapIDs()
	sets, word := map[string]*ebpf.Map{}, uint32(0)
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, err
		}
		defer m.Close()
		info, err := m.Info()
		if err != nil {
			return nil, err
		}
		if info.Type == ebpf.ArrayOfMaps {
			sets[info.Name] = m
		}
		if info.Name == "in_force" {
			value, err := m.LookupBytes(uint32(0)) // the word, and more
			if err != nil {
				return nil, err
			}
			word = binary.NativeEndian.Uint32(value)
		}
	}
	delete(sets, "chunks") // of pools with a scheduler, which no case has
	inner := map[string]*ebpf.Map{}
	for name, m := range sets {
		var of *ebpf.Map
		if err := m.Lookup(word&1, &of); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		inner[name] = of
	}
	return inner, nil
}

// mapDeed changes an element of a map.
func mapDeed(s *conformance.Site, pins string) (d conformance.Deed, err error) {
	maps, err := victims(pins)
	if err != nil {
		return d, err
	}
	defer func() {
		for _, m := range maps {
			m.Close()
		}
	}()
	var names []string
	for name := range maps {
		names = append(names, name)
	}
	slices.Sort(names)
	name := names[s.IntN(len(names))]
	m := maps[name]
	d.Names = map[string][]string{
		"frontends": {"frontend ", "guard "}, "guards": {"guard "}, "members": {"backend "},
		"pools": {"pool "}, "slots": {"pool "},
	}[name]
	keys, err := keysOf(m)
	if err != nil || len(keys) == 0 {
		return d, err
	}
	key := keys[s.IntN(len(keys))]
	if m.Type() == ebpf.Array { // only the first are in use
		key = keys[0]
	}
	value, err := m.LookupBytes(key)
	if err != nil || value == nil {
		return conformance.Deed{}, err
	}
	switch {
	case m.Type() != ebpf.Array && s.IntN(3) == 0:
		d.What = fmt.Sprintf("delete %x of %s", key, name)
		return d, m.Delete(key)
	case m.Type() == ebpf.Hash && s.IntN(3) == 0:
		key[0] ^= 0x20
		d.What = fmt.Sprintf("add %x to %s", key, name)
		return d, m.Put(key, value)
	}
	at := 0
	if name == "frontends" { // the verdict for all clients
		at = 20
	}
	value[at] ^= 2
	d.What = fmt.Sprintf("change %x of %s", key, name)
	return d, m.Put(key, value)
}

func keysOf(m *ebpf.Map) (keys [][]byte, err error) {
	var key, value []byte
	elements := m.Iterate()
	for elements.Next(&key, &value) {
		keys = append(keys, slices.Clone(key))
		if len(keys) == 1000 {
			break
		}
	}
	return keys, elements.Err()
}
