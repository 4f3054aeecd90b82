package dataplane

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
)

// Counters are what a plane has counted.
type Counters struct {
	Served  []Served  `json:"served"`
	Refused []Refused `json:"refused"`
	Tables  []Table   `json:"tables"`
	Dials   *Dials    `json:"dials,omitempty"`

	Connections bool `json:"-"` // of what is served the plane counts these
	Traffic     bool `json:"-"` // and these
}

// Detail is how finely a plane counts connections, where that costs something. Where it costs nothing, a plane counts
// per backend in any case.
type Detail uint8

// The values of Detail.
const (
	NoDetail Detail = iota
	PerPool
	PerBackend
)

// Dials are what a plane has counted that connects to backends itself.
type Dials struct {
	Failed     uint64 `json:"failed"`     // backends that did not answer, or refused
	Retried    uint64 `json:"retried"`    // connections that another backend answered after that
	Unanswered uint64 `json:"unanswered"` // connections that none of the backends answered that were tried
}

// MarshalJSON has the keys of the release before, too.
func (d Dials) MarshalJSON() ([]byte, error) {
	type plain Dials
	return json.Marshal(struct {
		plain
		Rescued uint64 `json:"rescued"`
		Lost    uint64 `json:"lost"`
	}{plain(d), d.Retried, d.Unanswered})
}

// Served is what a backend of a pool got. Of a connection of UDP that is the first datagram from a socket to an
// address, or of a flow that was silent for two minutes.
type Served struct {
	Pool    model.PoolID
	Backend netip.AddrPort // not valid: several, which the plane does not tell apart
	Several Several
	Sum
}

// Sum is what was counted of connections that were served.
type Sum struct {
	Connections uint64
	Failed      uint64 // connections for which a backend was tried in vain, by a plane that connects itself
	// Of what passes as packets. Of sockets that connect to a backend in place of a Service, PerBackend alone counts them.
	ToBackend, ToClient Traffic
}

// Plus adds another one.
func (s Sum) Plus(o Sum) Sum {
	return Sum{
		s.Connections + o.Connections, s.Failed + o.Failed,
		s.ToBackend.Plus(o.ToBackend), s.ToClient.Plus(o.ToClient),
	}
}

// Max has the greater ones of two.
func (s Sum) Max(o Sum) Sum {
	return Sum{
		max(s.Connections, o.Connections), max(s.Failed, o.Failed),
		Traffic{max(s.ToBackend.Packets, o.ToBackend.Packets), max(s.ToBackend.Bytes, o.ToBackend.Bytes)},
		Traffic{max(s.ToClient.Packets, o.ToClient.Packets), max(s.ToClient.Bytes, o.ToClient.Bytes)},
	}
}

// MarshalJSON has the words of the text form.
func (s Served) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Pool        string  `json:"pool"`
		Backend     string  `json:"backend"`
		Connections uint64  `json:"connections"`
		Failed      uint64  `json:"failed,omitempty"`
		ToBackend   Traffic `json:"toBackend,omitzero"`
		ToClient    Traffic `json:"toClient,omitzero"`
	}{s.Pool.String(), s.backend(), s.Connections, s.Failed, s.ToBackend, s.ToClient})
}

func (s Served) backend() string {
	if !s.Backend.IsValid() {
		return cmp.Or(string(s.Several), "gone")
	}
	return s.Backend.String()
}

// Several says which backends of a pool are counted together; empty: those that have left the pool.
type Several string

// The values of Several.
const (
	ByAffinity Several = "affinity" // those to which session affinity has led
	All        Several = "all"
)

// Tally adds up what several kernel objects have counted of one backend.
type Tally map[Served]Sum // without their own sums

// Add adds what one object has counted.
func (t Tally) Add(s Served) {
	more := s.Sum
	s.Sum = Sum{}
	t[s] = t[s].Plus(more)
}

// Served has the sums.
func (t Tally) Served() (all []Served) {
	for s, sum := range t {
		s.Sum = sum
		all = append(all, s)
	}
	return all
}

// Traffic is packets, and their bytes.
type Traffic struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// Plus adds other traffic.
func (t Traffic) Plus(o Traffic) Traffic { return Traffic{t.Packets + o.Packets, t.Bytes + o.Bytes} }

// A Reason is why a connection was refused.
type Reason string

// The reasons that planes can tell.
const (
	NoEndpoints      Reason = "no-endpoints"
	NoLocalEndpoints Reason = "no-local-endpoints"
	SourceNotAllowed Reason = "source-not-allowed"
	NoServicePort    Reason = "no-service-port" // of guards: nothing is served there
	TableFull        Reason = "table-full"
)

