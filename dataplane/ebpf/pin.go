package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// What is pinned, below a directory of ours in a file system of type bpf:
//
//	netns                 the node's network namespace, by a symbolic link
//	links/connect4 …      each holds a program to the cgroup, the program its tables
//	links/ingress-2 …     likewise to a device, by its index
//	v2/affinities …       what clients and sockets are remembered in: adopted by the next process
//
// A layout that is not ours is left alone until our programs are attached; then it goes.

// memoryLayout is the number of the layout in bpf/maps.h.
const memoryLayout = "v2"

// openMemory adopts what an earlier process remembers, or begins anew, and makes sure that it is pinned.
func (p *Plane) openMemory() error {
	if err := p.claim(); err != nil {
		return err
	}
	dir := filepath.Join(p.pins, memoryLayout)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if p.memory != nil {
		return p.pinAgain(dir)
	}
	spec, err := loadObjects()
	if err != nil {
		return err
	}
	wanted := p.sizes.memory(spec)
	if p.serve == TC {
		if err := addPacketMemory(wanted); err != nil {
			return err
		}
	}
	memory := map[string]*ebpf.Map{}
	for name, want := range wanted {
		m, err := openPinned(filepath.Join(dir, name), want)
		if err != nil {
			closeMaps(memory)
			return fmt.Errorf("%s: %w", name, err)
		}
		memory[name] = m
	}
	p.memory = memory
	if p.serve != TC {
		return nil
	}
	if p.sweep, err = newSweep(memory, patience()); err != nil {
		return errors.Join(err, p.closeMemory())
	}
	return nil
}

// addPacketMemory adds what flows are remembered in.
func addPacketMemory(wanted map[string]*ebpf.MapSpec) error {
	spec, err := packetSpec(model.NewState(), packetOptions{})
	if err != nil {
		return err
	}
	for _, name := range flowMaps() {
		wanted[name] = spec.Maps[name]
	}
	return nil
}

// memoryOf is the part of the memory that some programs use.
func (p *Plane) memoryOf(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for name, m := range p.memory {
		if spec.Maps[name] != nil {
			out[name] = m
		}
	}
	return out
}

// pinAgain restores the pins that somebody has removed.
func (p *Plane) pinAgain(dir string) error {
	for name, m := range p.memory {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := errors.Join(m.Unpin(), m.Pin(path)); err != nil { // it thinks that it is pinned
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func openPinned(path string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		if spec.Compatible(m) == nil {
			return m, nil
		}
		m.Close()
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if m, err = ebpf.NewMap(spec); err != nil {
		return nil, err
	}
	if err := m.Pin(path); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// closeMemory leaves it to the kernel.
func (p *Plane) closeMemory() (err error) {
	if p.sweep != nil {
		err = p.sweep.close()
	}
	closeMaps(p.memory)
	p.memory, p.sweep = nil, nil
	return err
}

func closeMaps(maps map[string]*ebpf.Map) {
	for _, m := range maps {
		m.Close()
	}
}

// attach puts a program in force at its hook, in place of the one that is there.
func (p *Plane) attach(hook string, program *ebpf.Program) error {
	path := p.linkPath(hook)
	if l := p.openLink(hook); l != nil {
		defer l.Close()
		return l.Update(program)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: p.cgroup, Attach: hooks()[hook], Program: program})
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Pin(path)
}

func (p *Plane) linkPath(hook string) string { return filepath.Join(p.linksDir(), hook) }

func (p *Plane) linksDir() string { return filepath.Join(p.pins, "links") }

// openLink is nil if there is no link of that hook to our cgroup.
func (p *Plane) openLink(hook string) link.Link {
	l, err := link.LoadPinnedLink(p.linkPath(hook), nil)
	if err != nil {
		return nil
	}
	if info, err := l.Info(); err == nil {
		if at := info.Cgroup(); at != nil && at.CgroupId == p.cgroupID && uint32(at.AttachType) == uint32(hooks()[hook]) {
			return l
		}
	}
	l.Close()
	return nil
}

// dropLayouts removes the memory of other versions.
func (p *Plane) dropLayouts() error {
	entries, err := os.ReadDir(p.pins)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if !slices.Contains([]string{ownerLink, memoryLayout, "links"}, e.Name()) {
			errs = append(errs, os.RemoveAll(filepath.Join(p.pins, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// unpin detaches all programs and removes all pins, whoever made them.
func (p *Plane) unpin() error {
	if _, err := os.Stat(p.pins); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var errs []error
	for hook := range hooks() {
		l, err := link.LoadPinnedLink(p.linkPath(hook), nil)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EPERM) { // without CAP_BPF: it goes with its pin
			continue
		}
		if err == nil {
			err = errors.Join(l.Detach(), l.Close())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", hook, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return os.RemoveAll(p.pins)
}
