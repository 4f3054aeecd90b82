package demo

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/cluster"
	"fairlead.dev/fairlead/service"
)

const (
	// A trial makes up to perBackend connections for each backend, within the two bounds, and then goes
	// on until every backend has answered. After maxPerBackend·n connections, a fair choice among n has
	// still missed one of them with a chance of n·e^-maxPerBackend.
	perBackend    = 200
	minTries      = 60
	maxTries      = 1200
	maxPerBackend = 40
	// budget is how many connections all trials together make, if there are not too many of them.
	budget = 40_000
	// deniedTries are enough where nothing is to be counted.
	deniedTries = 2
	// answerTime and silence are how long to wait for what must come, and for what must not.
	answerTime = 5 * time.Second
	silence    = 250 * time.Millisecond
	// unfair is by how many standard deviations connections may be distributed unevenly: a fair
	// choice exceeds it once in 10^9 trials.
	unfair = 6
)

// The decision of the proxy about a packet, in the words of "fairlead explain".
const (
	forward = "forward"
	reject  = "reject"
	drop    = "drop"
)

// trial is one way into a Service from one place, and what happened there.
type trial struct {
	cluster.Address
	spec   *corev1.Service
	from   testbed.Place
	source netip.Addr // of from
	iface  string     // on which the node receives its packets; empty: it is the node
	node   netip.Addr // of the node
	here   bool       // a ready endpoint is on the node
	tries  int
	warned bool // what its Service says is probably a mistake

	want     service.Explanation
	backends map[string]service.Chance // the wanted ones, by pod
	pods     []string                  // these, and others that are ready; sorted

	tried   bool
	note    string         // why no pod answers, or is asked; empty: pods answer
	answers map[string]int // by pod
	through []time.Duration
	direct  []time.Duration // what connections to the same pods took, without the Service
	fault   string          // what was not as it should be, or empty
}

// run connects as often as it takes to see what happens. An error is not the proxy's.
func (t *trial) run(ctx context.Context, bed *testbed.Bed) error {
	if t.note = t.nothingToTry(); t.note != "" {
		return nil
	}
	t.tried = true
	due, why := t.due()
	switch {
	case due != t.want.Verdict && !t.fallback():
		t.fault = fmt.Sprintf("expected: %s; got: the proxy will %s: %s", due, t.want.Verdict, t.reason())
		return nil
	case t.want.Verdict == forward:
		return t.sample(ctx, bed)
	case due == reject && t.warned:
		t.note = "refused: " + why + "; see the warning"
		return t.denied(ctx, bed, testbed.Refused)
	case due == reject:
		t.note = "refused, as it should be: " + why
		return t.denied(ctx, bed, testbed.Refused)
	}
	t.note = "no answer, as it should be: " + why
	return t.denied(ctx, bed, testbed.TimedOut)
}

// nothingToTry says why it is not the proxy's business what this Service does.
func (t *trial) nothingToTry() string {
	const otherProxy = "service.kubernetes.io/service-proxy-name"
	if name, ok := t.spec.Labels[otherProxy]; ok {
		return "left to another proxy: " + name
	}
	for _, in := range t.spec.Status.LoadBalancer.Ingress {
		if t.Kind == cluster.LoadBalancer && in.IP == t.To.Addr().String() &&
			in.IPMode != nil && *in.IPMode == corev1.LoadBalancerIPModeProxy {
			return "left to the load balancer: ipMode Proxy"
		}
	}
	if owner, _, _ := strings.Cut(t.want.Service, ":"); owner != "" && owner != t.Service {
		return "taken by " + owner + ", which was first"
	}
	for _, b := range t.Backends {
		if b.Place == "" {
			return fmt.Sprintf("not tried: no pod answers at %s/%s here", b.Addr, t.Protocol)
		}
	}
	return ""
}

// due is what a proxy has to do, and why it is not to forward. This follows from the manifests alone,
// so that no mistake of the proxy's can make it right.
func (t *trial) due() (verdict, why string) {
	spec := &t.spec.Spec
	policy, local := "internalTrafficPolicy", spec.InternalTrafficPolicy != nil &&
		*spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	if t.Kind != cluster.ClusterIP {
		policy = "externalTrafficPolicy"
		local = spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && t.from == testbed.Outside
	}
	switch {
	case t.closed():
		return drop, "not in loadBalancerSourceRanges"
	case len(t.Backends) == 0:
		return reject, "no endpoints"
	case local && !t.here:
		return drop, policy + " is Local, and there is no pod on the node"
	}
	return forward, ""
}

// fallback reports whether the proxy makes do with pods that are not ready, as it may with terminating
// ones if there are no others.
func (t *trial) fallback() bool {
	for _, b := range t.Backends {
		if _, ok := t.backends[b.Place]; ok {
			return false
		}
	}
	return t.want.Verdict == forward && !t.closed()
}

// closed reports whether the load balancer's source ranges leave the client out. Those of one family
// do not concern the other.
func (t *trial) closed() bool {
	closed := false
	for _, text := range t.spec.Spec.LoadBalancerSourceRanges {
		r, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil || r.Addr().Is4() != t.source.Is4() {
			continue
		}
		if r.Contains(t.source) {
			return false
		}
		closed = true
	}
	return closed && t.Kind == cluster.LoadBalancer
}

