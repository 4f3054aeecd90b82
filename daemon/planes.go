package daemon

import (
	"context"
	"errors"
	"fmt"
	"iter"
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
	"fairlead.dev/fairlead/model"
)

// plane is a data plane by its name.
type plane struct {
	name string
	new  func(planeSettings, *opened) dataplane.New
	// wrap adds what the plane needs beside itself; nil: nothing, or new has done that.
	wrap func(dataplane.New) dataplane.New
	// carries says that connections pass through this process.
	carries bool
	// behind is the plane that serves what this one cannot, if there is one: its traces are this one's.
	behind string
	// prepare does what NodePorts on 127.0.0.1 need and a process with CAP_NET_ADMIN alone may not do; nil: nothing.
	prepare func(planeSettings) func(dataplane.Config) error
	// traces and clean are about what it has left, in whatever process and with whatever settings.
	traces func() (dataplane.Traces, error)
	clean  func(context.Context, dataplane.Config) error
	// sessions are what it has left of clients' affinity; see dataplane.Handover.
	sessions func(context.Context, dataplane.Config, *model.State) iter.Seq2[dataplane.Session, error]
	// handOver does what clean does on a node where kube-proxy is back in the mode of that name, and shares what has no
	// owner; nil: nothing is shared.
	handOver func(context.Context, dataplane.Config) error
	// retire does what clean does, but as long as there are connections that need what it has left. It tells how many;
	// nil: there are none.
	retire func(context.Context, dataplane.Config) (connections int, err error)
}

const (
	nftablesPlane  = "nftables"
	iptablesPlane  = "iptables"
	ipvsPlane      = "ipvs"
	ebpfPlane      = "ebpf"
	userspacePlane = "userspace"
)

// planes come in the order in which they are chosen for a mode that has none of its own.
func planes() []plane {
	return []plane{
		{
			name:    nftablesPlane,
			new:     func(planeSettings, *opened) dataplane.New { return nftables.New },
			wrap:    wrapped,
			prepare: func(planeSettings) func(dataplane.Config) error { return nftables.Prepare },
			traces:  nftables.Traces, clean: nftables.Clean, sessions: nftables.Sessions,
		},
		{
			name:    iptablesPlane,
			new:     func(s planeSettings, o *opened) dataplane.New { return iptables.New(s.iptables) },
			wrap:    wrapped,
			prepare: func(s planeSettings) func(dataplane.Config) error { return iptables.Prepare(s.iptables) },
			traces:  iptables.Traces, clean: iptables.Clean, sessions: iptables.Sessions,
		},
		{
			name:    ipvsPlane,
			new:     func(s planeSettings, o *opened) dataplane.New { return ipvs.New(s.ipvs) },
			wrap:    wrapped,
			prepare: func(s planeSettings) func(dataplane.Config) error { return ipvs.Prepare(s.ipvs) },
			traces:  ipvs.Traces, clean: ipvs.Clean, sessions: ipvs.Sessions,
			handOver: ipvs.HandOver, retire: ipvs.Retire,
		},
		{
			name:    ebpfPlane,
			new:     func(s planeSettings, o *opened) dataplane.New { return newEBPF(s.ebpf) },
			behind:  nftablesPlane,
			prepare: func(planeSettings) func(dataplane.Config) error { return nftables.Prepare },
			traces:  ebpf.Traces, clean: ebpf.Clean, sessions: ebpf.Sessions,
			retire: ebpf.Retire,
		},
		{
			name: userspacePlane,
			new: func(s planeSettings, o *opened) dataplane.New {
				return userspace.NewOver(s.userspace, legacyTables(), &o.way)
			},
			wrap:    func(new dataplane.New) dataplane.New { return conntrack.WrapUntranslated(new, userspace.Carries) },
			carries: true,
			traces:  userspace.Traces, clean: userspace.Clean, sessions: userspace.Sessions,
		},
	}
}

// Planes are the names of the data planes that are built in.
func Planes() (names []string) {
	for _, p := range planes() {
		names = append(names, p.name)
	}
	return names
}

func planeNamed(name string) (plane, error) {
	i := slices.Index(Planes(), name)
	if i < 0 {
		return plane{}, fmt.Errorf("there is no data plane %q", name)
	}
	return planes()[i], nil
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

// newEBPF has a section of the configuration in the words of the plane. Behind it is the plane of packets with all that
// wraps one: a socket that the ebpf plane translates needs no relay and no connection tracking.
func newEBPF(c config.EBPF) dataplane.New {
	o := ebpf.Options{
		Cgroup: c.CgroupRoot, Pins: ebpf.Pins(c.BPFRoot), Acceleration: ebpf.Acceleration(c.Acceleration),
		Forwarding: ebpf.Forwarding(c.Forwarding),
		OnlyNode:   c.Sockets == config.EBPFSocketsOfNode, ReleaseTCP: c.AbortTCP, Sizes: sizes(c.Sizes),
	}
	if c.Packets == config.EBPFPacketsByNFTables {
		o.Serve = ebpf.Behind
	}
	return newOverLingering(o, wrapped(nftables.New))
}

func sizes(c config.EBPFSizes) ebpf.Sizes {
	return ebpf.Sizes{
		Affinities: uint32(c.Affinities), Flows: uint32(c.Flows), Sockets: uint32(c.Sockets),
		Translations: uint32(c.Translations), Services: uint32(c.Services),
	}
}

// wrapped adds what planes based on netfilter need.
func wrapped(new dataplane.New) dataplane.New { return localhost.Wrap(conntrack.Wrap(new)) }

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
	p, err := planeNamed(s.name)
	if err != nil {
		return o, err
	}
	if s.name == iptablesPlane && s.iptables.Backend == "" {
		if s.iptables.Backend, err = iptables.Detect(); err != nil {
			return o, err
		}
	}
	c.Mark = s.mark
	o.settings, o.carries = s, p.carries
	remember := func(c dataplane.Config) (dataplane.Dataplane, error) {
		made, err := p.new(s, &o)(c)
		o.inner = made
		return made, err
	}
	whole := dataplane.New(remember)
	if p.wrap != nil {
		whole = p.wrap(remember)
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
