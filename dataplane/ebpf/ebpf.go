// Package ebpf serves Services in the system calls of whoever uses them: connect() to a Service's address becomes
// connect() to a backend. No packet is translated and nothing is tracked, so an open connection costs what one to the
// pod itself does.
//
//	connect4/6, sendmsg4/6 ─► frontends[address, port, protocol] ─► pools[number] ─► slots[random] ─► backend
//	                          │ not found: guards                    │ affinity: the one the client had
//	recvmsg4/6, getpeername4/6 ◄── sockets, flows: what a socket asked for, and what it got
//
// The programs (bpf/) are attached to a cgroup, and see the sockets of all processes in it and below it, in whatever
// network namespace: the node's and its pods'. They decide what a socket can decide. The rest passes, as packets, and
// is served by another plane, if Options name one: what comes from outside, rows whose source addresses matter,
// SCTP, and whatever has no socket here.
//
// A Sync makes new tables, fills them, and replaces the programs by ones that use these, one atomic step for each hook.
// Nothing of the old tables needs to be understood, so a process of any version takes over from one of any other. An
// Apply writes a pool's backends into slots that nobody uses, and then one word that leads there; no connection sees
// a part of a change. When rows do not fit any more, Apply does what Sync does, with larger tables: their
// memory follows their use.
//
// Links, which hold the programs, and what sockets and clients are remembered in are pinned in a file system of type
// bpf. When the process ends, or is killed, all goes on.
package ebpf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Options are what the plane needs to know beside its Config.
type Options struct {
	// Cgroup is the directory of the cgroup (version 2) whose processes are served, and those below it; empty: where the
	// hierarchy is mounted. That is its root, which all processes are below, unless this one is in a cgroup namespace, as
	// a container may be: then it needs the machine's hierarchy mounted.
	Cgroup string
	// Pins is a directory that belongs to the plane alone; its parent is in a file system of type bpf, or one can be
	// mounted there.
	Pins string
	// Packets makes the plane for what the hooks let pass. Without one, what they cannot do is not done, and
	// connections that are to be refused or dropped fail at once.
	Packets dataplane.New
	// Sizes say how much is remembered; what is 0 has its default.
	Sizes Sizes
}

// Pins is the directory for the pins of a node's plane, where a file system of type bpf is mounted, or will be.
func Pins(bpfRoot string) string { return filepath.Join(bpfRoot, pinsName) }

const (
	defaultRoot = "/sys/fs/bpf"
	pinsName    = "fairlead"
)

// Plane is the ebpf data plane.
type Plane struct {
	config       dataplane.Config
	cgroup, pins string
	cgroupID     uint64
	node         string // the network namespace
	netns        uint64 // cookie of the node's network namespace; 0: the kernel has none, it is the first one
	hasSetRetval bool
	sizes        Sizes
	packets      dataplane.Dataplane  // may be nil
	memory       map[string]*ebpf.Map // nil: not open
	counted      tally                // what tables have counted that are no more, and what was collected
	tables       *tables              // nil: the kernel's content is not known
	// cannotRelease says that this kernel does not abort sockets for us, onlyNode that it does so for the node alone.
	cannotRelease, onlyNode bool
}

var (
	_ dataplane.Dataplane = (*Plane)(nil)
	_ dataplane.Counted   = (*Plane)(nil)
)

// New makes New open the plane in the network namespace of the calling thread. It needs CAP_BPF and CAP_NET_ADMIN.
func New(o Options) dataplane.New {
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		p, err := open(c, o)
		if err != nil {
			return nil, fmt.Errorf("ebpf: %w", err)
		}
		return p, nil
	}
}

