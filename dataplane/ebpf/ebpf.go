// Package ebpf serves Services in the system calls of whoever uses them: connect() to a Service's address becomes
// connect() to a backend. No packet is translated and nothing is tracked, so an open connection costs what one to the
// pod itself does.
//
//	connect4/6, sendmsg4/6 ─► frontends[address, port, protocol] ─► pools[number] ─► slots[random] ─► backend
//	                          │ not found: guards                    │ affinity: the one the client had
//	recvmsg4/6, getpeername4/6 ◄── sockets, flows: what a socket asked for, and what it got
//
// The programs (bpf/) are attached to a cgroup, and see the sockets of all processes in it and below it. These may be
// in any network namespace: the node's and its pods'. The programs decide what a socket can decide. The rest passes, as
// packets: those from outside, rows whose source addresses matter, SCTP, and whatever has no socket here. Programs at
// the devices serve that (bpf/tc.c, devices.go), or another plane, which in any case serves what is left (behind.go).
//
// A Sync makes new tables, fills them, and flips a word by which the programs read these in place of the old ones.
// An Apply writes a pool's backends into slots that no program uses, and then one word that leads there. No connection
// sees a part of a change. When rows do not fit any more, Apply does what Sync does, with larger tables: their
// memory follows their use.
//
// The first programs are attached without rows, and get them when all are. A process loads programs of its own, which
// take the place of those that are attached, one atomic step for each hook, and have rows from the start. It needs to
// understand nothing of their tables, so one of any version takes over from one of any other.
//
// Links, which hold the programs, and what sockets and clients are remembered in are pinned in a file system of type
// bpf. When the process ends, or is killed, all goes on.
package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
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
	// Serve says who serves packets.
	Serve Server
	// Acceleration says whether drivers serve known flows that come from outside and go there again, with TC.
	Acceleration Acceleration
	// Forwarding says whether clients from outside are hidden from backends on other nodes, with TC.
	Forwarding Forwarding
	// Packets makes the plane behind, which serves them or what is left. Without one, that is not done.
	Packets dataplane.New
	// Sizes say how much is remembered; what is 0 has its default.
	Sizes Sizes
	// ReleaseTCP has connections of TCP aborted whose backend has left its pool, as those of UDP are in any case. Without
	// it they live on until one of their ends ends them. A backend that drains has not left.
	ReleaseTCP bool
	// Probed is what planes of this process know of the kernel already, and where this one adds to that; nil: it finds out
	// for itself.
	Probed *Probed
	// ServedBy is asked about flows of the node's own sockets that were connected to Services before this plane came: to
	// which backend does another plane go on to translate them? It is the Service itself where another plane relays them.
	// If the answer is not valid, or there is no such plane (nil), such a socket is aborted, with TC.
	ServedBy func(UDPFlow) (netip.AddrPort, error)
	// OnlyNode leaves the sockets of other network namespaces than the node's to those who serve packets.
	OnlyNode bool
}

// PinsDir is the directory for the pins of a node's plane, where a file system of type bpf is mounted, or will be.
const PinsDir = "fairlead"

const defaultRoot = "/sys/fs/bpf"

// Server says who serves the packets of those who have no socket here, or whose sockets cannot do what a row says.
type Server string

const (
	// Auto is TC where the kernel can do that, else Behind.
	Auto Server = ""
	// TC has programs of the plane serve them, at every device of the node but lo. The plane behind serves what is left
	// for the node itself, and has nothing in the kernel while there is no such row.
	TC Server = "tc"
	// Behind leaves all packets to the plane behind. Without one, no plane serves them, and connections that are to be
	// refused or dropped fail at once.
	Behind Server = "behind"
)

