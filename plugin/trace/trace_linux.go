// Package trace sends one real connection or datagram to a Service, finds out where the kernel took it, and compares
// that with what the rows predict.
//
//	         ┌ netns of the sender ┐
//	Send ─►  │ bind, connect ──────┼─► kernel ─► backend
//	         └─────────┬───────────┘     │
//	                   ▼                 ▼
//	peer of the socket (ebpf) · rules that it met (nft trace) · conntrack (also of IPVS) · counters
//	                   └────────► Answer ◄──── Explanation
//	                      Contradiction, if they differ
package trace

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// Question is what is sent, and whom to ask about it.
type Question struct {
	From     Sender
	To       netip.AddrPort
	Protocol model.Protocol // TCP or UDP
	Timeout  time.Duration  // for an answer
	// Explain predicts what becomes of packets from a source, which is invalid for this node.
	Explain func(ctx context.Context, source netip.Addr, iface string) (service.Explanation, error)
	// Count is how many connections each backend of a Service got so far, and which data plane counts them.
	Count func(ctx context.Context, name string) (plane string, counts map[string]uint64, err error)
}

// Answer is what became of it.
type Answer struct {
	Source        string              `json:"source"`      // address:port
	Destination   string              `json:"destination"` // address:port/protocol
	Result        string              `json:"result"`      // answered, refused or no answer
	Steps         []Step              `json:"steps"`
	Backend       string              `json:"backend,omitempty"` // to which it went; empty: to none
	Explanation   service.Explanation `json:"explanation"`
	Contradiction string              `json:"contradiction,omitempty"`

	tracked    bool  // connection tracking has the flow
	masquerade *bool // what it says of the source; nil: nothing
}

// Step is one that the packet took, by what told it.
type Step struct {
	By   string `json:"by"` // socket, nft, conntrack or counter
	Text string `json:"text"`
}

// The results.
const (
	answered = "answered"
	refused  = "refused"
	silent   = "no answer"
)

func (a *Answer) step(by, format string, args ...any) {
	a.Steps = append(a.Steps, Step{by, fmt.Sprintf(format, args...)})
}

// Good reports whether it was answered, and as predicted.
func (a *Answer) Good() bool { return a.Contradiction == "" && a.Result == answered }

// String has a line for each step, beside the prediction.
func (a *Answer) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "sent       %s -> %s: %s\n", a.Source, a.Destination, a.Result)
	for _, s := range a.Steps {
		fmt.Fprintf(&text, "%-10s %s\n", s.By, s.Text)
	}
	fmt.Fprintf(&text, "%-10s %s\n", "explain", a.Explanation.Summary)
	for _, b := range a.Explanation.Backends {
		fmt.Fprintf(&text, "%-10s %s may get it: %.0f %%\n", "", b.Backend, 100*b.Probability)
	}
	switch {
	case a.Contradiction != "":
		fmt.Fprintf(&text, "They contradict each other: %s.\n"+
			"Run fairlead audit. If it finds nothing, report this with fairlead report.\n", a.Contradiction)
	case a.Backend != "" && a.Result != answered:
		fmt.Fprintf(&text, "They agree. The backend itself gave %s: does the pod serve this port?\n",
			map[string]string{refused: "a refusal", silent: "no answer"}[a.Result])
	default:
		text.WriteString("They agree.\n")
	}
	return text.String()
}

// Run sends it. A contradiction counts if it repeats: endpoints may change between the packet and the prediction.
func Run(ctx context.Context, q Question) (a *Answer, err error) {
	for range 2 {
		if a, err = once(ctx, q); err != nil || a.Contradiction == "" {
			break
		}
	}
	return a, err
}

func once(ctx context.Context, q Question) (*Answer, error) {
	a := &Answer{Destination: fmt.Sprintf("%s/%s", q.To, q.Protocol)}
	rules, err := watchRules(q)
	if err != nil {
		a.step("nft", "the rules cannot be traced: %v", err)
	} else {
		defer rules.close()
	}
	plane, before, err := q.counts(ctx)
	if err != nil {
		return nil, err
	}
	s, err := q.From.send(q, rules.begin)
	if err != nil {
		return nil, err
	}
	defer s.close()
	a.Source, a.Result = s.local.String(), s.result
	rules.steps(a)
	if err := q.find(a, s); err != nil {
		return nil, err
	}
	if err := q.explain(ctx, a, s); err != nil {
		return nil, err
	}
	// Translations of other planes are in connection tracking.
	if a.Backend == "" && a.Explanation.Backends != nil && (plane == "ebpf" || plane == "userspace" && a.tracked) {
		if err := q.counted(ctx, a, before); err != nil {
			return nil, err
		}
	}
	a.compare()
	return a, ctx.Err()
}

