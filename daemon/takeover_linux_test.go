package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/source/kube"
)

// told are Events, as they come.
type told chan kube.Event

func (c told) Emit(e kube.Event) { c <- e }
func (told) Close()              {}

// succession is a successor on a node of its own that looks all the time.
type succession struct {
	*testing.T
	bed      *testbed.Bed
	events   told
	returned chan struct{}
	unwanted atomic.Bool // by the mode, that FORWARD accepts
	closed   atomic.Bool // as the metric says
	*successor
}

func newSuccession(t *testing.T) *succession {
	t.Helper()
	bed := testbed.Need(t, testbed.Spec{})
	s := &succession{T: t, bed: bed, events: make(told, 100), returned: make(chan struct{}, 1000)}
	err := bed.Do(testbed.Node, func() (err error) {
		s.successor, err = newSuccessor(successorConfig{
			log: slog.New(slog.NewTextHandler(t.Output(), nil)), report: newReporter(s.events),
			returned: func() { s.returned <- struct{}{} },
			accepted: func() bool { return !s.unwanted.Load() }, closed: s.closed.Store,
		})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	s.interval = time.Millisecond
	t.Cleanup(func() { _ = s.takeover.Close() })
	return s
}

// begin looks until what it returns is called.
func (s *succession) begin() (end func()) {
	ctx, cancel := context.WithCancel(s.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		var both sync.WaitGroup
		both.Go(func() { s.succeed(ctx) })
		both.Go(func() { s.watchForward(ctx) })
		both.Wait()
	}()
	return func() {
		cancel()
		<-done
	}
}

func (s *succession) run(input string, command ...string) string {
	s.Helper()
	c := s.bed.Command(s.Context(), testbed.Node, command[0], command[1:]...)
	c.Stdin = strings.NewReader(input)
	out, err := c.CombinedOutput()
	if err != nil {
		s.Fatalf("%q: %v: %s", command, err, out)
	}
	return string(out)
}

// expect waits for an Event.
func (s *succession) expect(reason, text string) {
	s.Helper()
	e := eventually.Receive(s, fmt.Sprintf("an Event %s with %q", reason, text), s.events)
	if e.Reason != reason || !strings.Contains(e.Message, text) || e.Object != "" {
		s.Fatalf("%+v, should be %s with %q", e, reason, text)
	}
}

// gone waits until kube-proxy has been noticed, and what it had made is gone.
func (s *succession) gone(command ...string) {
	s.Helper()
	eventually.Receive(s, "kube-proxy is back", s.returned)
	eventually.Nil(s, "what kube-proxy made is gone", func() error {
		got := s.run("", command...)
		if strings.Contains(got, "kube-proxy") || strings.Contains(got, "KUBE-SERVICES") {
			return fmt.Errorf("there still is\n%s", got)
		}
		return nil
	})
}

// measures waits until the metric says whether FORWARD is closed.
func (s *succession) measures(closed bool) {
	s.Helper()
	eventually.Equal(s, "FORWARD is closed", closed, s.closed.Load)
}

const (
	tablesOfKubeProxy = "table ip kube-proxy {}\ntable ip6 kube-proxy {}\n"
	// The rules that stay come first: another program may look between the two tables.
	chainsOfKubeProxy = `*filter
:FORWARD DROP [0:0]
:KUBE-FORWARD - [0:0]
-A FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
COMMIT
*nat
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
COMMIT
`
)

func TestSuccessor(t *testing.T) {
	t.Parallel()
	s := newSuccession(t)
	s.run(tablesOfKubeProxy, "nft", "-f", "-")
	end := s.begin()
	s.expect(reasonTakenOver, "1 table (nftables ip kube-proxy), 1 table (nftables ip6 kube-proxy)")

	s.run(tablesOfKubeProxy, "nft", "-f", "-")
	s.expect(reasonReturned, "(nftables ip")
	s.gone("nft", "list", "tables")
	s.run(tablesOfKubeProxy, "nft", "-f", "-") // it is known
	s.gone("nft", "list", "tables")
	end()
	s.run(tablesOfKubeProxy, "nft", "-f", "-")
	if got := s.run("", "nft", "list", "tables"); !strings.Contains(got, "kube-proxy") {
		t.Errorf("nobody should have removed what there was, but there is\n%s", got)
	}
	for len(s.returned) > 0 {
		<-s.returned
	}

	end = s.begin() // wanted again: kube-proxy has not been back, but left alone
	s.expect(reasonTakenOver, "nftables")
	for _, backend := range []string{"legacy", "nft"} {
		s.run(chainsOfKubeProxy, "/usr/sbin/xtables-"+backend+"-multi", "iptables-restore", "--noflush")
		if backend == "legacy" {
			s.expect(reasonStays, "1 chain KUBE-FORWARD (iptables-legacy ip filter): without it, chain FORWARD would drop packets of Services")
			s.expect(reasonReturned, "1 chain (iptables-legacy ip nat)")
		} else {
			s.expect(reasonStays, "1 chain KUBE-FORWARD (iptables-nft ip filter): without it, chain FORWARD would drop packets of Services")
		}
		s.gone("/usr/sbin/xtables-"+backend+"-multi", "iptables", "-t", "nat", "-S")
	}
	// A firewall that begins anew cuts off what has stayed.
	s.run("", "iptables-nft", "-F", "FORWARD")
	s.expect(reasonBlocked, "chain FORWARD (iptables-nft ip) drops packets of Services")
	end()
	if len(s.events) > 0 {
		t.Errorf("there are Events nobody needs: %+v", <-s.events)
	}
}

// TestSuccessor_forward is a node where kube-proxy has never been since it started. A firewall comes
// later than Fairlead, and begins anew.
func TestSuccessor_forward(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ tool, where string }{
		{"ip6tables-nft", "(iptables-nft ip6)"},
		{"iptables-legacy", "(iptables-legacy ip)"},
	} {
		t.Run(c.tool, func(t *testing.T) {
			t.Parallel()
			s := newSuccession(t)
			policy := func(p string) { s.run("", c.tool, "-P", "FORWARD", p) }
			end := s.begin()
			for range 2 {
				policy("DROP")
				s.expect(reasonBlocked, c.where)
				s.measures(true)
				policy("ACCEPT")
				s.expect(reasonUnblocked, "")
				s.measures(false)
			}
			end()
			if len(s.events) > 0 {
				t.Errorf("said twice: %+v", <-s.events)
			}
			s.reminder = time.Nanosecond
			policy("DROP")
			end = s.begin()
			s.expect(reasonBlocked, c.where)
			s.expect(reasonBlocked, c.where)
			s.unwanted.Store(true) // the mode is another now
			s.measures(false)
			end()
		})
	}
}
