package migrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

const (
	// settle is how much later than this process, or earlier, the other proxy may hear of a change of the cluster and
	// program it. Connections to what has changed within that time are not judged.
	settle = 5 * time.Second
	// maxWaiting bounds the connections that wait for their judgement, and the contradictions that are told apart.
	maxWaiting = 1 << 14
	// ipvsTracked tells whether connection tracking knows the backends that IPVS chooses. kube-proxy sets it.
	ipvsTracked = "/proc/sys/net/ipv4/vs/conntrack"
)

// Watched is what a shadow has seen: the rows beside what the kernel does with real connections.
type Watched struct {
	For            time.Duration   `json:"nanoseconds"`
	Rows           int             `json:"rows"`
	Agreed         int             `json:"agreed"`   // connections
	Unjudged       int             `json:"unjudged"` // because of changes meanwhile, or as there were too many
	Contradictions []Contradiction `json:"contradictions"`
}

// Contradiction is what the kernel does and the rows would not.
type Contradiction struct {
	Service     string `json:"service,omitempty"` // with the port; empty: the rows know none
	Address     string `json:"address"`
	Backend     string `json:"backend"`
	What        string `json:"what"`
	Client      string `json:"client"` // one of them
	Connections int    `json:"connections"`
}

// String has one line for each contradiction, and one about all.
func (w *Watched) String() string {
	var text strings.Builder
	for _, c := range w.Contradictions {
		fmt.Fprintf(&text, "%s %s: %s: the kernel sends %s from %s to %s\n", c.Address, cmp.Or(c.Service, "(no Service)"),
			c.What, said.Count(c.Connections, "connection"), c.Client, c.Backend)
	}
	fmt.Fprintf(&text, "%s compared with %s in %s: %s, %s not judged\n", said.Count(w.Agreed, "agreeing connection"),
		said.Count(w.Rows, "row"), w.For.Round(time.Millisecond), said.Count(len(w.Contradictions), "contradiction"),
		said.Count(w.Unjudged, "connection"))
	return text.String()
}

// shadow compares rows with connections.
type shadow struct {
	Watched
	rows    *daemon.Rows
	state   *model.State
	own     []netip.Addr // addresses of this node
	touched map[any]time.Time
	waiting []begun               // in the order of their times
	found   map[Contradiction]int // without Client and Connections; places in Contradictions
}

// begun is a connection that has begun and seems wrong.
type begun struct {
	tracked.Flow
	at time.Time
}

// watch compares with what a mode does for a time, and then waits until all connections can be judged.
func watch(ctx context.Context, c *config.Config, mode string, during time.Duration) (*Watched, error) {
	text, err := os.ReadFile(ipvsTracked)
	if mode == "ipvs" && err == nil && strings.TrimSpace(string(text)) == "0" {
		return nil, errors.New("connection tracking does not see what IPVS does: set net.ipv4.vs.conntrack to 1")
	}
	rows, err := daemon.OpenRows(c, daemon.NewLogs(os.Stderr)) // an API server may not answer
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	s := &shadow{rows: rows, touched: map[any]time.Time{}, found: map[Contradiction]int{}}
	s.Contradictions = []Contradiction{}
	if err := s.update(ctx); err != nil {
		return nil, err
	}
	clear(s.touched) // the kernel has had all of it
	flows, err := tracked.NewWatch(tracked.Begun)
	if err != nil {
		return nil, err
	}
	defer flows.Close()
	start := time.Now()
	for now := start; now.Sub(start) < during || len(s.waiting) > 0; now = time.Now() {
		err := hear(flows, func(f *tracked.Flow) {
			if now.Sub(start) < during {
				s.begin(f)
			}
		})
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		err = errors.Join(err, s.update(short), ctx.Err())
		cancel()
		if err != nil {
			return nil, err
		}
		s.judge()
	}
	s.For, s.Rows = time.Since(start), s.state.Rows()
	return &s.Watched, nil
}

// hear waits for a while, and tells which connections there were. Those that come faster than they are read are left
// out.
func hear(w *tracked.Watch, f func(*tracked.Flow)) error {
	if err := w.Next(f); !errors.Is(err, tracked.ErrMissed) {
		return err
	}
	return nil
}

