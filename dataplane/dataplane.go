// Package dataplane is the seam between rows and the kernel: a data plane maps the rows of a model.State to objects of
// one kernel facility and decides nothing itself.
//
//	engine ── Sync(state), Apply(state, change) ──► nftables, … ──► kernel
//
// Planes live in packages of their own below this one and do not import each other. Wrappers add common abilities.
// Package conntrack forgets stale UDP flows after each change, connections that a removed backend has not answered, and
// after Sync TCP clients that came too early. Package localhost serves NodePorts on the IPv6 loopback address.
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
	// Audit reads the kernel back and reports each difference from s, the State of the last successful call if there
	// was one. After an ErrPartial the rows that are not in force may be among them, in the same words each time. It
	// changes no row. It is called about once a second, so periodic work (connections that drain, flows to be
	// forgotten) may be done in it. If such work fails, the error is an ErrPartial, and the differences count.
	Audit(ctx context.Context, s *model.State, d Depth) (Report, error)
	// Repair is Sync just after the Audit of the same State that gave the Report. A plane does what that Audit has planned
	// if it can tell that the kernel is still as the Audit has read it; else it reads the kernel again.
	Repair(ctx context.Context, s *model.State, r Report) error
	// Remove deletes all that this data plane, in this or an earlier process, has made.
	Remove(ctx context.Context) error
	// Close gives back what the process holds (sockets) and leaves the kernel as it is.
	Close() error

	Handover
	Observed
}

// Handover is what one plane needs to take the place of another, in this or an earlier process. At each moment a plane
// serves every client. Clients with session affinity keep their backends.
//
//	old plane, or what it has left ── Sessions ─► Learn ─► Sync ── Sessions ─► Learn ─► Active ─► Draining
//	                                  └──────── new plane, in stage Standby ─────────┘            old plane
//
// Base has what a plane needs whose rules serve as soon as they are in the kernel, and go on serving without a process.
type Handover interface {
	// ReadAhead reads what the kernel holds while the first State is still to come, so that the first Sync need not. Sync
	// makes use of it only if no other program has changed that since. An error is left to Sync.
	ReadAhead(ctx context.Context)
	// SetStage says what becomes of connections that begin. A plane is Active unless it was told to be something else. The
	// State is that of the last Sync or Apply of the plane that is in force. It returns Open. Draining is set again and
	// again, until there is none left or they have had their time. An error of Active that wraps ErrPartial means what it
	// does of Sync; after others the plane can only be closed.
	SetStage(ctx context.Context, s *model.State, to Stage) (open int, err error)
	// Open is how many connections pass through this process, and end with Close.
	Open() int
	// Sessions are all sessions of pools of s with affinity. They are read from the kernel as far as they are there, so
	// the plane need not have synced. s tells which pools they belong to; it may be a little older or younger than the
	// kernel's rows. Some may come twice. An error, with a Session of no meaning, is the last one.
	Sessions(ctx context.Context, s *model.State) iter.Seq2[Session, error]
	// Learn has the pools remember another plane's sessions, each for the time that it has left. It returns how many it
	// has learned. Sessions that the plane knows for longer stay as they are, and sessions with backends that do not
	// serve are passed over. Before the first Sync, Learn only stores them, and that Sync takes them in before any
	// packet meets the plane's rows. After an error some may have been taken in; it may be called again.
	Learn(ctx context.Context, s *model.State, others iter.Seq2[Session, error]) (int, error)
	// Save writes the sessions that only this process knows to where Sessions of the next process finds them. It is called
	// about once a second, even while audits rest.
	Save(ctx context.Context)
}

// Stage is what a plane does with connections that begin.
type Stage int

const (
	// Active: the plane serves them.
	Active Stage = iota
	// Standby: another plane does, and this one is programmed: Sync and Apply prepare everything, and no packet notices.
	// The flows in connection tracking are the other plane's. A plane whose rules serve as soon as they are in the
	// kernel serves in this stage, too.
	Standby
	// Draining: another plane does. Those that are open live on.
	Draining
)

// Observed is what a plane tells of itself.
type Observed interface {
	// Counters are sums. Where the kernel counts, they are those of its objects that are there now, whichever process has
	// made them. Else they begin when this process first calls Sync, those of refused connections when the node starts.
	// The error wraps errors.ErrUnsupported if the plane counts nothing.
	Counters(ctx context.Context) (Counters, error)
	// Outcomes calls f with connections of which it was heard since the last call, or since Active, that they failed, and,
	// if it is asked to, that they were answered. f is nil: nothing is asked from now on.
	Outcomes(ctx context.Context, answered bool, f func(model.Outcome)) error
	// ResetOrphans resets open connections of TCP to backends that are gone, if these have not acknowledged for some
	// seconds what they were sent. It returns how many it has found since the last call. It may go on after the call, and
	// rest where it takes long.
	ResetOrphans(ctx context.Context, gone Gone) (int, error)
	// CloseIdle closes some of the open connections of TCP. A plane of several parts asks for each of them. It returns how
	// many it has closed since the last call, and may go on after the call as ResetOrphans does.
	CloseIdle(ctx context.Context, of *Idle) (int, error)
	// Describe says whose the kernel objects are, where their names do not: a line for each object as the tool that lists
	// them names it. It asks no kernel.
	Describe() []string
}

