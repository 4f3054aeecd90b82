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

const (
	nftablesPlane  = "nftables"
	iptablesPlane  = "iptables"
	ipvsPlane      = "ipvs"
	ebpfPlane      = "ebpf"
	userspacePlane = "userspace"
)

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

// Planes are the names of the data planes that are built in.
func Planes() (names []string) {
	for _, p := range planes() {
		names = append(names, p.Name)
	}
	return names
}

func planeNamed(name string) (plane, error) {
	return planeSettings{name: name}.plane(nil)
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
	iptables  iptables.Options  // of that plane
	ipvs      ipvs.Options      // likewise
	ebpf      config.EBPF       // likewise
	userspace userspace.Options // likewise
}

// legacyTables are what leads packets to the process of mode userspace where the kernel has no nf_tables.
func legacyTables() dataplane.New {
	return conntrack.Wrap(iptables.New(iptables.Options{Backend: iptables.Legacy}))
}

// over is the plane that has the rules for this one; empty: this one has its own.
func (o *opened) over() string {
	if o.way == userspace.ByPlane {
		return iptablesPlane
	}
	return ""
}

// unprivileged reports whether the plane serves without rights. It may remove nothing, and need not: it is in no other
// plane's way.
func (o *opened) unprivileged() bool { return o.way == userspace.ByListening }

// chains are the back ends of iptables in which there are chains of a plane.
func (o *opened) chains() iptables.Backend {
	if o.over() == iptablesPlane {
		return iptables.Legacy
	}
	return o.settings.iptables.Backend
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
	d.Open, d.Prepare = newOverLingering(o, wrapped(nftables.Driver())), nftables.Driver().Prepare
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

// movesFrom reports whether its rules are in another place than those of another plane.
func (s planeSettings) movesFrom(old planeSettings) bool {
	return s.name != old.name || s.iptables.Backend != old.iptables.Backend
}

// opened is a data plane and what it is.
type opened struct {
	dataplane.Dataplane
	inner    dataplane.Dataplane // without what wraps it
	settings planeSettings       // with the back end that it has found
	way      userspace.Redirect  // how packets come to the process of that plane
	carries  bool                // connections pass through this process
	instead  string              // why it is another one than was wanted, and what to do; empty: it is not
	heir     *heir               // that Dataplane is; nil: it removes nothing of others
}

// open makes a plane. A node that cannot have the one that its mode names has nftables rather than no Services.
func (s planeSettings) open(c dataplane.Config) (opened, error) {
	o, err := s.openItself(c)
	if err == nil || s.name == nftablesPlane || !s.lacks(err) {
		return o, permitted(err)
	}
	instead := s.instead(err)
	s = planeSettings{name: nftablesPlane, mark: s.mark}
	o, second := s.openItself(c)
	if second != nil {
		return opened{}, permitted(err)
	}
	c.Log.Warn(instead, "error", err)
	o.instead = instead
	return o, nil
}

// lacks reports whether it is for want of something of the machine that a plane cannot be opened.
func (s planeSettings) lacks(err error) bool {
	return errors.Is(err, dataplane.ErrUnsupported) || s.name == ebpfPlane && errors.Is(err, unix.EPERM)
}

// instead says that nftables serves, and what to do.
func (s planeSettings) instead(err error) string {
	lacking, remedy := "this kernel cannot do what mode %s needs", "have the kernel load its modules for %s"
	if s.name == ebpfPlane {
		lacking, remedy = "mode %s is not possible here: "+err.Error(), "see to what is missing for %s, and start anew"
	}
	return fmt.Sprintf(lacking+"; the data plane nftables serves instead, until the next start. "+
		"Set mode (--proxy-mode) to nftables, or "+remedy, s.name, s.name)
}

func (s planeSettings) openItself(c dataplane.Config) (o opened, err error) {
	if s.name == iptablesPlane && s.iptables.Backend == "" {
		if s.iptables.Backend, err = iptables.Detect(); err != nil {
			return o, err
		}
	}
	p, err := s.plane(&o.way)
	if err != nil {
		return o, err
	}
	c.Mark = s.mark
	o.settings, o.carries = s, p.Carries != nil
	open := p.Open
	p.Open = func(c dataplane.Config) (dataplane.Dataplane, error) {
		o.inner, err = open(c)
		return o.inner, err
	}
	whole := p.Open
	if p.wrap != nil {
		whole = p.wrap(p.Driver)
	}
	o.Dataplane, err = whole(c)
	return o, err
}

// permitted says of the most frequent error what to do.
func permitted(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("root, or CAP_NET_ADMIN, is needed to program the kernel: %w", err)
	}
	return err
}
