package migrate

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
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
	answers       map[string]bool // by address, of those that answer
	begun, failed int             // TCP connections that the kernel has tracked
}

func (s sample) share() float64 { return float64(s.failed) / float64(max(s.begun, 1)) }

// measure connects to addresses, and counts the connections of all clients for a time.
func (m *migration) measure(ctx context.Context, addresses []string) (all sample, err error) {
	all.answers = probe(ctx, addresses)
	if all.begun, all.failed, err = count(ctx, m.check); err != nil {
		return all, err
	}
	return all, m.say("checked", fmt.Sprintf("%d of %d addresses answer; %d of %s failed in %s",
		len(all.answers), len(addresses), all.failed, said.Count(all.begun, "connection"), m.check))
}

// compare fails if connections fare worse than before.
func (m *migration) compare(ctx context.Context, before sample) error {
	after, err := m.measure(ctx, slices.Collect(maps.Keys(before.answers)))
	if err != nil {
		return err
	}
	silent := slices.Sorted(maps.Keys(before.answers))
	silent = slices.DeleteFunc(silent, func(address string) bool { return after.answers[address] })
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

// before measures the addresses that answer until now.
func (m *migration) before(ctx context.Context, s *seen) (sample, error) {
	addresses, err := m.addresses(ctx, s)
	if err != nil {
		return sample{}, err
	}
	return m.measure(ctx, addresses)
}

// addresses are those with ports of TCP: by the rows of a running Fairlead, or else the ClusterIPs.
func (m *migration) addresses(ctx context.Context, s *seen) (all []string, err error) {
	if s.Proxy == "Fairlead" {
		var rows []byte
		rows, err = m.Text(ctx, "/dump")
		for line := range strings.Lines(string(rows)) {
			f := strings.Fields(line)
			if len(f) > 3 && f[0] == "frontend" && f[3] == "forward" && strings.HasSuffix(f[1], "/tcp") {
				all = append(all, strings.TrimSuffix(f[1], "/tcp"))
			}
		}
	}
	for _, o := range s.services {
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
func probe(ctx context.Context, addresses []string) map[string]bool {
	var lock sync.Mutex
	var group errgroup.Group
	group.SetLimit(maxDials)
	answers := map[string]bool{}
	for _, address := range addresses {
		group.Go(func() error {
			for range probeTries {
				conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", address)
				if err != nil {
					continue
				}
				lock.Lock()
				defer lock.Unlock()
				answers[address] = true
				return conn.Close()
			}
			return nil
		})
	}
	_ = group.Wait()
	return answers
}

// count watches connections of TCP begin for a time, and tells how many of them have failed. The kernel forgets a
// connection that is refused at once, and keeps an unanswered one for two minutes.
func count(ctx context.Context, during time.Duration) (begun, failed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	begins, err := follow(ctx, tracked.Begun)
	if err != nil {
		return 0, 0, err
	}
	ends, err := follow(ctx, tracked.Ended)
	if err != nil {
		return 0, 0, err
	}
	at := map[tracked.Tuple]time.Time{}
	for ctx.Err() == nil {
		select {
		case all := <-begins:
			for i := range all {
				if all[i].Protocol == model.TCP && len(at) < 4*maxWaiting {
					at[tupleOf(&all[i])] = time.Now()
				}
			}
		case all := <-ends:
			for i := range all {
				if _, ours := at[tupleOf(&all[i])]; ours && all[i].Status&tracked.Assured == 0 {
					failed++
				}
			}
		case <-ctx.Done():
		}
	}
	old := time.Now().Add(-time.Second) // until then an answer may be under way
	conn, err := nfnetlink.Dial()
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	silent, err := tracked.List(conn, func(f *tracked.Flow) bool {
		t, ours := at[tupleOf(f)]
		return ours && f.Attempt() && t.Before(old)
	}, tracked.Filter{Protocol: model.TCP})
	if err != nil {
		return 0, 0, err
	}
	return len(at), failed + len(silent), nil
}

func tupleOf(f *tracked.Flow) tracked.Tuple {
	return tracked.Tuple{Protocol: f.Protocol, From: f.From, To: f.To}
}