// RefusedBy is what a row has refused that refuses all clients.
func RefusedBy(key model.Key, v model.Verdict, connections uint64) Refused {
	r := Refused{
		Addr: key.Addr, Port: key.Port, Protocol: key.Protocol, Verdict: v, Reason: NoEndpoints, Connections: connections,
	}
	switch v {
	case model.Drop:
		r.Reason = NoLocalEndpoints
	case model.Forward: // the kernel has not taken what should serve it
		r.Verdict, r.Reason = model.Reject, ""
	}
	return r
}

// Refused is what a row has refused. Without an address it is what all guards have refused, or all rows for one reason.
type Refused struct {
	Addr        netip.Addr
	Port        uint16 // 0: the address itself, for ports that no row names
	Protocol    model.Protocol
	Verdict     model.Verdict
	Reason      Reason // empty: the plane cannot tell
	Connections uint64
}

// MarshalJSON has the words of the text form.
func (r Refused) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		By          string `json:"by"`
		Verdict     string `json:"verdict"`
		Reason      Reason `json:"reason,omitempty"`
		Connections uint64 `json:"connections"`
	}{r.by(), r.Verdict.String(), r.Reason, r.Connections})
}

func (r Refused) by() string {
	switch {
	case !r.Addr.IsValid() && r.Reason == SourceNotAllowed:
		return "source-ranges"
	case !r.Addr.IsValid():
		return "guards"
	case r.Port == 0:
		return r.Addr.String()
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(r.Addr, r.Port), r.Protocol)
}

// Table is one of the plane's tables in the kernel, or what else is bounded.
type Table struct {
	Name      string `json:"name"`
	Capacity  uint32 `json:"capacity"`
	Bytes     uint64 `json:"bytes,omitempty"`
	Used      uint32 `json:"used,omitempty"`      // when they were counted last, a minute ago at most
	Counted   bool   `json:"-"`                   // some are
	Full      uint64 `json:"full,omitempty"`      // connections for which there was no room
	Evictions uint64 `json:"evictions,omitempty"` // connections that ended to make room for clients with fewer
}

// MarshalJSON has the keys of the release before, too.
func (t Table) MarshalJSON() ([]byte, error) {
	type plain Table
	return json.Marshal(struct {
		plain
		Yielded uint64 `json:"yielded,omitempty"`
	}{plain(t), t.Evictions})
}

// Sort puts all in order.
func (c *Counters) Sort() {
	slices.SortFunc(c.Served, func(a, b Served) int {
		return cmp.Or(a.Pool.Compare(b.Pool), a.Backend.Compare(b.Backend))
	})
	slices.SortFunc(c.Refused, func(a, b Refused) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol),
			cmp.Compare(a.Verdict, b.Verdict), cmp.Compare(a.Reason, b.Reason))
	})
	slices.SortFunc(c.Tables, func(a, b Table) int { return strings.Compare(a.Name, b.Name) })
}

// String has a line for each row.
func (c Counters) String() string {
	var text strings.Builder
	for _, s := range c.Served {
		fmt.Fprintf(&text, "served %s %s connections %d", s.Pool, s.backend(), s.Connections)
		if s.Failed > 0 {
			fmt.Fprintf(&text, " failed %d", s.Failed)
		}
		if s.ToBackend.Packets+s.ToClient.Packets > 0 {
			fmt.Fprintf(&text, " to-backend %d packets %d bytes to-client %d packets %d bytes",
				s.ToBackend.Packets, s.ToBackend.Bytes, s.ToClient.Packets, s.ToClient.Bytes)
		}
		text.WriteString("\n")
	}
	for _, r := range c.Refused {
		fmt.Fprintf(&text, "refused %s %s %d", r.by(), r.Verdict, r.Connections)
		if r.Reason != "" {
			fmt.Fprintf(&text, " %s", r.Reason)
		}
		text.WriteString("\n")
	}
	for _, t := range c.Tables {
		fmt.Fprintf(&text, "table %s capacity %d", t.Name, t.Capacity)
		if t.Bytes > 0 {
			fmt.Fprintf(&text, " bytes %d", t.Bytes)
		}
		if t.Counted {
			fmt.Fprintf(&text, " used %d", t.Used)
		}
		if t.Full > 0 {
			fmt.Fprintf(&text, " full %d", t.Full)
		}
		if t.Evictions > 0 {
			fmt.Fprintf(&text, " evictions %d", t.Evictions)
		}
		text.WriteString("\n")
	}
	if d := c.Dials; d != nil {
		fmt.Fprintf(&text, "dials failed %d retried %d unanswered %d\n", d.Failed, d.Retried, d.Unanswered)
	}
	return text.String()
}
