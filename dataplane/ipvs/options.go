package ipvs

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/model"
)

// Options are what is particular to this data plane.
type Options struct {
	// Scheduler chooses among the backends of pools that name none; empty: rr.
	Scheduler string
	// AddressMode is how the node takes packets to Service addresses for its own; empty: CIDR.
	AddressMode AddressMode
	// DrainTimeout is how long a backend that left keeps its connections of TCP and SCTP; 0: as long as they last.
	DrainTimeout time.Duration
	// Timeouts after which IPVS forgets a connection without packets; 0: as the kernel has it.
	Timeouts Timeouts
	// Exclude are ranges with commas between them. Virtual servers of others at addresses there, and these addresses
	// on kube-ipvs0, are left alone, unless frontends have them.
	Exclude string
	// StrictARP keeps interfaces from answering ARP requests for addresses of others.
	StrictARP bool
}

// Timeouts are of the states of IPVS that can be set.
type Timeouts struct{ TCP, TCPFin, UDP time.Duration }

// AddressMode is a way to make addresses local.
type AddressMode string

const (
	// CIDR is by local routes through the loopback interface: one for each range of Service addresses,
	// one for each other address.
	CIDR AddressMode = "cidr"
	// Route is by such a route for each address.
	Route AddressMode = "route"
	// Dummy is by addresses on the interface kube-ipvs0, as kube-proxy has them.
	Dummy AddressMode = "dummy"
)

func (o Options) excluded() (all []netip.Prefix, err error) {
	for text := range strings.SplitSeq(o.Exclude, ",") {
		if text == "" {
			continue
		}
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("excluded addresses: %w", err)
		}
		all = append(all, p)
	}
	return all, nil
}

// schedulerOf is how the virtual servers of a pool choose. Round robin and least connections do not look
// at weights; where these differ, their weighted forms are what is meant.
func (o Options) schedulerOf(p model.Pool) string {
	name := p.Scheduler
	if name == "" {
		name = o.Scheduler
	}
	switch {
	case name == "":
		name = "rr"
	case name != "rr" && name != "lc":
		return name
	}
	serving := p.Serving()
	for _, b := range serving {
		if b.Weight != serving[0].Weight {
			return "w" + name
		}
	}
	return name
}

// want is the virtual server for a pool.
func (o Options) want(p model.Pool) *server {
	w := &server{
		scheduler:    o.schedulerOf(p),
		destinations: make(map[netip.AddrPort]uint32, len(p.Backends)),
	}
	for _, b := range p.Backends {
		w.destinations[b.AddrPort()] = uint32(b.Weight)
		if defect.Is(defect.IPVSWeight) {
			w.destinations[b.AddrPort()] = 1
		}
	}
	if w.scheduler == "sh" {
		w.reduce()
	}
	return w
}

// reduce divides weights by what they have in common. With sh a real server has as many buckets as its weight, and
// still one when that is 0. So where all weights are 1, others' clients stay where they are while one drains.
func (held *server) reduce() {
	common := uint32(0)
	for _, weight := range held.destinations {
		for a := weight; a != 0; {
			common, a = a, common%a
		}
	}
	for addr := range held.destinations {
		held.destinations[addr] /= max(common, 1)
	}
}
