package daemon

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/handover"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/dataplane/userspace"
)

// plane is a data plane with what the agent adds to it.
type plane struct {
	dataplane.Driver
	// wrap adds what the plane needs beside itself; nil: nothing, or Open does that.
	wrap func(dataplane.Driver) dataplane.New
	// behind is the plane that serves what this one cannot, if there is one: what that has left is this one's.
	behind string
}

// planes come in the order in which they are chosen for a mode that has none of its own. Their settings are of no
// interest.
func planes() []plane { return planesWith(planeSettings{}, nil) }

// planesWith are those that Open opens with settings. The way is that of packets to the process of mode userspace.
func planesWith(s planeSettings, way *userspace.Redirect) []plane {
	return []plane{
		{Driver: nftables.Driver(), wrap: wrapped},
		{Driver: iptables.Driver(s.iptables), wrap: wrapped},
		{Driver: ipvs.Driver(s.ipvs), wrap: wrapped},
		{Driver: ebpfDriver(s.ebpf), behind: nftablesPlane},
		{Driver: userspace.Driver(s.userspace, legacyTables(), way), wrap: untranslated},
	}
}

func (s planeSettings) plane(way *userspace.Redirect) (plane, error) {
	all := planesWith(s, way)
	i := slices.IndexFunc(all, func(p plane) bool { return p.Name == s.name })
	if i < 0 {
		return plane{}, fmt.Errorf("there is no data plane %q", s.name)
	}
	return all[i], nil
}

// planeSettings tell one data plane from another. They are compared.
type planeSettings struct {
	name      string
	mark      uint32
	counters  dataplane.Detail
	flowtable dataplane.Flowtable // of nftables
	iptables  iptables.Options    // of that plane
	ipvs      ipvs.Options        // likewise
	ebpf      config.EBPF         // likewise
	userspace userspace.Options   // likewise
}

// legacyTables are what leads packets to the process of mode userspace where the kernel has no nf_tables.
func legacyTables() dataplane.New {
	return conntrack.Wrap(iptables.New(iptables.Options{Backend: iptables.Legacy}))
}

// drivers are those of all planes.
func drivers() (all []dataplane.Driver) {
	for _, p := range planes() {
		all = append(all, p.Driver)
	}
	return all
}

// chains are the back ends of iptables in which there are chains of a plane.
func chains(p *handover.Plane) iptables.Backend {
	if p.Over == iptablesPlane {
		return iptables.Legacy
	}
	return found(p).iptables.Backend
}

// ebpfDriver has a section of the configuration in the words of the plane. Behind it is the plane of packets with
// all that wraps one: a socket that the ebpf plane translates needs no relay and no connection tracking.
func ebpfDriver(c config.EBPF) dataplane.Driver {
	o := ebpf.Options{
		Cgroup: c.CgroupRoot, Pins: filepath.Join(c.BPFRoot, ebpf.PinsDir), Acceleration: ebpf.Acceleration(c.Acceleration),
		Forwarding: ebpf.Forwarding(c.Forwarding),
		OnlyNode:   c.Sockets == config.EBPFSocketsOfNode, ReleaseTCP: c.AbortTCP, Sizes: sizes(c.Sizes),
	}
	if c.Packets == config.EBPFPacketsByNFTables {
		o.Serve = ebpf.Behind
	}
	d := ebpf.Driver(o)
	d.Open, d.Prepare = newOverDrainer(o, wrapped(nftables.Driver())), nftables.Driver().Prepare
	return d
}

func sizes(c config.EBPFSizes) ebpf.Sizes {
	return ebpf.Sizes{
		Affinities: uint32(c.Affinities), Flows: uint32(c.Flows), Sockets: uint32(c.Sockets),
		Translations: uint32(c.Translations), Services: uint32(c.Services),
	}
}

// wrapped adds what planes based on netfilter need.
func wrapped(d dataplane.Driver) dataplane.New { return localhost.Wrap(conntrack.Wrap(d.Open)) }

func untranslated(d dataplane.Driver) dataplane.New {
	return conntrack.WrapUntranslated(d.Open, d.Carries)
}

// variant is the back end of iptables that an open plane has found.
func (s planeSettings) variant() string { return string(s.iptables.Backend) }

// movesFrom reports whether its rules are in another place than those of another plane.
func (s planeSettings) movesFrom(old planeSettings) bool {
	return s.name != old.name || s.iptables.Backend != old.iptables.Backend
}

// open makes a plane. A node that cannot have the one that its mode names has nftables rather than no Services.
func (s planeSettings) open(c dataplane.Config) (*handover.Plane, error) {
	p, err := s.openItself(c)
	if err == nil || s.name == nftablesPlane || !s.lacks(err) {
		return p, permitted(err)
	}
	p, second := planeSettings{name: nftablesPlane, mark: s.mark}.openItself(c)
	if second != nil {
		return nil, permitted(err)
	}
	p.Instead = s.instead(err)
	c.Log.Warn(p.Instead, "error", err)
	return p, nil
}

// lacks reports whether it is for want of something of the machine that a plane cannot be opened.
func (s planeSettings) lacks(err error) bool {
	return errors.Is(err, dataplane.ErrUnsupported) || s.name == ebpfPlane && errors.Is(err, unix.EPERM)
}

// instead says that nftables serves, and what to do.
func (s planeSettings) instead(err error) string {
	lacking, remedy := "this kernel cannot do what mode %s needs", "have the kernel load its modules for %s"
	if s.name == ebpfPlane {
		lacking, remedy = "this machine cannot serve mode %s: "+err.Error(), "provide what %s lacks, and restart Fairlead"
	}
	return fmt.Sprintf(lacking+"; the data plane nftables serves instead, until the next start. "+
		"Set mode (--proxy-mode) to nftables, or "+remedy, s.name, s.name)
}

// openItself opens the plane of the settings. A plane through whose process connections pass is also the Process of the
// result, without the wrappers around it.
func (s planeSettings) openItself(c dataplane.Config) (_ *handover.Plane, err error) {
	if s.name == iptablesPlane && s.iptables.Backend == "" {
		if s.iptables.Backend, err = iptables.Detect(); err != nil {
			return nil, err
		}
	}
	var way userspace.Redirect
	p, err := s.plane(&way)
	if err != nil {
		return nil, err
	}
	made := &handover.Plane{Name: s.name, Settings: s, Behind: p.behind, Mark: s.mark}
	open := p.Open
	p.Open = func(c dataplane.Config) (dataplane.Dataplane, error) {
		inner, err := open(c)
		if p.Carries != nil {
			made.Process = inner
		}
		return inner, err
	}
	whole := p.Open
	if p.wrap != nil {
		whole = p.wrap(p.Driver)
	}
	c.Mark, c.Counters, c.Flowtable = s.mark, s.counters, s.flowtable
	if made.Dataplane, err = whole(c); err != nil {
		return nil, err
	}
	made.Unprivileged = way == userspace.ByListening
	if way == userspace.ByPlane {
		made.Over = iptablesPlane
	}
	return made, nil
}

// permitted says of the most frequent error what to do.
func permitted(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("root, or CAP_NET_ADMIN, is needed to program the kernel: %w", err)
	}
	return err
}
