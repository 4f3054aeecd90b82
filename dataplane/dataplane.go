// Package dataplane is the seam between rows and the kernel: a data plane maps the rows of a
// model.State to objects of one kernel facility and decides nothing itself.
//
//	engine ── Sync(state), Apply(state, change) ──► nftables, … ──► kernel
//
// Planes live in packages of their own below this one and do not import each other. What several of
// them need is added by wrapping one: conntrack forgets stale UDP flows after each change, and
// after Sync TCP clients that came too early; localhost serves NodePorts on the IPv6 loopback address.
package dataplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/model"
)

// A Dataplane keeps kernel objects, which it alone owns, equal to a State, in the network namespace
// of the thread that made it. One goroutine calls it. Every method is idempotent.
type Dataplane interface {
	// Sync makes the kernel hold exactly s, whatever it held before, an earlier process's objects
	// included. Connections that s still allows are not disturbed.
	Sync(ctx context.Context, s *model.State) error
	// Apply performs c, which leads from the State of the last successful call to s.
	// Its cost depends on c only. After an error, but for ErrPartial, the caller calls Sync.
	Apply(ctx context.Context, s *model.State, c model.Change) error
	// Audit reads the kernel back and reports each difference from s, the State of the last successful
	// call if there was one. After an ErrPartial the rows that are not in force may be among them, in the same words
	// each time. It changes no row; what is due once in a while (connections that drain, flows to be forgotten) may be
	// done then, for it is called about once a second. What fails of that is an ErrPartial, and the differences count.
	Audit(ctx context.Context, s *model.State, d Depth) (Report, error)
	// Repair is Sync just after the Audit of the same State that gave the Report. A plane does what that Audit has planned
	// if it can tell that the kernel is still as the Audit has read it; else it reads the kernel again.
	Repair(ctx context.Context, s *model.State, r Report) error
	// Remove deletes all that this data plane, in this or an earlier process, has made.
	Remove(ctx context.Context) error
	// Close gives back what the process holds (sockets) and leaves the kernel as it is.
	Close() error
}

// Affine is implemented by planes that can tell which backend a client's earlier connection chose, and that can hand
// that on: a client keeps its backend when another plane takes the place of the one that it has met. What the first
// connections to the new plane need, its Sync takes in by Config.Inherit; what clients did meanwhile, Remember adds:
//
//	old plane, or what it has left in the kernel ── Memories ─► Inherit ─► Sync ── Remember ─► the old one is removed
type Affine interface {
	// Remembered is the backend that the pool's affinity holds for a client; ok is false if none.
	Remembered(ctx context.Context, pool model.PoolID, client netip.Addr) (backend netip.AddrPort, ok bool, err error)
	// Memories are all that pools with affinity remember. They are read from the kernel as far as they are there, so the
	// plane need not have synced: s, which may be a little older or younger than what the kernel holds, tells
	// whose they are. Some may come twice. An error, with a Memory of no meaning, is the last one.
	Memories(ctx context.Context, s *model.State) iter.Seq2[Memory, error]
	// Remember has the pools remember what another plane did, each for as long as it has left. It returns how many that
	// were. What is known for longer stays as it is, and a backend that does not serve is passed over. The
	// State is that of the last successful call. After an error some may have been taken in; it may be called again.
	Remember(ctx context.Context, s *model.State, others iter.Seq2[Memory, error]) (int, error)
}

// A Memory is which backend a client's connections to a pool with affinity go to.
type Memory struct {
	Pool    model.PoolID
	Client  netip.Addr // a client known otherwise, as by its network namespace, has one Memory for each of its addresses
	Backend netip.AddrPort
	Until   time.Time // when that is forgotten, unless the client comes again; the precision is a second
}

// A Carrier is a plane whose connections pass through this process, and end with Close.
type Carrier interface {
	// Drain is for when another plane is in force: this one takes nothing new, and carries what it does. It returns how
	// many connections that is. It is called again and again, with the State that is in force then, until there are none
	// or they have had their time; what is left in the kernel is for them. Sync has the plane take connections again.
	Drain(ctx context.Context, s *model.State) (connections int, err error)
	// Carried is how many connections that is now.
	Carried() int
}

// An Heir is a plane that may be told anew what Inherit and Waits of its Config are: before Sync, if it takes the place
// of another one for the second time.
type Heir interface{ Inherit(Config) }

// A Reserve is a plane that serves nobody while its process is away, so that it must not take what another one still
// serves. As long as Config.Waits says that there is one, Sync and Apply prepare everything, and no packet notices.
type Reserve interface {
	// Enter is called when it is to be in force: what was prepared is, from now on, whatever Config.Waits says, until
	// Drain. An error that wraps ErrPartial means what it does of Sync; after others the plane can only be closed.
	Enter(ctx context.Context) error
}

