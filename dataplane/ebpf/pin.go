package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// The plane pins these below a directory of its own in a file system of type bpf:
//
//	netns                 the node's network namespace, by a symbolic link
//	links/connect4 …      each holds a program to the cgroup, the program its tables
//	links/ingress-2 …     likewise to a device, by its index
//	memory/affinities …   what clients, sockets and flows are remembered in
//
// The next process, of whatever version, adopts each map that is laid out as its own one of that name. A map whose
// elements get another meaning, but not another size, needs another name. A map that is not adopted serves its programs
// until others are attached, and then goes.

// memoryDir has the maps that outlive programs.
const memoryDir = "memory"

func (p *Plane) memoryPath(name string) string { return filepath.Join(p.pins, memoryDir, name) }

// openMemory adopts what an earlier process remembers, or begins anew, and makes sure that it is pinned.
func (p *Plane) openMemory() error {
	if err := p.claim(); err != nil {
		return err
	}
	if err := os.MkdirAll(p.memoryPath(""), 0o700); err != nil {
		return err
	}
	if p.memory != nil {
		return p.pinAgain()
	}
	spec, err := withWords(loadObjects())
	if err != nil {
		return err
	}
	wanted := p.sizes.memory(spec)
	if p.serve == TC || p.standing != nil {
		if err := p.sizes.addPacketMemory(wanted); err != nil {
			return err
		}
	}
	if p.countsSockets() {
		spec.Maps[objectsMapTraffic].MaxEntries = forgetting(trafficked)
		wanted[objectsMapTraffic], wanted[objectsMapCounting] = spec.Maps[objectsMapTraffic], spec.Maps[objectsMapCounting]
	}
	p.memory, p.replaced = map[string]*ebpf.Map{}, map[string]*ebpf.Map{}
	for name, want := range wanted {
		if err := p.openMap(name, want); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", name, err), p.closeMemory())
		}
	}
	p.loads = newLoads(p.memory[objectsMapLoads])
	if p.serve != TC {
		return nil
	}
	if p.sweep, err = newSweep(p.memory, patience(), p.memoryPath("")); err != nil {
		return errors.Join(err, p.closeMemory())
	}
	p.sweep.loads = p.loads
	return nil
}

// pinnedSizes are those of the maps of an earlier process, which had them from its configuration. A map that is
// missing, or cannot be read, has its default.
func (p *Plane) pinnedSizes() (s Sizes) {
	for name, size := range map[string]*uint32{
		objectsMapAffinities: &s.Affinities, objectsMapFlows: &s.Flows, objectsMapSockets: &s.Sockets,
		packetsMapTranslations: &s.Translations,
	} {
		if m, err := ebpf.LoadPinnedMap(p.memoryPath(name), nil); err == nil {
			*size = m.MaxEntries()
			m.Close()
		}
	}
	return s
}

// addPacketMemory adds what flows are remembered in.
func (s Sizes) addPacketMemory(wanted map[string]*ebpf.MapSpec) error {
	spec, err := packetSpec(packetOptions{Translations: s.orDefault().Translations})
	if err != nil {
		return err
	}
	for _, name := range flowMaps() {
		wanted[name] = spec.Maps[name]
	}
	return nil
}

// memoryOf is the part of the memory that some programs use, which get its sizes.
func (p *Plane) memoryOf(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for name, m := range p.memory {
		if want := spec.Maps[name]; want != nil {
			want.MaxEntries, out[name] = m.MaxEntries(), m
		}
	}
	return out
}

// resetFlowFilter has programs look for every packet's flow until a pass through our table is over: what is noted may
// be of another one, or by programs of another version.
func (p *Plane) resetFlowFilter() error {
	if p.sweep != nil {
		p.sweep.resetFlowFilter()
	} else if m := p.memory[packetsMapNoted]; m != nil {
		return ignoreFlowFilter(m)
	}
	if m := p.replaced[packetsMapNoted]; m != nil {
		return ignoreFlowFilter(m)
	}
	return nil
}

