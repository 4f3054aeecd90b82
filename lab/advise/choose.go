package advise

import (
	"cmp"
	"math"
	"slices"
	"time"

	"fairlead.dev/fairlead/model"
)

// Rows are what of the node's rows matters for the choice.
type Rows struct {
	Services  int            `json:"services"`            // of one port each
	SCTP      int            `json:"sctp,omitempty"`      // of them
	Affine    int            `json:"affine,omitempty"`    // with session affinity
	Scheduled map[string]int `json:"scheduled,omitempty"` // by their scheduler
}

// Count looks at a State.
func Count(s *model.State) (r Rows) {
	seen := make(map[string]bool, len(s.Frontends))
	r.Scheduled = map[string]int{}
	for k, f := range s.Frontends {
		if seen[f.Service] {
			continue
		}
		seen[f.Service] = true
		r.Services++
		pool := s.Pools[f.Pool]
		r.SCTP += one(k.Protocol == model.SCTP)
		r.Affine += one(pool.Affinity > 0)
		if pool.Scheduler != "" {
			r.Scheduled[pool.Scheduler]++
		}
	}
	return r
}

func one(is bool) int {
	if is {
		return 1
	}
	return 0
}

// Traffic is what the node's connections are like.
type Traffic string

// The kinds of Traffic.
const (
	Mixed Traffic = "mixed"
	Short Traffic = "short" // most carry one request
	Long  Traffic = "long"  // most stay open for many
)

// Case is what Choose looks at.
type Case struct {
	Rows     Rows
	Traffic  Traffic // empty: Mixed
	Findings []Finding
}

// Choice is a data plane and why it was chosen.
type Choice struct {
	Plane string `json:"plane"` // empty: none is possible
	// Next are the others that are possible, the best first.
	Next []string `json:"next,omitempty"`
	// Against is what the chosen plane does otherwise than others, and users of the node may miss.
	Against []string `json:"against,omitempty"`
	// Why is a paragraph.
	Why string `json:"why"`
	// Measured reports whether it is founded on figures of this machine.
	Measured bool `json:"measured"`
}

const (
	// changesPerSecond are the most with which Kubernetes is tested, in a whole cluster.
	changesPerSecond = 20
	// noteWeight is how much slower a plane counts for each thing that it does otherwise than others.
	noteWeight = 1.1
	// little is the ratio of efforts up to which the plane that is preferred is chosen.
	little = 1.05
)

// contender is a plane that is possible.
type contender struct {
	Finding
	connection, request float64
	change              time.Duration // with all of the node's Services
	notes               []string      // what it does otherwise than others
	effort              float64
}

// Choose is a pure function. Planes that are not possible are left out. Planes that serve all rows go before others.
// userspace comes last, as it takes its connections along when it ends, and measured planes go before others. Then the
// least effort wins: that of connections and requests, of changes, and of further notes. Where there is little between
// two, the one that is preferred wins.
func Choose(c Case) Choice {
	all := c.ranked()
	if len(all) == 0 {
		return Choice{Why: "No data plane can run here: " + c.missing() + "."}
	}
	choice := Choice{Plane: all[0].Plane, Against: all[0].notes, Measured: all[0].Figures != nil}
	for _, o := range all[1:] {
		choice.Next = append(choice.Next, o.Plane)
	}
	choice.Why = c.why(all)
	return choice
}

// ranked are the contenders, the best first.
func (c Case) ranked() []contender {
	all := c.contenders()
	slices.SortStableFunc(all, contender.compare)
	if len(all) > 0 {
		preferFirst(all)
	}
	return all
}

// contenders are the planes that are possible.
func (c Case) contenders() (all []contender) {
	for _, f := range c.Findings {
		if f.Missing != "" {
			continue
		}
		o := contender{Finding: f, notes: c.notes(f.Plane)}
		if m := f.Figures; m != nil {
			o.connection, o.request = m.Connection.Median, m.Request.Median
			o.change = grown(f.Plane, m.Change, max(1, float64(c.Rows.Services)/float64(max(m.Services, 1))))
		} else if e, ok := estimated(f.Plane, c.Rows.Services); ok {
			o.connection, o.request, o.change = e.connection, e.request, e.change
		}
		o.effort = c.effortOf(o)
		all = append(all, o)
	}
	return all
}

// effortOf is the mean effort of connections and requests, as ratios to direct access. Changes increase it by the share
// of a processor that they need, and each note increases it by a tenth.
func (c Case) effortOf(o contender) float64 {
	effort := math.Sqrt(o.connection * o.request)
	switch c.Traffic {
	case Short:
		effort = o.connection
	case Long:
		effort = o.request
	}
	if effort == 0 {
		return math.Inf(1)
	}
	return effort * (1 + changesPerSecond*o.change.Seconds()) * math.Pow(noteWeight, float64(len(o.notes)))
}

// notes are what a plane does otherwise than others, and what users of the node may miss.
func (c Case) notes(plane string) (notes []string) {
	if plane == ebpf {
		notes = append(notes, "sidecars see no Service address in packets of their pods")
	}
	if plane == ebpf && c.Rows.Affine > 0 {
		notes = append(notes, "session affinity takes a pod with several addresses for one client")
	}
	for scheduler := range c.Rows.Scheduled {
		if !slices.Contains(model.ModesWith(scheduler), plane) {
			return append(notes, "Services ask for schedulers that it lacks")
		}
	}
	return notes
}

// compare puts the better one first.
func (o contender) compare(p contender) int {
	return cmp.Or(
		slices.Compare(o.rank(), p.rank()),
		cmp.Compare(o.effort, p.effort),
		cmp.Compare(preference(o.Plane), preference(p.Plane)),
	)
}

// rank is what comes before effort and preference.
func (o contender) rank() []int {
	return []int{one(o.Unserved != ""), one(o.Plane == userspace), one(o.Figures == nil)}
}

// preferFirst moves to the front which is preferred among those between which there is little.
func preferFirst(all []contender) {
	best := 0
	for i, o := range all {
		near := slices.Equal(o.rank(), all[0].rank()) && o.effort <= little*all[0].effort
		if near && preference(o.Plane) < preference(all[best].Plane) {
			best = i
		}
	}
	chosen := all[best]
	copy(all[1:best+1], all[:best])
	all[0] = chosen
}