// A Describer is a plane whose kernel objects have names that do not say whose they are.
type Describer interface {
	// Describe says it, in a line for each object as the tool that lists them names it. It asks no kernel; the
	// goroutine that calls the methods of Dataplane calls it.
	Describe() []string
}

// Depth is how much of the kernel an Audit compares.
type Depth int

const (
	// Quick compares some rows, as chance has it, or only what the kernel tells that another program has touched.
	Quick Depth = iota
	// Full compares every row.
	Full
)

// Report is what an Audit has found.
type Report struct {
	Drifts []Drift
	// Plan is what Repair of the same plane is to do; nil: Repair reads the kernel again. Planes that wrap another one hand
	// it on.
	Plan any
}

// A Drift is one difference between a State and what the kernel holds.
type Drift struct {
	Class  string `json:"class"`          // of object, one of few: "frontends"
	Object string `json:"object"`         // what it is about: the row, or what the plane has beside rows
	Want   string `json:"want,omitempty"` // empty: surplus object
	Have   string `json:"have,omitempty"` // empty: missing object
}

func (d Drift) String() string {
	switch {
	case d.Have == "":
		return fmt.Sprintf("%s: missing: %s", d.Object, d.Want)
	case d.Want == "":
		return fmt.Sprintf("%s: surplus: %s", d.Object, d.Have)
	}
	return fmt.Sprintf("%s: is %s, should be %s", d.Object, d.Have, d.Want)
}

// Config is what a plane needs to know beside the rows.
type Config struct {
	// Mark is the packet mark bit that carries "replace the source address" from the hook that
	// decides it to the one that does it; it is cleared there.
	Mark uint32
	Log  *slog.Logger
	// LocalnetWasOff says that another plane has set the sysctl route_localnet. This one records that, guards it, and
	// puts it back in the end.
	LocalnetWasOff bool
	// KeepLocalnet has Remove leave that sysctl alone, as another plane has recorded it.
	KeepLocalnet bool
	// Inherit, if not nil, are the Memories of planes that are there still, or have left them. The first Sync takes
	// them in, as Remember does, before any packet meets the plane's rows. What cannot be had is logged, and keeps no
	// row from being served. It is asked with the State of that Sync.
	Inherit func(context.Context, *model.State) iter.Seq2[Memory, error]
	// Waits, if not nil, reports whether another plane is in force still. As long as that is so, the flows that connection
	// tracking knows are that one's, and none of them is forgotten.
	Waits func() bool
	// Meter, if not nil, is told what the plane counts.
	Meter Meter
	// Fault, if not nil, makes an operation on the kernel fail by returning an error. Tests inject failures with it.
	Fault func(operation string) error
}

// Inject is called before each operation on the kernel, named "area verb". It returns the error of a test.
func (c *Config) Inject(operation string) error {
	if c.Fault == nil {
		return nil
	}
	return c.Fault(operation)
}

// A Meter counts what only planes know. Its methods may be called from several goroutines, and must be
// quick.
type Meter interface {
	// Forgot: the kernel's flows of one address family were looked through, and some forgotten.
	Forgot(v6 bool, flows int, took time.Duration)
	// Listening: so many sockets more, or fewer, serve NodePorts on the loopback address.
	Listening(v6 bool, more int)
	// NotListening: such a socket could not be opened.
	NotListening(v6 bool)
}

// Traces tell what a plane, in this or an earlier process, has left in the kernel.
type Traces struct {
	Rules          bool // there are some
	Retired        bool // they take nothing new: another plane is in force, and they are there for open connections
	LocalnetWasOff bool // it has set the sysctl route_localnet
}

// DefaultMark is kube-proxy's: bit 14.
const DefaultMark = 1 << 14

// CarriedMark is the bit beside Mark. Packets have it that a process of the node takes for itself, and connections
// whose packets those are: nobody else may translate or refuse them.
func (c Config) CarriedMark() uint32 {
	mark := cmp.Or(c.Mark, DefaultMark)
	return cmp.Or(mark<<1, mark>>1)
}

// New makes a plane in the calling thread's network namespace. It probes the kernel and returns an
// error that wraps ErrUnsupported, and says what is missing, if the kernel cannot do it.
type New func(Config) (Dataplane, error)

// ErrPartial is wrapped by an error of Sync or Apply after which the kernel holds all but the rows that
// the error names. The caller may go on with Apply; those rows stay missing until a Sync succeeds.
var ErrPartial = errors.New("some rows are not in force")

// ErrUnsupported says that this kernel cannot run the data plane.
var ErrUnsupported = errors.New("not supported by this kernel")