// pinAgain restores the pins that another program has removed.
func (p *Plane) pinAgain() error {
	for name, m := range p.memory {
		path := p.memoryPath(name)
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := errors.Join(m.Unpin(), m.Pin(path)); err != nil { // it thinks that it is pinned
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// openMap adopts a map, or makes one. One of another size hands on its elements, where that is possible, when the
// programs are in force: until then it stays pinned.
func (p *Plane) openMap(name string, spec *ebpf.MapSpec) error {
	path := p.memoryPath(name)
	old, err := ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		if spec.Compatible(old) == nil {
			p.memory[name] = old
			return nil
		}
		if p.memory[name], err = ebpf.NewMap(spec); err != nil {
			old.Close()
			return err
		}
		p.replaced[name] = old
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if p.memory[name], err = ebpf.NewMap(spec); err != nil {
		return err
	}
	return p.memory[name].Pin(path)
}

// closeMemory leaves it to the kernel, with the programs that use it.
func (p *Plane) closeMemory() (err error) {
	p.closePrograms()
	if p.sweep != nil {
		err = p.sweep.close()
	}
	closeMaps(p.memory)
	closeMaps(p.replaced)
	clear(p.replaced)
	p.memory, p.sweep, p.loads = nil, nil, nil
	return err
}

func closeMaps(maps map[string]*ebpf.Map) {
	for _, m := range maps {
		m.Close()
	}
}

// linkPin is where a link to a hook is pinned, which holds a program there.
type linkPin struct {
	path string
	is   func(*link.Info) bool // it is to that hook, and in force
	make func(*ebpf.Program) (link.Link, error)
}

// put puts a program in force at the hook, in place of the one that is there.
func (p linkPin) put(program *ebpf.Program) error {
	if l := p.open(); l != nil {
		defer l.Close()
		return l.Update(program)
	}
	if err := os.MkdirAll(filepath.Dir(p.path), 0o700); err != nil {
		return err
	}
	if err := unpinLink(p.path); err != nil && os.Remove(p.path) != nil { // it may be something else
		return err
	}
	l, err := p.make(program)
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Pin(p.path)
}

// open is nil if there is no link of ours in force at the hook.
func (p linkPin) open() link.Link {
	l, err := link.LoadPinnedLink(p.path, nil)
	if err != nil {
		return nil
	}
	if info, err := l.Info(); err == nil && p.is(info) {
		return l
	}
	l.Close()
	return nil
}

// program is the one of ours at the hook; 0: none.
func (p linkPin) program() ebpf.ProgramID {
	l := p.open()
	if l == nil {
		return 0
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return 0
	}
	return info.Program
}

// unpinLink ends a link. Its device may be gone, or in another namespace: then it has it still.
func unpinLink(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = l.Detach()
		if errors.Is(err, unix.ENOLINK) {
			err = nil
		}
		err = errors.Join(err, l.Close())
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.Remove(path)
}

func (p *Plane) linkPath(hook string) string { return filepath.Join(p.linksDir(), hook) }

func (p *Plane) linksDir() string { return filepath.Join(p.pins, "links") }

// link is for a hook of our cgroup.
func (p *Plane) link(hook string) linkPin {
	return linkPin{
		p.linkPath(hook), func(i *link.Info) bool {
			at := i.Cgroup()
			return at != nil && at.CgroupId == p.cgroupID && uint32(at.AttachType) == uint32(hooks()[hook])
		}, func(program *ebpf.Program) (link.Link, error) {
			return link.AttachCgroup(link.CgroupOptions{Path: p.cgroup, Attach: hooks()[hook], Program: program})
		},
	}
}

// dropOthers removes what only another version knows.
func (p *Plane) dropOthers() error {
	errs := []error{p.dropBut(p.pins, func(name string) bool {
		return name == ownerLink || name == memoryDir || name == "links"
	})}
	errs = append(errs, p.dropBut(p.memoryPath(""), func(name string) bool { return p.memory[name] != nil }))
	return errors.Join(errs...)
}

func (p *Plane) dropBut(dir string, stays func(name string) bool) error {
	entries, err := os.ReadDir(dir)
	errs := []error{err}
	for _, e := range entries {
		if !stays(e.Name()) {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
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
		// EPERM: without CAP_BPF it goes with its pin.
		if err := unpinLink(p.linkPath(hook)); err != nil && !errors.Is(err, unix.EPERM) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return os.RemoveAll(p.pins)
}