// update waits for a change of the cluster, until the deadline if there is one.
func (s *shadow) update(ctx context.Context) error {
	b, err := s.rows.Next(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	if err != nil {
		return err
	}
	if b.Addrs != nil {
		s.own = b.Addrs
	}
	var change model.Change
	s.state, change, _ = s.rows.Table.Update(b)
	now := time.Now()
	maps.DeleteFunc(s.touched, func(_ any, at time.Time) bool { return now.Sub(at) > 3*settle })
	for key := range change.Frontends.Keys() {
		key.Scope = model.Any
		s.touched[key] = now
	}
	for id := range change.Pools.Keys() {
		s.touched[id] = now
	}
	return nil
}

// begin judges a connection that has begun, if it is not against the rows now.
func (s *shadow) begin(f *tracked.Flow) {
	switch _, what := s.against(f); {
	case what == "" && f.To != f.Answers:
		s.Agreed++
	case what == "":
	case len(s.waiting) == maxWaiting:
		s.Unjudged++
	default:
		s.waiting = append(s.waiting, begun{*f, time.Now()})
	}
}

// judge notes those that are against the rows, and have been for long enough.
func (s *shadow) judge() {
	for len(s.waiting) > 0 && time.Since(s.waiting[0].at) >= settle {
		f := s.waiting[0]
		s.waiting = s.waiting[1:]
		d, what := s.against(&f.Flow)
		key := model.Key{Addr: f.To.Addr(), Port: f.To.Port(), Protocol: f.Protocol}
		if what == "" || s.changed(key, f.at) || s.changed(d.Pool, f.at) {
			s.Unjudged++
			continue
		}
		s.note(Contradiction{
			Service: s.state.Frontends[d.Key].Service, Address: key.AddrPort().String() + "/" + f.Protocol.String(),
			Backend: f.Answers.String(), What: what,
		}, f.From)
	}
}

func (s *shadow) changed(key any, about time.Time) bool {
	return s.touched[key].After(about.Add(-settle))
}

func (s *shadow) note(c Contradiction, client netip.AddrPort) {
	i, known := s.found[c]
	if !known && len(s.found) == maxWaiting {
		s.Unjudged++
		return
	}
	if !known {
		i = len(s.Contradictions)
		s.found[c], c.Client = i, client.Addr().String()
		s.Contradictions = append(s.Contradictions, c)
	}
	s.Contradictions[i].Connections++
}

// against says what the rows have against what the kernel does with a connection; empty: nothing.
func (s *shadow) against(f *tracked.Flow) (d model.Decision, what string) {
	// The kernel does not tell on which interface the first packet came. That matters for clients of this node and,
	// where pods are recognised by their interfaces, for all.
	interfaces := []string{"?"}
	if slices.Contains(s.own, f.From.Addr()) {
		interfaces[0] = ""
	} else if len(s.state.Pods.Interfaces) > 0 {
		interfaces = append(interfaces, "")
	}
	for _, iface := range interfaces {
		d = s.state.Lookup(model.Packet{Protocol: f.Protocol, Source: f.From.Addr(), Destination: f.To, Interface: iface})
		if what = s.differs(d, f); what == "" {
			break
		}
	}
	return d, what
}

// differs compares a decision with that of the kernel. A packet whose destination is not translated has reached no
// backend: whether it was refused, connection tracking does not tell.
func (s *shadow) differs(d model.Decision, f *tracked.Flow) string {
	translated, port := f.To != f.Answers, f.To.Port()
	switch {
	case d.Verdict == model.Forward && !translated:
		return "the rows send it to a backend"
	case d.Verdict == model.Forward:
		if _, ok := s.state.Pools[d.Pool].At(f.Answers); !ok {
			return "this is no backend by the rows"
		}
	case !translated:
	case d.NotAllowed:
		return "the rows do not allow this client"
	case d.Verdict == model.Reject:
		return "the rows refuse it"
	case d.Verdict == model.Drop:
		return "the rows drop it"
	case !slices.Contains(s.own, f.To.Addr()) || port >= 30000 && port <= 32767: // a NodePort; others may be hostPorts
		return "the rows have no such Service"
	}
	return ""
}
