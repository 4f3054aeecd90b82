package sidebyside

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// probe is a packet's way: sender, protocol, destination.
type probe struct {
	from     testbed.Place
	protocol model.Protocol
	to       netip.AddrPort
}

func (p probe) String() string { return fmt.Sprintf("%s %s %s", p.from, p.protocol, p.to) }

// How long to wait for an answer before silence is believed: at first, and when it matters.
const (
	patience      = 100 * time.Millisecond
	longPatience  = 2 * time.Second
	errorPause    = 2 * time.Second // for the next ICMP error (net.ipv4.route.error_cost)
	manyQuestions = 150             // misses one of six backends with a probability of 10^-11
)

// outcomes are what became of a probe, and how often: "refused", "pod-a sees 10.244.1.20".
type outcomes map[string]int

func (o outcomes) String() string { return strings.Join(slices.Sorted(maps.Keys(o)), ", ") }

func (o outcomes) are(what ...string) bool {
	return len(what) == len(o) && !slices.ContainsFunc(what, func(w string) bool { return o[w] == 0 })
}

// answered reports whether every probe reached a backend.
func (o outcomes) answered() bool {
	for what := range o {
		if !strings.Contains(what, " sees ") {
			return false
		}
	}
	return true
}

// hasAnswer reports whether some probe reached a backend.
func (o outcomes) hasAnswer() bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(o)), func(what string) bool {
		return strings.Contains(what, " sees ")
	})
}

// same compares the kinds of outcomes.
func same(a, b outcomes) bool { return maps.EqualFunc(a, b, func(int, int) bool { return true }) }

func (o outcomes) ask(ctx context.Context, bed *testbed.Bed, p probe, timeout time.Duration) error {
	out, err := bed.Probe(ctx, testbed.Probe{From: p.from, To: p.to, Protocol: p.protocol, Timeout: timeout})
	if err != nil {
		return err
	}
	what := out.Result.String()
	if out.Result == testbed.Answered {
		what = fmt.Sprintf("%s sees %s", out.Backend, out.Source)
	}
	o[what]++
	return nil
}

// contrast is how a probe fares by the two proxies of a pair.
type contrast struct {
	*pair
	probe
	target
	objects      objects
	theirs, ours outcomes
}

func (c contrast) String() string {
	return fmt.Sprintf("%s (%s) in mode %s\n\tkube-proxy: %s\n\tfairlead:   %s", c.probe, c.kind, c.mode, c.theirs, c.ours)
}

// sticky reports whether session affinity makes every probe after the first reach the same backend.
func (c contrast) sticky() bool { return c.service != nil && sticky(c.service) }

func sticky(s *corev1.Service) bool { return s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP }

// agree reports whether there is no difference. Where affinity binds the client each side answers from one backend, by
// chance not the same. Then each must be one that could be chosen. Both must see the same source, unless one backend is
// the client itself, or the node, on the way to which nothing is masqueraded.
func (c contrast) agree() bool {
	if same(c.theirs, c.ours) {
		return true
	}
	if !c.sticky() || len(c.theirs) != 1 || len(c.ours) != 1 || !c.theirs.answered() || !c.ours.answered() {
		return false
	}
	theirs, theirSource, _ := strings.Cut(c.theirs.String(), " sees ")
	ours, ourSource, _ := strings.Cut(c.ours.String(), " sees ")
	special := []string{string(c.from), hostPod}
	choices := c.choices()
	return theirs != ours && slices.Contains(choices, theirs) && slices.Contains(choices, ours) &&
		(theirSource == ourSource || slices.Contains(special, theirs) || slices.Contains(special, ours))
}

// enough reports whether as many questions would have shown one more outcome with near certainty.
// Silence takes long, and so where it is one of the outcomes we are content with less.
func (c contrast) enough(asked int) bool {
	kinds := max(len(c.theirs), len(c.ours))
	switch {
	case !c.theirs.hasAnswer() && !c.ours.hasAnswer():
		return asked >= 1
	case c.sticky():
		return asked >= 4
	case !c.theirs.answered() || !c.ours.answered():
		return asked >= 12
	}
	return asked >= 4+8*kinds
}

// contrast sends a probe through both proxies. An unexpected difference gets a second chance, with more patience: the
// machine is busy, and kernels limit the rate of ICMP errors.
func (p *pair) contrast(ctx context.Context, q probe, o objects) (contrast, error) {
	c := contrast{pair: p, probe: q, target: o.find(q.to, q.protocol), objects: o}
	err := c.askAll(ctx, patience, manyQuestions)
	for try := 0; try < 3 && err == nil && !c.agree() && explain(c) == nil; try++ {
		select {
		case <-time.After(errorPause): //nolint:forbidigo // no event says when the kernel sends ICMP errors again
		case <-ctx.Done():
			return c, ctx.Err()
		}
		err = c.askAll(ctx, longPatience, manyQuestions/2)
	}
	return c, err
}

// askAll asks until the two agree and that is no accident, or until it is clear that they do not.
func (c *contrast) askAll(ctx context.Context, timeout time.Duration, atMost int) error {
	c.theirs, c.ours = outcomes{}, outcomes{}
	for asked := 0; asked < atMost && !(c.agree() && c.enough(asked)) && !c.apart(asked); asked++ {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return c.theirs.ask(ctx, c.pair.theirs.bed, c.probe, timeout) })
		group.Go(func() error { return c.ours.ask(ctx, c.pair.ours.bed, c.probe, timeout) })
		if err := group.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// apart reports whether no number of further questions can make the two agree. Then one never answers in a way that the
// other does, and at least one of them has no choice.
func (c *contrast) apart(asked int) bool {
	for what := range c.theirs {
		if c.ours[what] > 0 {
			return false
		}
	}
	if !c.theirs.hasAnswer() && !c.ours.hasAnswer() {
		return asked >= 1
	}
	return asked >= 5 && (!c.theirs.hasAnswer() || !c.ours.hasAnswer())
}