// denied expects no answer.
func (t *trial) denied(ctx context.Context, bed *testbed.Bed, want testbed.Result) error {
	timeout := answerTime
	if want == testbed.TimedOut {
		timeout = silence
	}
	for range deniedTries {
		o, err := bed.Probe(ctx, t.probe(t.To, timeout))
		if err != nil {
			return err
		}
		if o.Result != want {
			t.fault, t.note = fmt.Sprintf("expected: %s (%s); got: %s", want, t.reason(), o), ""
			return nil
		}
	}
	return nil
}

func (t *trial) probe(to netip.AddrPort, timeout time.Duration) testbed.Probe {
	return testbed.Probe{From: t.from, To: to, Protocol: t.Protocol, Timeout: timeout}
}

// sample connects until it is clear which pods answer and how evenly.
func (t *trial) sample(ctx context.Context, bed *testbed.Bed) error {
	t.answers = map[string]int{}
	most := maxPerBackend * len(t.backends)
	if t.sticky() {
		most = t.tries
	}
	for i := 0; i < t.tries || i < most && len(t.answers) < len(t.backends); i++ {
		if err := t.connect(ctx, bed); err != nil || t.fault != "" {
			return err
		}
		if i < t.tries {
			if err := t.compare(ctx, bed); err != nil {
				return err
			}
		}
	}
	t.fault = t.imbalance()
	return nil
}

// connect connects once and checks the pod that answers, and the client address that this pod sees.
func (t *trial) connect(ctx context.Context, bed *testbed.Bed) error {
	o, err := bed.Probe(ctx, t.probe(t.To, answerTime))
	if err != nil {
		return err
	}
	b, ok := t.backends[o.Backend]
	client := t.source
	if b.Masquerade {
		client = t.node
	}
	switch {
	case o.Result != testbed.Answered:
		t.fault = fmt.Sprintf("expected: %s; got: %s", t.names(), o)
	case !ok:
		t.fault = fmt.Sprintf("expected: %s; got: %s", t.names(), o.Backend)
	case o.Source != client:
		t.fault = fmt.Sprintf("expected: %s sees the client as %s; got: as %s", o.Backend, client, o.Source)
	}
	t.answers[o.Backend]++
	t.through = append(t.through, o.RTT)
	return nil
}

// compare connects to a pod directly. It chooses one that has answered, so that slow pods weigh the same on both sides.
// It may be any of them, so that none is woken for the Service only.
func (t *trial) compare(ctx context.Context, bed *testbed.Bed) error {
	n := rand.IntN(len(t.through))
	for _, pod := range t.pods {
		if n -= t.answers[pod]; n >= 0 {
			continue
		}
		to, err := netip.ParseAddrPort(t.backends[pod].Backend)
		if err != nil {
			return fmt.Errorf("the proxy's explanation: %w", err)
		}
		o, err := bed.Probe(ctx, t.probe(to, answerTime))
		if err == nil && o.Result == testbed.Answered {
			t.direct = append(t.direct, o.RTT)
		}
		return err
	}
	return nil
}

func (t *trial) sticky() bool { return t.spec.Spec.SessionAffinity == corev1.ServiceAffinityClientIP }

// imbalance is what is wrong with the distribution of connections.
func (t *trial) imbalance() string {
	if t.sticky() {
		if len(t.answers) > 1 {
			return fmt.Sprintf("expected: one pod for the client; got: %s", t.counts())
		}
		return ""
	}
	if len(t.answers) < len(t.backends) || t.deviation() > unfair {
		return fmt.Sprintf("expected: %s in equal parts; got: %s", t.names(), t.counts())
	}
	return ""
}

// deviation is how many standard deviations the distribution is off: that of chi square, which the
// cube root makes nearly normal (Wilson and Hilferty, 1931).
func (t *trial) deviation() float64 {
	n, k := float64(len(t.through)), float64(len(t.backends)-1)
	if k == 0 {
		return 0
	}
	chi := 0.0
	for pod, b := range t.backends {
		want := n * b.Probability
		chi += (float64(t.answers[pod]) - want) * (float64(t.answers[pod]) - want) / want
	}
	return (math.Cbrt(chi/k) - 1 + 2/(9*k)) / math.Sqrt(2/(9*k))
}

// slower is how many times as long a connection takes through the Service; 0: unknown.
func (t *trial) slower() float64 {
	if len(t.direct) == 0 {
		return 0
	}
	return median(t.through).Seconds() / median(t.direct).Seconds()
}

func median(all []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(all))[len(all)/2]
}

// reason is the last of the proxy's, which decided.
func (t *trial) reason() string {
	if len(t.want.Reasons) == 0 {
		return "it does not say why"
	}
	return t.want.Reasons[len(t.want.Reasons)-1]
}

// names are the pods that may answer.
func (t *trial) names() string { return strings.Join(slices.Sorted(maps.Keys(t.backends)), ", ") }

// counts are the connections of each pod.
func (t *trial) counts() string {
	var words []string
	for _, pod := range slices.Sorted(maps.Keys(t.backends)) {
		words = append(words, fmt.Sprintf("%s %d", pod, t.answers[pod]))
	}
	return strings.Join(words, ", ")
}
