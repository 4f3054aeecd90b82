package migrate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

const (
	dialTimeout = 2 * time.Second
	silence     = time.Second // by then a datagram is refused, if it is
	maxDials    = 64          // at once
	maxProbed   = 1000        // addresses
	probeTries  = 3
	// Failures have risen if there are more than fewFailures, and their share is larger by more than that.
	fewFailures = 2
	riseOfShare = 0.02
)

// sample is how connections fare on this node.
type sample struct {
	answers       []string // addresses that answer, or do not refuse a datagram
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

// addresses are those of TCP and UDP that rows forward: of too many a part, by chance. NodePorts are on the primary
// addresses, where each mode has them.
func (m *migration) addresses(ctx context.Context) (all []string, err error) {
	state, err := m.rows(ctx)
	if err != nil {
		return nil, fmt.Errorf("find the addresses to probe: %w", err)
	}
	for k, f := range state.Frontends {
		if f.Verdict == model.Forward && k.Protocol != model.SCTP && len(all) < maxProbed {
			all = append(all, k.AddrPort().String()+"/"+k.Protocol.String())
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// rows are those of a running Fairlead, or else by the configuration of kube-proxy.
func (m *migration) rows(ctx context.Context) (*model.State, error) {
	if m.seen.Proxy == "Fairlead" {
		text, err := m.Text(ctx, "/dump")
		if err != nil {
			return nil, err
		}
		return model.ParseState(string(text))
	}
	if len(m.seen.services) == 0 { // or the API server gives none
		return model.NewState(), nil
	}
	c, err := m.rowsConfig()
	if err == nil && len(c.KubeProxy.NodePortAddresses) == 0 {
		c.KubeProxy.NodePortAddresses = []string{"primary"}
	}
	if err != nil {
		return nil, err
	}
	rows, err := daemon.OpenRows(c, daemon.NewLogs(io.Discard))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	b, err := rows.Next(ctx)
	state, _, _ := rows.Table.Update(b)
	return state, err
}

// probe finds those of the addresses that answer.
func probe(ctx context.Context, addresses []string) []string {
	var group errgroup.Group
	group.SetLimit(maxDials)
	answers := make([]string, len(addresses))
	for i, address := range addresses {
		group.Go(func() error {
			for try := 0; try < probeTries && answers[i] == ""; try++ {
				if reach(ctx, address) == nil {
					answers[i] = address
				}
			}
			return nil
		})
	}
	_ = group.Wait()
	return slices.DeleteFunc(answers, func(address string) bool { return address == "" })
}

// reach connects, or sends an empty datagram. That no datagram comes back says nothing, and is no error.
func reach(ctx context.Context, address string) error {
	at, protocol, _ := strings.Cut(address, "/")
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, protocol, at)
	if err != nil {
		return err
	}
	defer conn.Close()
	if protocol == "udp" {
		_ = conn.SetDeadline(time.Now().Add(silence))
		if _, err = conn.Write(nil); err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
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
