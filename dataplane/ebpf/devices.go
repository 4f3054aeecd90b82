package ebpf

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/namespace"
	"fairlead.dev/fairlead/model"
)

// devices has the programs for packets in force at the devices of the node.
//
//	Sync ────────────────► replace: every device gets the new programs
//	a device comes or goes ► watch: it gets those in force, or its pins go
//	Audit ───────────────► drifts: what another program has undone
//
// Every packet shall pass a program once on its way in and once on its way out: where this node's stack meets the
// device. So lo is left out: its packets have a socket here. Ports of a bridge, a bond or the like are left out, too.
// Their packets pass the device above as well, or never meet the stack.
//
// A device leads to pods, and to nothing else, if the rows say so by its name. A netfilter plane looks at the name of
// the arrival interface in the same way. Elsewhere the source address tells pods, as State.Lookup says.
type devices struct {
	pins      string // a directory for links
	namespace namespace.Namespace
	netlink   *netlink.Handle
	log       *slog.Logger
	fault     func(operation string) error
	drivers   drivers
	answers   bool // clients of other nodes directly

	mu       sync.Mutex
	programs *packets       // nil: none are in force, or they are not known
	pods     model.Pods     // by whose interfaces devices lead to pods
	served   map[int]device // at which programs is in force, as far as no other program has changed that
	audited  int            // the index of the device that Audit has looked at last
	filters  bool           // the kernel has no links of tcx: Linux before 6.6
	moved    bool           // addresses may have changed
	gone     []netip.Addr   // that clients were hidden behind
	watch    *watch
}

// device is what matters of an interface.
type device struct {
	index int
	name  string
	bare  bool // its packets have no header before that of IP
}

// newDevices are those of the calling thread's network namespace.
func newDevices(pins string, log *slog.Logger, fault func(string) error) (*devices, error) {
	ns, err := namespace.Here()
	if err != nil {
		return nil, err
	}
	d := &devices{pins: pins, namespace: ns, log: log, fault: fault, served: map[int]device{}}
	d.drivers = newDrivers(pins, log)
	if d.netlink, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return d, nil
}

// follow begins to serve devices as they come, which are those of the calling thread's namespace.
func (d *devices) follow() (err error) {
	if d.watch, err = newWatch(d.happened); err != nil {
		return fmt.Errorf("watch devices: %w", err)
	}
	return nil
}

func (d *devices) close() (err error) {
	if d.watch != nil {
		err = d.watch.close()
	}
	d.netlink.Close()
	return errors.Join(err, d.namespace.Close())
}

// forget says that the programs are not known any more.
func (d *devices) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.programs = nil
	clear(d.served)
}

// replace puts programs in force everywhere. A device that takes none does not keep others from being served.
func (d *devices) replace(p *packets, pods model.Pods) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted, err := d.list()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	d.programs, d.pods = nil, pods
	clear(d.served)
	if err := d.readdress(p); err != nil {
		return err
	}
	var refused []error
	for _, dev := range wanted {
		if err := d.fault("ebpf attach"); err != nil {
			return err
		}
		if err := d.serve(p, dev); err != nil {
			refused = append(refused, err)
		}
	}
	if err := d.drop(func(index int) bool { _, stays := d.served[index]; return !stays }); err != nil {
		return err
	}
	d.programs = p
	if err := d.accelerate(p); err != nil {
		refused = append(refused, err)
	}
	return dataplane.Partial(refused...)
}

// serve attaches programs to a device. One that is gone by now is served.
func (d *devices) serve(p *packets, dev device) error {
	err := d.namespace.Do(func() error {
		for _, at := range []side{ingress(), egress()} {
			program, err := d.program(p, dev, at)
			if err == nil {
				err = d.attach(dev, at, program)
			}
			if err != nil {
				return fmt.Errorf("attach to %s: %w", dev.name, err)
			}
		}
		return nil
	})
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err == nil {
		d.served[dev.index] = dev
	}
	return err
}

// program is the one for one side of a device.
func (d *devices) program(p *packets, dev device, at side) (*ebpf.Program, error) {
	return p.at(kind{dev.bare, d.pods.Contain(netip.Addr{}, dev.name)}, at)
}

// list is what shall have programs.
func (d *devices) list() ([]device, error) {
	links, err := d.links()
	if err != nil {
		return nil, err
	}
	kinds := map[int]string{}
	for _, l := range links {
		kinds[l.Attrs().Index] = l.Type()
	}
	var out []device
	for _, l := range links {
		if dev, ok := asDevice(l, kinds[l.Attrs().MasterIndex]); ok {
			out = append(out, dev)
		}
	}
	return out, nil
}

// asDevice reports false if a device needs no programs. The routing domain that a vrf is gets its packets by its
// members, which the programs see. An ifb gets packets that have arrived at another device and go on there, or are on
// their way out of one. A device that is down has no packets; it may be about to go to a pod.
func asDevice(l netlink.Link, master string) (device, bool) {
	a := l.Attrs()
	bare, known := isBare(a.EncapType)
	member := a.MasterIndex != 0 && master != "vrf"
	if a.Flags&net.FlagLoopback != 0 || a.Flags&net.FlagUp == 0 || member || !known || l.Type() == "ifb" {
		return device{}, false
	}
	return device{a.Index, a.Name, bare}, true
}

// isBare reports whether a device has no header of a link layer, by its type (ARPHRD_ in linux/if_arp.h) as the library
// calls it. If it has another one than Ethernet's, known is false; such devices carry no Services.
func isBare(kind string) (bare, known bool) {
	switch kind {
	case "ether":
		return false, true
	case "none", "ipip", "tunnel6", "sit", "gre", "gre6", "ppp", "rawip":
		return true, true
	}
	return false, false
}