func open(c dataplane.Config, o Options) (*Plane, error) {
	p := &Plane{config: c, cgroup: o.Cgroup, pins: o.Pins, sizes: o.Sizes, counted: tally{}}
	if p.pins == "" {
		p.pins = Pins(defaultRoot)
	}
	if p.cgroup == "" {
		var err error
		if p.cgroup, err = findCgroup(); err != nil {
			return nil, err
		}
	}
	for _, step := range []func() error{
		checkRights, checkKernel, func() error { return mountBPF(filepath.Dir(p.pins)) }, p.identify, p.probe,
	} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	if o.Packets != nil {
		var err error
		if p.packets, err = o.Packets(c); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// identify finds out by which numbers the programs and links know the cgroup and the network namespace.
func (p *Plane) identify() error {
	var fs unix.Statfs_t
	var cgroup unix.Stat_t
	err := unix.Statfs(p.cgroup, &fs)
	if err == nil {
		err = unix.Stat(p.cgroup, &cgroup)
	}
	if err != nil {
		return fmt.Errorf("cgroup %q: %w", p.cgroup, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%w: %s is no cgroup of version 2", dataplane.ErrUnsupported, p.cgroup)
	}
	p.cgroupID = cgroup.Ino
	if err := p.checkCgroup(); err != nil {
		return err
	}
	return p.identifyNode()
}

func (p *Plane) identifyNode() (err error) {
	if p.node, err = ownNode(); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	p.netns, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) { // before Linux 5.14
		return nil
	}
	return os.NewSyscallError("getsockopt", err)
}

func (p *Plane) fault(operation string) error {
	if p.config.Fault == nil {
		return nil
	}
	return p.config.Fault(operation)
}

// Sync implements dataplane.Dataplane.
func (p *Plane) Sync(ctx context.Context, s *model.State) error {
	var partial error
	if p.packets != nil {
		partial = p.packets.Sync(ctx, s)
		if partial != nil && !errors.Is(partial, dataplane.ErrPartial) {
			return partial
		}
	}
	if err := p.replace(s); err != nil {
		p.forget()
		return fmt.Errorf("ebpf: %w", err)
	}
	return partial
}

// replace puts new programs with new tables in force.
func (p *Plane) replace(s *model.State) error {
	if err := p.fault("ebpf load"); err != nil {
		return err
	}
	if err := p.openMemory(); err != nil {
		return fmt.Errorf("open what is pinned in %s: %w", p.pins, err)
	}
	t, err := p.fillNew(s)
	if err != nil {
		return err
	}
	for _, hook := range hookNames() {
		if err = p.fault("ebpf attach"); err == nil {
			err = p.attach(hook, t.Programs[hook])
		}
		if err != nil {
			t.close()
			return fmt.Errorf("attach %s to %s: %w", hook, p.cgroup, err)
		}
	}
	p.forget()
	p.tables = t
	p.tables.lost = true
	return errors.Join(p.dropLayouts(), p.settle(s))
}

// fillNew makes tables that hold s, and programs that are not attached.
func (p *Plane) fillNew(s *model.State) (*tables, error) {
	c, err := p.program(capacityFor(s), s.Pods)
	if err != nil {
		return nil, fmt.Errorf("load programs: %w", err)
	}
	t, err := newTables(c, p.fault)
	if err != nil {
		return nil, err
	}
	if err := t.load(s); err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// settle makes sure that no UDP socket stays with a backend that it has lost.
func (p *Plane) settle(s *model.State) error {
	if !p.tables.lost {
		return nil
	}
	p.tables.lost = false
	return p.release(s)
}

// forget closes the tables, which the kernel keeps while programs that use them are attached.
func (p *Plane) forget() {
	if p.tables != nil {
		p.keepCounters()
		p.tables.close()
	}
	p.tables = nil
}

// Apply implements dataplane.Dataplane.
func (p *Plane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	if p.tables == nil {
		return errors.New("ebpf: the kernel's content is not known; Sync first")
	}
	var partial error
	if p.packets != nil {
		partial = p.packets.Apply(ctx, s, c)
		if partial != nil && !errors.Is(partial, dataplane.ErrPartial) {
			p.forget()
			return partial
		}
	}
	err := errFull
	if c.Pods == nil {
		err = p.tables.apply(s, c)
	}
	if err == nil {
		err = p.settle(s)
	}
	if errors.Is(err, errFull) {
		err = p.replace(s)
	}
	if err != nil {
		p.forget()
		return fmt.Errorf("ebpf: %w", err)
	}
	return partial
}

// Remove implements dataplane.Dataplane.
func (p *Plane) Remove(ctx context.Context) error {
	p.forget()
	closeMaps(p.memory)
	p.memory = nil
	err := p.fault("ebpf remove")
	if err == nil {
		err = p.unpin()
	}
	if err != nil {
		err = fmt.Errorf("ebpf: %w", err)
	}
	if p.packets != nil {
		err = errors.Join(p.packets.Remove(ctx), err)
	}
	return err
}

// Close implements dataplane.Dataplane.
func (p *Plane) Close() error {
	p.forget()
	closeMaps(p.memory)
	p.memory = nil
	if p.packets != nil {
		return p.packets.Close()
	}
	return nil
}