// Plane is the ebpf data plane.
type Plane struct {
	dataplane.Base
	learned      dataplane.Learned
	config       dataplane.Config
	cgroup, pins string
	cgroupID     uint64
	node         string // the network namespace
	netns        uint64 // cookie of the node's network namespace; 0: the kernel has none, it is the first one
	secret       uint64 // by which clients that nothing is known of are spread
	hasSetRetval bool
	cannotTell   error // why the kernel does not trace outcomes of sockets; nil: it does
	told         told  // which the last Outcomes has found
	probed       *Probed
	sizes        Sizes
	serve        Server              // TC or Behind
	devices      *devices            // of the node; nil before they are needed
	behind       dataplane.Dataplane // may be nil
	left         leftover            // for it, with TC
	releaseTCP   bool
	sharesPorts  bool // sockets may have the ports that stand for clients
	direct       bool // nodes of backends answer clients, with TC
	onlyNode     bool
	draining     bool                 // the programs are to have no rows any more
	memory       map[string]*ebpf.Map // nil: not open
	replaced     map[string]*ebpf.Map // maps of another form, whose contents go to those in memory
	counted      tally                // counts of former tables, and those that were collected
	sweep        *sweep               // of it, with TC
	sets         *sets                // nil: no programs are loaded
	sockets      *ebpf.Collection     // the programs for them
	identities   identities           // of these
	packets      *packets             // nil: others serve packets
	tables       *tables              // in force; nil: the kernel's content is not known
	standing     *standing            // nil: no programs at devices serve flows only
	holders      holders              // of socket slots, when the agent looked for the last time
	socketSlots  pacer                // of that look
	loads        *loads               // of backends; nil: the memory is not open
	strays       strays               // sockets of the node that no hook has seen
	attached     attached             // clients
	// cannotRelease says that this kernel does not abort sockets for us, releasesNode that not all namespaces
	// are reached.
	cannotRelease, releasesNode bool
	releaseAgain                bool // the next Audit is to
}

var _ dataplane.Dataplane = (*Plane)(nil)

