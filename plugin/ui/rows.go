package ui

import (
	"cmp"
	"math/bits"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
)

// row is a port of a Service.
type row struct {
	Key      string            `json:"key"`
	Service  string            `json:"service"`
	Ignored  string            `json:"ignored,omitempty"`
	Problems []service.Problem `json:"problems,omitempty"`
	Changed  time.Time         `json:"changed,omitzero"`
	State    string            `json:"state,omitempty"` // what is wrong, in one or two words
	service.PortSummary
	rates

	rank, level int // of the Service: how wrong it is, and the power of two of its rate, so that rows keep their places
}

// rates are counted between two looks at the agent; nil: not known.
type rates struct {
	Rate       *float64 `json:"rate"`       // connections a second
	FailedRate *float64 `json:"failedRate"` // attempts a second
}

// totals are those of all rows.
type totals struct {
	Services int `json:"services"`
	Wrong    int `json:"wrong"` // rows
	Ready    int `json:"ready"`
	Draining int `json:"draining"`
	Excluded int `json:"excluded"`
	rates
}

// take replaces what is known of Services. The rows of one stay together. Services with problems come first, then those
// with most connections.
func (s *snapshot) take(all engine.Services) {
	seconds, before := all.Now.Sub(s.Now).Seconds(), s.counted
	known := all.Counts && before != nil && seconds > 0 && seconds < stale.Seconds()
	s.Now, s.Counts, s.rows, s.counted, s.Totals = all.Now, all.Counts, nil, nil, totals{Services: len(all.Services)}
	if all.Counts {
		s.counted = map[string]service.Counted{}
	}
	for _, one := range all.Services {
		first, rank, rate := len(s.rows), 0, 0.0
		for _, p := range one.Ports {
			r := newRow(one, p)
			if all.Counts {
				s.counted[r.Key] = p.Counted
			}
			if known {
				r.count(before[r.Key], seconds)
				s.Totals.sum(r.rates)
				rate += *r.Rate
			}
			rank = max(rank, r.rank)
			s.Totals.add(r)
			s.rows = append(s.rows, r)
		}
		for _, r := range s.rows[first:] {
			r.rank, r.level = rank, bits.Len64(uint64(rate*10))
		}
	}
	slices.SortStableFunc(s.rows, func(a, b *row) int {
		return cmp.Or(b.rank-a.rank, b.level-a.level, cmp.Compare(a.Service, b.Service))
	})
}

func newRow(s engine.ServiceReport, p service.PortSummary) *row {
	r := &row{
		Key: s.Service + " " + strings.TrimSpace(p.Name+" "+p.Port), Service: s.Service, Ignored: s.Ignored,
		Problems: s.Problems, Changed: s.Changed, PortSummary: p,
	}
	switch {
	case len(s.Problems) > 0:
		r.rank, r.State = 3, "problem"
	case s.Ignored != "":
		r.State = "not served"
	case p.Ready == 0:
		r.rank, r.State = 2, "no endpoint"
	}
	return r
}

// count computes the rates. A data plane that counts anew has none.
func (r *row) count(was service.Counted, seconds float64) {
	perSecond := func(now, was uint64) *float64 { return new(float64(now-min(now, was)) / seconds) }
	r.Rate, r.FailedRate = perSecond(r.Connections, was.Connections), perSecond(r.Failed, was.Failed)
	if *r.FailedRate > 0 && r.rank == 0 {
		r.rank, r.State = 1, "connections fail"
	}
}

func (t *totals) add(r *row) {
	if r.rank > 0 {
		t.Wrong++
	}
	t.Ready, t.Draining, t.Excluded = t.Ready+r.Ready, t.Draining+r.Draining, t.Excluded+r.Excluded
}

func (r *rates) sum(o rates) {
	if r.Rate == nil {
		*r = rates{new(float64), new(float64)}
	}
	*r.Rate, *r.FailedRate = *r.Rate+*o.Rate, *r.FailedRate+*o.FailedRate
}

// matching are the rows that have all words of a filter, in a state.
func (s *snapshot) matching(filter, state string) (rows []*row) {
	words := strings.Fields(strings.ToLower(filter))
	for _, r := range s.rows {
		if r.is(state) && !slices.ContainsFunc(words, func(w string) bool { return !r.has(w) }) {
			rows = append(rows, r)
		}
	}
	return rows
}

func (r *row) is(state string) bool {
	return state == "" || state == "wrong" && r.rank > 0 || state == service.Draining && r.Draining > 0 ||
		state == service.Out && r.Excluded > 0 || state == "ignored" && r.Ignored != ""
}

func (r *row) has(word string) bool {
	return strings.Contains(strings.ToLower(r.Key), word) || strings.Contains(r.State, word) ||
		slices.ContainsFunc(r.Addresses, func(a service.AddressSummary) bool { return strings.Contains(a.At, word) })
}