// Gone are backends that no pool has any more, and until when they are remembered.
type Gone = map[netip.AddrPort]time.Time

// Idle says which connections are to be closed.
type Idle struct {
	Backends map[netip.AddrPort]bool // of those that are asked for
	// Choose returns the places of those that are to be closed. It may be called by another goroutine.
	Choose func([]Open) []int
}

// Open is a connection that is open.
type Open struct {
	Service, Backend netip.AddrPort // where its client has gone, and where that led
	Idle             time.Duration  // for how long nothing has passed; 0: also if it cannot be closed
}

// Base is for planes to embed: they override what they need of Handover and Observed.
type Base struct{}

// ReadAhead implements Handover.
func (Base) ReadAhead(context.Context) {}

// SetStage implements Handover.
func (Base) SetStage(context.Context, *model.State, Stage) (int, error) { return 0, nil }

// Open implements Handover.
func (Base) Open() int { return 0 }

// Sessions implements Handover.
func (Base) Sessions(context.Context, *model.State) iter.Seq2[Session, error] {
	return func(func(Session, error) bool) {}
}

// Learn implements Handover.
func (Base) Learn(context.Context, *model.State, iter.Seq2[Session, error]) (int, error) {
	return 0, nil
}

// Save implements Handover.
func (Base) Save(context.Context) {}

// Counters implements Observed.
func (Base) Counters(context.Context) (Counters, error) {
	return Counters{}, fmt.Errorf("this data plane has no counters: %w", errors.ErrUnsupported)
}

// Outcomes implements Observed.
func (Base) Outcomes(context.Context, bool, func(model.Outcome)) error { return nil }

// ResetOrphans implements Observed.
func (Base) ResetOrphans(context.Context, Gone) (int, error) { return 0, nil }

// CloseIdle implements Observed.
func (Base) CloseIdle(context.Context, *Idle) (int, error) { return 0, nil }

// Describe implements Observed.
func (Base) Describe() []string { return nil }

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
	// Plan is what Repair of the same plane is to do; nil: Repair reads the kernel again. Planes that wrap another
	// one hand it on.
	Plan any
	// UsedUp are shares of which nothing is left at present, by what clients do.
	UsedUp []Share
}

// Share is what a namespace has of something that all namespaces share. When it is used up, the least recently used
// ones of the same namespace go.
type Share struct {
	Namespace string
	Of        string // as "translated flows"
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
	// Counters is what the plane counts even where that costs something.
	Counters Detail
	// Flowtable is whether open connections that the node forwards go past the kernel's hooks.
	Flowtable Flowtable
	// Meter, if not nil, is told what the plane counts.
	Meter Meter
	// Fault, if not nil, makes an operation on the kernel fail by returning an error. Tests inject failures with it.
	Fault func(operation string) error
}

// Flowtable is whether a flowtable of the kernel forwards open connections, in planes that can have one.
type Flowtable int

const (
	// NoFlowtable forwards none.
	NoFlowtable Flowtable = iota
	// FlowtableUnlessFiltered does so while no other program has rules for such packets at the hooks that they would pass.
	FlowtableUnlessFiltered
	// FlowtableAlways does so in any case. Rules of other programs do not see these packets.
	FlowtableAlways
)

// Inject is called before each operation on the kernel, named "area verb". It returns the error of a test.
func (c *Config) Inject(operation string) error {
	if c.Fault == nil {
		return nil
	}
	return c.Fault(operation)
}

// Logger is Log, or one that drops what it is told.
func (c Config) Logger() *slog.Logger {
	if c.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return c.Log
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

// Leftover is what a plane, in this or an earlier process, has in the kernel.
type Leftover struct {
	Rules          bool // there are some
	Retired        bool // they take nothing new: another plane is in force, and they are there for open connections
	LocalnetWasOff bool // it has set the sysctl route_localnet
}

// DefaultMark is kube-proxy's: bit 14.
const DefaultMark = 1 << 14

// RelayMark is the bit beside Mark. Packets that a process of the node takes for itself have it, and so have
// connections with such packets: no plane may translate or refuse them.
func (c Config) RelayMark() uint32 {
	mark := cmp.Or(c.Mark, DefaultMark)
	return cmp.Or(mark<<1, mark>>1)
}

// New makes a plane in the calling thread's network namespace. It probes the kernel and returns an
// error that wraps ErrUnsupported, and says what is missing, if the kernel cannot do it.
type New func(Config) (Dataplane, error)

// ErrPartial is wrapped by an error of Sync or Apply after which the kernel holds all but the rows that
// the error names. The caller may go on with Apply; those rows stay missing until a Sync succeeds.
var ErrPartial = errors.New("some rows are not in force")

// Known reports whether the kernel's content is known after an error, or none.
func Known(err error) bool { return err == nil || errors.Is(err, ErrPartial) }

// Partial is an ErrPartial that names some errors; without any it is nil.
func Partial(errs ...error) error {
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: %w", ErrPartial, err)
	}
	return nil
}

// ErrUnsupported says that this kernel cannot run the data plane.
var ErrUnsupported = errors.New("not supported by this kernel")
