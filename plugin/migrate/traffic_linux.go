package migrate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

const (
	dialTimeout = 2 * time.Second
	maxDials    = 64   // at once
	maxProbed   = 1000 // addresses
	probeTries  = 3
	// Failures have risen if there are more than fewFailures, and their share is larger by more than that.
	fewFailures = 2
	riseOfShare = 0.02
)

// sample is how connections fare on this node.
type sample struct {
	answers       []string // addresses that answer
	begun, failed int      // TCP connections that the kernel has tracked
}

func (s sample) share() float64 { return float64(s.failed) / float64(max(s.begun, 1)) }

// measure connects to addresses, and counts the connections of all clients for a time.
func (m *migration) measure(ctx context.Context, addresses []string) (all sample, err error) {
	all.answers = probe(ctx, addresses)
	if err := all.count(ctx, m.check); err != nil {
		return all, err
	}
	return all, m.say("checked", fmt.Sprintf("%d of %d addresses answer; %d of %s failed in %s",
		len(all.answers), len(addresses), all.failed, said.Count(all.begun, "connection"), m.check))
}

// compare fails if connections fare worse than before.
func (m *migration) compare(ctx context.Context, before sample) error {
	after, err := m.measure(ctx, before.answers)
	if err != nil {
		return err
	}
	silent := slices.Clone(before.answers)
	silent = slices.DeleteFunc(silent, func(address string) bool { return slices.Contains(after.answers, address) })
	switch {
	case len(silent) > 0:
		return fmt.Errorf("%d of %d addresses answered before, and not now: %s", len(silent), len(before.answers),
			said.List(silent))
	case after.failed > fewFailures && after.share() > before.share()+riseOfShare:
		return fmt.Errorf("more connections fail than before: %d of %d, and %d of %d before", after.failed, after.begun,
			before.failed, before.begun)
	}
	return nil
}

// addresses are those with ports of TCP: by the rows of a running Fairlead, or else the ClusterIPs.
func (m *migration) addresses(ctx context.Context) (all []string, err error) {
	if m.seen.Proxy == "Fairlead" {
		var rows []byte
		rows, err = m.Text(ctx, "/dump")
		for line := range strings.Lines(string(rows)) {
			f := strings.Fields(line)
			if len(f) > 3 && f[0] == "frontend" && f[3] == "forward" && strings.HasSuffix(f[1], "/tcp") {
				all = append(all, strings.TrimSuffix(f[1], "/tcp"))
			}
		}
	}
	for _, o := range m.seen.services {
		for _, p := range o.Spec.Ports {
			for _, a := range o.Spec.ClusterIPs {
				if a != corev1.ClusterIPNone && (p.Protocol == corev1.ProtocolTCP || p.Protocol == "") {
					all = append(all, net.JoinHostPort(a, fmt.Sprint(p.Port)))
				}
			}
		}
	}
	slices.Sort(all)
	all = slices.Compact(all)
	return all[:min(len(all), maxProbed)], err
}

// probe finds those of the addresses that answer.
func probe(ctx context.Context, addresses []string) []string {
	var group errgroup.Group
	group.SetLimit(maxDials)
	answers := make([]string, len(addresses))
	for i, address := range addresses {
		group.Go(func() error {
			for range probeTries {
				conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", address)
				if err == nil {
					answers[i] = address
					return conn.Close()
				}
			}
			return nil
		})
	}
	_ = group.Wait()
	return slices.DeleteFunc(answers, func(address string) bool { return address == "" })
}

// count watches connections of TCP begin for a time, and tells how many of them have failed. The kernel forgets a
// connection that is refused at once, and keeps an unanswered one for two minutes.
func (s *sample) count(ctx context.Context, during time.Duration) error {
	begins, err := tracked.NewWatch(tracked.Begun)
	if err != nil {
		return err
	}
	defer begins.Close()
	ends, err := tracked.NewWatch(tracked.Ended)
	if err != nil {
		return err
	}
	defer ends.Close()
	at := map[tracked.Tuple]time.Time{}
	for until := time.Now().Add(during); time.Now().Before(until); {
		var bad []tracked.Tuple // they are heard of first: then their beginnings are known
		err := hear(ends, func(f *tracked.Flow) {
			if f.Status&tracked.Assured == 0 {
				bad = append(bad, tupleOf(f))
			}
		})
		err = errors.Join(err, ctx.Err(), hear(begins, func(f *tracked.Flow) {
			if f.Protocol == model.TCP && len(at) < 4*maxWaiting {
				at[tupleOf(f)] = time.Now()
			}
		}))
		if err != nil {
			return err
		}
		for _, t := range bad {
			if _, ours := at[t]; ours {
				s.failed++
			}
		}
	}
	old := time.Now().Add(-time.Second) // until then an answer may be under way
	conn, err := nfnetlink.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	silent, err := tracked.List(conn, func(f *tracked.Flow) bool {
		t, ours := at[tupleOf(f)]
		return ours && f.Attempt() && t.Before(old)
	}, tracked.Filter{Protocol: model.TCP})
	s.begun, s.failed = len(at), s.failed+len(silent)
	return err
}

func tupleOf(f *tracked.Flow) tracked.Tuple {
	return tracked.Tuple{Protocol: f.Protocol, From: f.From, To: f.To}
}
