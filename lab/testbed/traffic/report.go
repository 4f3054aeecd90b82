package traffic

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is what a client does.
type Kind int

const (
	// Connections are short: made, answered and reset.
	Connections Kind = iota
	// Streams stay, and carry data both ways.
	Streams
	// Datagrams are sent by a fresh socket of UDP each.
	Datagrams
	// Sockets of UDP stay, connected or not, and ask again and again.
	Sockets
	// AffinityTCP are short connections to a Service with session affinity.
	AffinityTCP
	// AffinityUDP are datagrams to one.
	AffinityUDP

	kinds = 6
)

func (k Kind) String() string {
	names := [kinds]string{"connections", "streams", "datagrams", "UDP sockets", "sticky TCP", "sticky UDP"}
	if k >= 0 && k < kinds {
		return names[k]
	}
	return fmt.Sprintf("kind %d", int(k))
}

// stays reports whether such a client is to be answered by one backend.
func (k Kind) stays() bool { return k == Sockets || k == AffinityTCP || k == AffinityUDP }

// Count is what clients of one kind have seen.
type Count struct {
	Attempts int // connections, datagrams, or streams that were opened
	Answered int // of a stream: how often something came back
	Failed   int // no answer, or a wrong one
	Reset    int // ended by the other side, or refused
	Moved    int // another backend answered than before
	Resent   int // datagrams that were sent again after a second
	// Longest is the longest wait for an answer; on a stream, for the next bytes.
	Longest time.Duration
}

func (c *Count) add(other Count) {
	c.Attempts += other.Attempts
	c.Answered += other.Answered
	c.Failed += other.Failed
	c.Reset += other.Reset
	c.Moved += other.Moved
	c.Resent += other.Resent
	c.Longest = max(c.Longest, other.Longest)
}

// Bad reports whether anything went wrong that its user would notice.
func (c Count) Bad() bool { return c.bad() > 0 }

func (c Count) bad() int { return c.Failed + c.Reset + c.Moved }

// Fault is one thing that went wrong.
type Fault struct {
	Kind   Kind
	Path   Path
	What   string
	Kernel string // the entries of the node's kernel for the client's port; empty: none were read
	// Moved: there was an answer, of another backend than before. Reset: the other side has ended or refused it.
	Moved, Reset bool
	// Step is what was being done, as Mark has said it, and Since how long it had been.
	Step  string
	Since time.Duration
	At    time.Duration // after the start
	Began time.Duration // when the stream was opened, or the client began to wait; likewise
	Took  time.Duration // how long the client had waited
}

func (f Fault) String() string {
	const ms = time.Millisecond
	what := f.What
	if f.Kernel != "" {
		what += "; " + f.Kernel
	}
	return fmt.Sprintf("%s, %s: %s (%s after %q, %s after the start, waited %s)", f.Kind, f.Path, what,
		f.Since.Round(ms), f.Step, f.At.Round(ms), f.Took.Round(ms))
}

// Report is what a Watch has seen.
type Report struct {
	Counts   [kinds]Count   // by Kind
	Faults   []Fault        // by time
	Backends map[string]int // answers of each backend
}

// Report is what there was so far.
func (l *Watch) Report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Report{l.counts, slices.Clone(l.faults), maps.Clone(l.backends)}
}

// Total is the sum of all kinds.
func (r Report) Total() (all Count) {
	for _, c := range r.Counts {
		all.add(c)
	}
	return all
}

// mostTold is how many faults of a kind are told.
const mostTold = 5

// String is a line for each kind, and the first faults of each; those of clients that have moved are apart.
func (r Report) String() string {
	var s strings.Builder
	for i, c := range r.Counts {
		if c == (Count{}) {
			continue
		}
		fmt.Fprintf(&s, "%-11s %6d begun, %6d answers, %d failed, %d reset, %d moved, %d sent again, longest wait %s\n",
			Kind(i), c.Attempts, c.Answered, c.Failed, c.Reset, c.Moved, c.Resent, c.Longest.Round(time.Millisecond))
	}
	type sort struct {
		kind  Kind
		moved bool
	}
	said := map[sort]int{}
	for _, f := range r.Faults {
		of := sort{f.Kind, f.Moved}
		if said[of]++; said[of] <= mostTold {
			fmt.Fprintln(&s, f)
		}
	}
	return s.String()
}

// isReset reports whether the peer reset the connection, rather than fell silent.
func isReset(err error) bool {
	k := kind(err)
	return k == Refused || k == Reset || errors.Is(err, errRefused) || errors.Is(err, unix.EDESTADDRREQ)
}

// errRefused is what a probe calls refused.
var errRefused = errors.New(Refused)