// find asks the socket and connection tracking where the packet went. Mode ipvs has IPVS tell connection tracking.
func (q *Question) find(a *Answer, s *sent) error {
	if s.peer.IsValid() && s.peer != q.To {
		a.Backend = s.peer.String()
		a.step("socket", "connect() was led to %s", s.peer)
		return nil
	}
	c, err := nfnetlink.Dial()
	if err != nil {
		return fmt.Errorf("ask connection tracking: %w", err)
	}
	defer c.Close()
	flow, err := tracked.BySender(c, tracked.Tuple{Protocol: q.Protocol, From: s.local, To: q.To})
	if err != nil { // a program at a device may have changed the destination before
		var all []tracked.Flow
		mine := func(f *tracked.Flow) bool { return f.From == s.local }
		all, err = tracked.List(c, mine, tracked.Filter{Protocol: q.Protocol})
		if err == nil && len(all) == 0 {
			a.step("conntrack", "has no such flow")
		} else if err == nil {
			flow = all[0]
		}
	}
	if err != nil {
		return fmt.Errorf("ask connection tracking: %w", err)
	}
	if a.tracked = flow.From.IsValid(); a.tracked {
		a.step("conntrack", "%s -> %s, answers %s -> %s", flow.From, flow.To, flow.Answers, flow.Back)
		if flow.Answers != q.To {
			a.Backend = flow.Answers.String()
			if q.From.namespace != "" { // the node's own address can stand for itself
				a.masquerade = new(flow.Back.Addr() != flow.From.Addr())
			}
		}
	}
	return nil
}

// explain has the agent predict it.
func (q *Question) explain(ctx context.Context, a *Answer, s *sent) (err error) {
	source, iface := s.local.Addr(), ""
	if q.From.namespace == "" {
		source = netip.Addr{}
	} else if iface, err = deviceTo(source); err != nil {
		return err
	}
	a.Explanation, err = q.Explain(ctx, source, iface)
	return err
}

// counts are those before the packet.
func (q *Question) counts(ctx context.Context) (plane string, counts map[string]uint64, err error) {
	x, err := q.Explain(ctx, netip.Addr{}, "")
	if err != nil || x.Service == "" {
		return "", nil, err
	}
	return q.Count(ctx, x.Service)
}

// counted asks the counters, which may come a moment later.
func (q *Question) counted(ctx context.Context, a *Answer, before map[string]uint64) error {
	const looks, pause = 15, 100 * time.Millisecond
	for range looks {
		_, after, err := q.Count(ctx, a.Explanation.Service)
		if err != nil {
			return err
		}
		for _, b := range a.Explanation.Backends {
			if after[b.Backend] > before[b.Backend] {
				a.Backend = b.Backend
				a.step("counter", "of backend %s went up to %d", b.Backend, after[b.Backend])
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
	return nil
}

// compare finds what contradicts the prediction.
func (a *Answer) compare() {
	x, to := &a.Explanation, a.Backend
	i := slices.IndexFunc(x.Backends, func(b service.Chance) bool { return b.Backend == to })
	switch forward := x.Verdict == model.Forward.String(); {
	case forward && to == "":
		a.Contradiction = fmt.Sprintf("a backend should get it, and none did; it was %s", wasText(a.Result))
	case forward && i < 0:
		a.Contradiction = fmt.Sprintf("it went to %s, which is none of the backends", to)
	case forward && a.masquerade != nil && *a.masquerade != x.Backends[i].Masquerade:
		a.Contradiction = fmt.Sprintf("its source was replaced: %t, and should have been: %t", *a.masquerade,
			x.Backends[i].Masquerade)
	case !forward && to != "":
		a.Contradiction = fmt.Sprintf("it went to %s, and the verdict is %s", to, x.Verdict)
	case x.Verdict == model.Reject.String() && a.Result != refused, x.Verdict == model.Drop.String() && a.Result != silent:
		a.Contradiction = fmt.Sprintf("the verdict is %s, and it was %s", x.Verdict, wasText(a.Result))
	}
}

func wasText(result string) string {
	if result == silent {
		return "not answered"
	}
	return result
}
