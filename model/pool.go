package model

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// PoolID names a Pool: a Service port, an address family (a pool has one), and whether only the
// backends on this node are meant.
type PoolID struct {
	Service string // namespace/name:port
	Local   bool
	V6      bool
}

// Owner names whose pool it is: what stands before the slash. Bounds are shared among owners.
func (p PoolID) Owner() string {
	owner, _, _ := strings.Cut(p.Service, "/")
	return owner
}

// Compare orders pools by Service, the cluster-wide one first, IPv4 first.
func (p PoolID) Compare(o PoolID) int {
	return cmp.Or(cmp.Compare(p.Service, o.Service), FalseFirst(p.Local, o.Local), FalseFirst(p.V6, o.V6))
}

// Pool is the set of backends among which new connections are spread.
type Pool struct {
	Backends []Backend     // sorted, unique by address and port; at least one has a weight
	Affinity time.Duration // how long after its last connection a client keeps its backend; 0: not at all
	// Scheduler is one of Schedulers, by which a plane that has them chooses a backend; empty: the one
	// that the plane is configured to. The ebpf plane has mh, by the client's address, and without affinity twos;
	// userspace has twos, and else takes backends in turn; all others choose at random, by weight.
	Scheduler string
	// Rebalance is the time after which a silent connection of TCP may be closed, while backends have uneven shares of the
	// open ones; 0: none is closed.
	Rebalance time.Duration
}

// LeastOfTwo is the scheduler that takes, of two backends drawn at random, the one with fewer open connections.
const LeastOfTwo = "twos"

// Schedulers are the kernel's names for the ways in which IPVS chooses: the modules ip_vs_NAME.
func Schedulers() []string {
	return []string{"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh", "fo", "ovf", "twos"}
}

// ModesWith are the modes that honour a scheduler.
func ModesWith(scheduler string) []string {
	switch scheduler {
	case "mh":
		return []string{"ebpf", "ipvs"}
	case LeastOfTwo:
		return []string{"ebpf", "ipvs", "userspace"}
	case "rr", "wrr":
		return []string{"ipvs", "userspace"}
	}
	return []string{"ipvs"}
}

// Equal reports whether two rows say the same.
func (p Pool) Equal(o Pool) bool {
	return p.Affinity == o.Affinity && p.Scheduler == o.Scheduler && p.Rebalance == o.Rebalance &&
		slices.Equal(p.Backends, o.Backends)
}

// Serving yields the backends that take new connections.
func (p Pool) Serving() []Backend {
	if !slices.ContainsFunc(p.Backends, Backend.draining) {
		return p.Backends
	}
	return slices.DeleteFunc(slices.Clone(p.Backends), Backend.draining)
}

// At is the backend at an address and port, if the pool has one.
func (p Pool) At(at netip.AddrPort) (Backend, bool) {
	compare := func(b Backend, at netip.AddrPort) int { return b.AddrPort().Compare(at) }
	i, ok := slices.BinarySearchFunc(p.Backends, at, compare)
	if !ok {
		return Backend{}, false
	}
	return p.Backends[i], true
}

// Backend is an address and port that serves. There are more of them than of anything else.
type Backend struct {
	Addr netip.Addr
	Port uint16
	// Weight is the share of new connections relative to the pool's other backends. A backend of
	// weight 0 is draining: it gets no new connection and keeps the flows it has.
	Weight uint16
	Local  bool // on this node, or on one that is not known
}

// BackendAt has an address and port, and no weight.
func BackendAt(a netip.AddrPort) Backend { return Backend{Addr: a.Addr(), Port: a.Port()} }

// AddrPort is where it serves.
func (b Backend) AddrPort() netip.AddrPort { return netip.AddrPortFrom(b.Addr, b.Port) }

func (b Backend) draining() bool { return b.Weight == 0 }

// Compare orders backends by address and port.
func (b Backend) Compare(o Backend) int { return b.AddrPort().Compare(o.AddrPort()) }

// FalseFirst compares as cmp.Compare would: false comes before true.
func FalseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