// Driver has planes with options.
func Driver(o Options) dataplane.Driver {
	return dataplane.Driver{
		Name: "ebpf", Open: New(o), Inspect: inspect, Sessions: leftSessions, Remove: removeLeft, Drain: drainLeft,
	}
}

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
	p := &Plane{config: c, cgroup: o.Cgroup, pins: o.Pins, sizes: o.Sizes, releaseTCP: o.ReleaseTCP, onlyNode: o.OnlyNode,
		counted: tally{}, probed: cmp.Or(o.Probed, &Probed{}), strays: strays{servedBy: o.ServedBy}, secret: rand.Uint64()}
	if p.pins == "" {
		p.pins = filepath.Join(defaultRoot, PinsDir)
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
	if err := p.openPackets(o); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// hasPacketLinks says that an earlier process has had programs for packets at devices. So the kernel can do that, and
// need not be asked again. The question takes a twentieth of a second, in which no plane follows the Services.
func (p *Plane) hasPacketLinks() bool {
	links, err := filepath.Glob(filepath.Join(p.linksDir(), ingress().name+"*"))
	return err == nil && len(links) > 0
}

// openPackets finds out who serves packets.
func (p *Plane) openPackets(o Options) (err error) {
	if p.devices, err = newDevices(p.linksDir(), p.config.Log, p.config.Inject); err != nil {
		return err
	}
	if p.serve = o.Serve; o.Serve != Behind {
		if !p.hasPacketLinks() {
			err = p.probePackets(false)
		}
		if o.Serve == Auto && errors.Is(err, dataplane.ErrUnsupported) {
			p.say("programs at devices cannot be used; the plane behind serves packets", "error", err)
			p.serve, err = Behind, nil
		} else {
			p.serve = TC
		}
	}
	p.direct = p.serve == TC && o.Forwarding == ForwardingDSR
	p.devices.answers = p.direct
	if err == nil && p.serve == TC {
		err = p.probeFast(o.Acceleration)
	}
	if err == nil && p.serve == TC {
		err = p.devices.follow()
	}
	if err == nil && o.Packets != nil {
		p.behind, err = o.Packets(p.config)
	}
	p.left.behind = p.behind
	return err
}

// say logs a message, if there is a log.
func (p *Plane) say(message string, args ...any) {
	p.config.Logger().Info(message, args...)
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

// Sync implements dataplane.Dataplane. The plane that takes packets over programs its rules first. Then the plane that
// has served them removes its own.
func (p *Plane) Sync(ctx context.Context, s *model.State) error {
	var partial error
	if p.serve == Behind && p.behind != nil {
		if partial = p.behind.Sync(ctx, s); !dataplane.Known(partial) {
			return partial
		}
	}
	err := p.learnNode()
	if err == nil {
		err = p.replace(s)
	}
	if !dataplane.Known(err) {
		p.forget()
		return fmt.Errorf("ebpf: %w", err)
	}
	partial = errors.Join(partial, err)
	if p.serve == TC {
		p.sweep.start(p.devices.dropGone)
		if err = p.left.sync(ctx, s); !dataplane.Known(err) {
			return err
		}
		partial = errors.Join(partial, err)
		p.strays.soon()
		if err = p.auditStrays(s); err != nil {
			partial = errors.Join(partial, fmt.Errorf("%w: ebpf: %w", dataplane.ErrPartial, err))
		}
	}
	return partial
}

// replace puts programs in force, those that are there and others if need be, with new tables. Programs that are
// attached anew get their rows at one moment, when all of them are attached. Else a flow could begin at one device and
// meet another one without its program, and would be lost.
func (p *Plane) replace(s *model.State) error {
	if err := p.config.Inject("ebpf load"); err != nil {
		return err
	}
	if err := p.stand(); err != nil {
		return err
	}
	if err := p.openMemory(); err != nil {
		return fmt.Errorf("open what is pinned in %s: %w", p.pins, err)
	}
	if err := p.resetFlowFilter(); err != nil {
		return err
	}
	if err := p.loadPrograms(); err != nil {
		return err
	}
	none, err := p.nobodyServes()
	if err != nil {
		return err
	}
	if none {
		p.tables, err = p.fill(s)
	} else {
		err = p.refill(s)
	}
	if err == nil {
		err = p.migrate()
	}
	if err != nil {
		return err
	}
	p.learned.TakeIn(p.config.Log, p.taker(s))
	p.sharePorts()
	partial := p.attachAll(s.Pods)
	if dataplane.Known(partial) && none {
		err = p.sets.putInForce(p.tables.Maps, s.Pods, p.config.Inject)
	}
	if err != nil || !dataplane.Known(partial) {
		return errors.Join(partial, err)
	}
	p.unsharePorts()
	if err := errors.Join(p.settleMemory(), p.dropOthers(), p.settle(s)); err != nil {
		return err
	}
	return partial
}

// nobodyServes reports whether no programs are attached that have rows, neither ours nor those of an earlier process.
func (p *Plane) nobodyServes() (bool, error) {
	if p.sets.filled {
		return false, nil
	}
	if _, err := os.Stat(filepath.Join(p.pins, drainingMark)); err == nil {
		return true, nil
	}
	links, err := os.ReadDir(p.linksDir())
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return len(links) == 0, err
}

// refill has the programs read new tables, that hold s.
func (p *Plane) refill(s *model.State) error {
	t, err := p.fill(s)
	if err != nil {
		return err
	}
	if err := p.sets.putInForce(t.Maps, s.Pods, p.config.Inject); err != nil {
		t.close()
		return err
	}
	p.forget()
	p.tables = t
	return nil
}

// fill makes tables that hold s, and that no program reads yet.
func (p *Plane) fill(s *model.State) (*tables, error) {
	t, err := newTables(p.sets, p.sizes.room(capacityFor(s)), p.config.Inject)
	if err != nil {
		return nil, err
	}
	t.tcp, t.packets, t.node, t.loads, t.lost = p.releaseTCP, p.serve == TC, p.left.node, p.loads, true
	if err := t.load(s); err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// loadPrograms loads what is not loaded. Nothing is attached.
func (p *Plane) loadPrograms() (err error) {
	if p.sets == nil {
		if p.sets, err = newSets(); err != nil {
			return err
		}
	}
	var both errgroup.Group // the kernel verifies one program on one processor
	if p.sockets == nil {
		both.Go(func() (err error) {
			if p.sockets, err = p.loadSockets(p.sets); err != nil {
				err = fmt.Errorf("load programs: %w", err)
			}
			return err
		})
	}
	switch {
	case p.serve == TC:
		both.Go(func() error { return p.loadPackets(p.sets) })
	case p.standing != nil:
		both.Go(func() error { return p.loadPackets(p.standing.none) })
	}
	return both.Wait()
}

// closePrograms leaves them to the kernel, which keeps those that are attached, with their tables.
func (p *Plane) closePrograms() {
	p.forget()
	p.closePackets()
	if p.sockets != nil {
		p.sockets.Close()
	}
	if p.sets != nil {
		_ = p.sets.close()
	}
	p.closeStanding()
	p.told.close()
	p.sockets, p.sets, p.identities = nil, nil, identities{}
}

// attachAll puts the programs in force.
func (p *Plane) attachAll(pods model.Pods) error {
	if !p.draining {
		if err := p.attachHooks(); err != nil {
			return err
		}
		return p.attachDevices(pods)
	}
	// A connection that sockets leave alone already must not meet rows at a device: to these the client is another one.
	partial := p.attachDevices(pods)
	if !dataplane.Known(partial) {
		return partial
	}
	return errors.Join(partial, p.attachHooks())
}

func (p *Plane) attachHooks() error {
	for hook := range hooks() {
		if onlyCounts(hook) && !p.countsSockets() {
			if err := unpinLink(p.linkPath(hook)); err != nil {
				return err
			}
		}
	}
	for _, hook := range p.hookNames() {
		err := p.config.Inject("ebpf attach")
		if err == nil {
			err = p.link(hook).put(p.sockets.Programs[hook])
		}
		if err != nil {
			return fmt.Errorf("attach %s to %s: %w", hook, p.cgroup, err)
		}
	}
	return nil
}

func (p *Plane) attachDevices(pods model.Pods) error {
	switch {
	case p.serve == TC:
		return p.devices.replace(p.packets, pods)
	case p.standing != nil:
		return p.devices.replace(p.packets, model.Pods{})
	}
	return p.devices.remove()
}

// settle makes sure that no socket stays with a backend that it has lost.
func (p *Plane) settle(s *model.State) error {
	if !p.tables.lost {
		return nil
	}
	p.tables.lost, p.releaseAgain = false, true
	return p.release(s)
}

// forget closes the tables, which the kernel keeps while they are in force. Devices that come get programs meanwhile.
func (p *Plane) forget() {
	if p.tables != nil {
		p.keepCounters()
		p.tables.close()
	}
	p.tables = nil
}

// SetStage implements dataplane.Handover: the plane behind may have to know.
func (p *Plane) SetStage(ctx context.Context, s *model.State, to dataplane.Stage) (open int, err error) {
	if p.behind == nil {
		return 0, nil
	}
	return p.behind.SetStage(ctx, s, to)
}

// Apply implements dataplane.Dataplane.
func (p *Plane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	if p.tables == nil {
		return errors.New("ebpf: the kernel's content is not known; Sync first")
	}
	var partial error
	if p.serve == Behind && p.behind != nil {
		if partial = p.behind.Apply(ctx, s, c); !dataplane.Known(partial) {
			p.forget()
			return partial
		}
	}
	err := p.apply(s, c)
	if dataplane.Known(err) && p.serve == TC {
		partial = err
		err = p.left.apply(ctx, s, c)
	}
	if !dataplane.Known(err) {
		p.forget()
		return fmt.Errorf("ebpf: %w", err)
	}
	partial = errors.Join(partial, err)
	if setsUDP(c) {
		p.strays.soon()
	}
	return partial
}

// apply changes the tables, or has others take their place if they are full.
func (p *Plane) apply(s *model.State, c model.Change) error {
	if c.Pods != nil { // which devices lead to them may have changed
		return p.replace(s)
	}
	err := p.tables.apply(s, c)
	if errors.Is(err, errFull) {
		err = p.refill(s)
	}
	if err == nil {
		err = p.settle(s)
	}
	return err
}

// Remove implements dataplane.Dataplane.
func (p *Plane) Remove(ctx context.Context) error {
	p.forget()
	err := errors.Join(p.closeMemory(), p.config.Inject("ebpf remove"))
	if err == nil {
		err = p.removeDevices()
	}
	if err == nil {
		p.endDivert() // as long as there are pins, it is tried again
		err = p.unpin()
	}
	if err != nil {
		err = fmt.Errorf("ebpf: %w", err)
	}
	if p.behind != nil {
		p.left.forget()
		err = errors.Join(p.behind.Remove(ctx), err)
	}
	return err
}

func (p *Plane) removeDevices() (err error) {
	if p.devices == nil {
		if p.devices, err = newDevices(p.linksDir(), p.config.Log, p.config.Inject); err != nil {
			return err
		}
	}
	return p.devices.remove()
}

// Close implements dataplane.Dataplane.
func (p *Plane) Close() (err error) {
	p.forget()
	err = p.closeMemory()
	if p.devices != nil {
		err = errors.Join(err, p.devices.close())
	}
	if p.behind != nil {
		err = errors.Join(err, p.behind.Close())
	}
	return err
}
