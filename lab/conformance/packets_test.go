package conformance

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// How long to wait for an answer that must come, and for one that must not.
const (
	patience = 15 * time.Second // a busy machine may stand still for some
	silence  = 250 * time.Millisecond
)

// traffic sends the packets of a case's probes.
type traffic struct {
	node  Network
	flows map[string]*flow
}

// flow is a connection or UDP socket that stays open.
type flow struct {
	net.Conn
	protocol model.Protocol
}

// run performs the probes of a step, those next to each other at the same time, as far as they do not disturb each
// other.
func (f *traffic) run(ctx context.Context, probes []probe) error {
	for _, batch := range batches(probes) {
		group, ctx := errgroup.WithContext(ctx)
		for _, queue := range queues(batch) {
			group.Go(func() error { return f.inTurn(ctx, queue) })
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	return nil
}

func (f *traffic) inTurn(ctx context.Context, probes []probe) error {
	for i := range probes {
		if err := f.probe(ctx, &probes[i]); err != nil {
			return fmt.Errorf("%s: %w", probes[i].line, err)
		}
	}
	return nil
}

func (f *traffic) probe(ctx context.Context, p *probe) error {
	switch {
	case p.again:
		return f.again(p)
	case p.flow != "":
		return f.begin(ctx, p)
	case p.result != testbed.Answered:
		return f.unanswered(ctx, p)
	case p.sticky:
		return f.stick(ctx, p)
	case p.forgets != 0:
		return f.forget(ctx, p)
	case p.favorite != "":
		return f.count(ctx, p)
	}
	return f.spread(ctx, p)
}

// once connects once and checks which backend answered, and the address that it saw.
func (f *traffic) once(ctx context.Context, p *probe, to netip.AddrPort) (backend string, err error) {
	o, err := f.node.Probe(ctx, testbed.Probe{
		From: p.from, To: to, Protocol: p.protocol, Timeout: p.timeout(), Size: p.size,
	})
	switch {
	case err != nil:
		return "", err
	case o.Result != p.result:
		return "", fmt.Errorf("%s: %s", to, o)
	case o.Result == testbed.Answered:
		return o.Backend, f.checkSource(p, o)
	}
	return "", nil
}

func (p *probe) timeout() time.Duration {
	if p.result == testbed.TimedOut {
		return silence
	}
	return patience
}

func (f *traffic) checkSource(p *probe, o testbed.Outcome) error {
	place, ok := p.sources[o.Backend]
	switch {
	case !ok:
		return fmt.Errorf("%s answers", o)
	case place == anyPlace || o.Source == f.node.Addr(place, o.Source.Is6()):
		return nil
	case place == testbed.Node && isNodeAddr(o.Source):
		return nil
	case f.node.Cgroup() != "" && o.Backend == string(p.from) && o.Source == f.node.Addr(p.from, o.Source.Is6()):
		return nil // it never left the pod
	}
	return fmt.Errorf("%s, which is not %s", o, place)
}

// isNodeAddr reports whether it is an address of the node under test.
func isNodeAddr(a netip.Addr) bool {
	return slices.ContainsFunc(nodeAddrs(), func(s string) bool {
		v4 := netip.MustParseAddr(s)
		return a == v4 || a == embedAddr(v4)
	})
}

func (f *traffic) unanswered(ctx context.Context, p *probe) error {
	for _, to := range p.to {
		if _, err := f.once(ctx, p, to); err != nil {
			return err
		}
	}
	return nil
}

// spread connects until every backend has answered. The limit makes a fair choice among n backends
// fail less than once in 10^15: it misses one of them 40n times with n(1-1/n)^40n < n·e^-40. Schedulers that take
// the backends in turn are fair to a probe only while no other one connects, see queues.
func (f *traffic) spread(ctx context.Context, p *probe) error {
	n := len(p.sources)
	seen := map[string]bool{}
	for i := range 40 * n {
		backend, err := f.once(ctx, p, p.to[i%len(p.to)])
		if err != nil {
			return err
		}
		seen[backend] = true
		if len(seen) == n && i >= 3*(n-1) {
			return nil
		}
		if i > 4*n { // with round robin, who connects in step with another probe sees half of the backends
			//nolint:forbidigo // chance alone takes the two out of step
			time.Sleep(rand.N(5 * time.Millisecond))
		}
	}
	return fmt.Errorf("only %v of %d backends answer", seen, n)
}

// stick connects several times to each address and wants one and the same backend.
func (f *traffic) stick(ctx context.Context, p *probe) error {
	first := p.stickTo
	for i := range 8 * len(p.to) {
		backend, err := f.once(ctx, p, p.to[i%len(p.to)])
		if err != nil {
			return err
		}
		if first == "" {
			first = backend
		}
		if backend != first {
			return fmt.Errorf("%s after %s", backend, first)
		}
	}
	return nil
}

// forget pauses longer than the affinity lasts until another backend answers than before. With four
// backends the chance to see the same one in all rounds is 4^-12.
func (f *traffic) forget(ctx context.Context, p *probe) error {
	before, err := f.once(ctx, p, p.to[0])
	for range 12 {
		if err != nil {
			return err
		}
		time.Sleep(p.forgets + p.forgets/10) //nolint:forbidigo // affinity ends by the clock, and nothing announces it
		var now string
		if now, err = f.once(ctx, p, p.to[0]); err == nil && now != before {
			return nil
		}
	}
	return fmt.Errorf("always %s", before)
}

// count compares the favorite's part with its share: it may be off by five standard deviations.
func (f *traffic) count(ctx context.Context, p *probe) error {
	const n = 300
	got := 0.0
	for range n {
		backend, err := f.once(ctx, p, p.to[0])
		if err != nil {
			return err
		}
		if backend == p.favorite {
			got++
		}
	}
	if off := math.Abs(got - n*p.share); off > 5*math.Sqrt(n*p.share*(1-p.share)) {
		return fmt.Errorf("%s got %.0f of %d", p.favorite, got, n)
	}
	return nil
}

// begin opens a flow and learns its backend.
func (f *traffic) begin(ctx context.Context, p *probe) error {
	conn, err := f.node.Dial(ctx, p.from, p.protocol, p.to[0])
	if err != nil {
		return err
	}
	f.flows[p.flow] = &flow{conn, p.protocol}
	if p.protocol == model.UDP {
		return f.again(p)
	}
	return f.flows[p.flow].answer(p) // the first line comes unasked
}

// again sends something over a flow. An ICMP error or a reset may be the answer.
func (f *traffic) again(p *probe) error {
	flow := f.flows[p.flow]
	if flow == nil {
		return errors.New("there is no such flow")
	}
	_, err := flow.Write([]byte("?\n"))
	if err != nil && !errors.Is(err, unix.EPERM) { // which a dropped datagram of the node itself gets
		return fmt.Errorf("write: %w", err)
	}
	return flow.answer(p)
}

// answer reads one line and compares it with what is expected.
func (f *flow) answer(p *probe) error {
	if err := f.SetReadDeadline(time.Now().Add(p.timeout())); err != nil {
		return err
	}
	line := make([]byte, 128)
	n, err := f.Read(line)
	var timeout net.Error
	switch {
	case errors.As(err, &timeout) && timeout.Timeout() && p.result == testbed.TimedOut:
		return nil
	case errors.Is(err, unix.ECONNREFUSED) && p.result == testbed.Refused:
		return nil
	case err != nil:
		return err
	}
	if backend, _, _ := strings.Cut(string(line[:n]), " "); !p.answers(backend) {
		return fmt.Errorf("%s answers", backend)
	}
	return nil
}

func (f *traffic) close() {
	for _, flow := range f.flows {
		flow.Close()
	}
}