// happened follows what the kernel tells.
func (d *devices) happened(e event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.moved = true
	if d.programs == nil {
		return
	}
	d.moveTo(e)
	var err error
	switch {
	case e.lost:
		err = d.catchUp()
	case e.gone:
		delete(d.served, e.link.Attrs().Index)
		err = d.drop(func(index int) bool { return index == e.link.Attrs().Index })
	case e.link != nil:
		err = d.appeared(e.link)
	}
	if err != nil && d.log != nil { // Audit will find it, too
		d.log.Warn("a device may lack Fairlead's programs, and its packets may miss Services, until the next audit",
			"error", err)
	}
}

// moveTo follows what may have changed addresses.
func (d *devices) moveTo(e event) {
	if !e.address && !e.lost && (e.link == nil || !d.programs.node.of(e.link.Attrs().Index)) {
		return
	}
	if err := d.readdress(d.programs); err != nil && d.log != nil { // Audit will find it, too
		d.log.Warn("source NAT may use an address that the node no longer has, until the next audit", "error", err)
	}
}

// appeared serves a device unless it is served already.
func (d *devices) appeared(l netlink.Link) error {
	a, master := l.Attrs(), ""
	if a.MasterIndex != 0 {
		if above, err := d.netlink.LinkByIndex(a.MasterIndex); err == nil {
			master = above.Type()
		}
	}
	dev, wanted := asDevice(l, master)
	was, served := d.served[a.Index]
	switch {
	case wanted && (!served || was != dev):
		return d.serve(d.programs, dev)
	case served && a.Flags&net.FlagUp != 0 && !wanted: // it has become a port
		delete(d.served, a.Index)
		return d.drop(func(index int) bool { return index == a.Index })
	}
	return nil
}

// catchUp is for when some of what the kernel told was lost.
func (d *devices) catchUp() error {
	wanted, err := d.list()
	if err != nil {
		return err
	}
	var errs []error
	present := map[int]bool{}
	for _, dev := range wanted {
		present[dev.index] = true
		if d.served[dev.index] != dev {
			errs = append(errs, d.serve(d.programs, dev))
		}
	}
	maps.DeleteFunc(d.served, func(index int, _ device) bool { return !present[index] })
	errs = append(errs, d.drop(func(index int) bool { return !present[index] }))
	return errors.Join(errs...)
}

// devicesAudited is how many devices one Audit looks at; devices without programs do not count.
const devicesAudited = 64

// drifts finds devices whose programs are not those in force.
func (d *devices) drifts(all bool) (drifts []dataplane.Drift, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.programs == nil {
		return nil, nil
	}
	wanted, err := d.list()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	slices.SortFunc(wanted, func(a, b device) int { return a.index - b.index })
	missing := func(dev device) {
		drifts = append(drifts, dataplane.Drift{
			Class: "programs", Object: "programs at device " + dev.name, Want: "those of this process",
		})
	}
	for _, dev := range wanted {
		if d.served[dev.index] != dev {
			missing(dev)
		}
	}
	for _, dev := range d.inTurn(wanted, all) {
		ok, err := d.holds(dev)
		if err != nil {
			return nil, fmt.Errorf("programs at %s: %w", dev.name, err)
		}
		if !ok {
			missing(dev)
		}
	}
	more, err := d.accelerated()
	return append(drifts, more...), err
}

// inTurn are some of those that are served, or all; the next ones the next time.
func (d *devices) inTurn(wanted []device, all bool) (out []device) {
	served := slices.DeleteFunc(slices.Clone(wanted), func(dev device) bool { return d.served[dev.index] != dev })
	if len(served) == 0 || all {
		return served
	}
	first, _ := slices.BinarySearchFunc(served, d.audited+1, func(dev device, index int) int { return dev.index - index })
	for i := range min(devicesAudited, len(served)) {
		out = append(out, served[(first+i)%len(served)])
	}
	d.audited = out[len(out)-1].index
	return out
}

// holds reports whether a device has the programs in force.
func (d *devices) holds(dev device) (ok bool, err error) {
	err = d.namespace.Do(func() error {
		for _, at := range []side{ingress(), egress()} {
			program, err := d.program(d.programs, dev, at)
			if err != nil {
				return err
			}
			id, err := d.programs.identities.of(program)
			if err != nil {
				return err
			}
			if ok = d.attached(dev, at) == id; !ok {
				return nil
			}
		}
		return nil
	})
	return ok, err
}

// remove takes all programs from all devices, whoever attached them.
func (d *devices) remove() error {
	d.forget()
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.drivers.keep(nil), d.drop(func(int) bool { return true }))
}

// readdress lets programs know the addresses that the node has now.
func (d *devices) readdress(p *packets) error {
	want, err := d.nodeAddrs()
	if err != nil {
		return err
	}
	if err := want.put(p.Maps[packetsMapNodeAddrs], p.node); err != nil {
		return fmt.Errorf("addresses for source NAT: %w", err)
	}
	had := p.node
	p.node = want
	return d.noteGone(had, want)
}

// hiddenBehind are the addresses that the programs know.
func (d *devices) hiddenBehind() nodeAddrs {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.programs == nil {
		return nil
	}
	return d.programs.node
}

// takeMoved reports whether addresses may have changed since it was called.
func (d *devices) takeMoved() (moved bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	moved, d.moved = d.moved, false
	return moved
}
