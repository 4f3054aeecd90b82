package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// RunFaults lets the first kernel operation of a short run fail, in another run the second one, and so on until no
// operation is left. Of these runs a third is drawn. The next Sync repairs the consequences. An untouched Service
// answers all the while.
func RunFaults(t *testing.T, new dataplane.New) { runFaults(t, onBeds(new), testbed.Spec{}, 3) }

// RunFaultsRedirected is for a plane whose rules lead packets to ports of its process. Between two processes clients are
// refused, so the Service answers from the first Sync on.
func RunFaultsRedirected(t *testing.T, new dataplane.New) {
	runFaults(t, onBeds(new), testbed.Spec{}, 3, func(s *sweep) { s.absent = true })
}

// RunFaultsSockets is to RunFaults what RunSockets is to Run.
func RunFaultsSockets(t *testing.T, new dataplane.New) {
	runFaults(t, onBeds(new), testbed.Spec{Cgroup: true}, 3)
}

func runFaults(t *testing.T, on ground, spec testbed.Spec, parts int, options ...func(*sweep)) {
	node, new, err := on(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	failed := ""
	first, step := sample.Every(t, parts)
	for k := first; k == first || failed != ""; k += step {
		failed = ""
		left := k + 1
		s := sweep{kernel: kernel{at: node, new: new, log: logger(t)}}
		for _, option := range options {
			option(&s)
		}
		s.fault = func(operation string) error {
			if !s.armed {
				return nil
			}
			if left--; left != 0 {
				return nil
			}
			failed = operation
			return fmt.Errorf("%s: %w", operation, errInjected)
		}
		if err := s.run(t.Context()); err != nil {
			t.Fatalf("operation %d (%s) failed: %v", k+1, failed, err)
		}
		if k == first && failed == "" {
			t.Fatal("the plane never asks Config.Fault")
		}
		t.Logf("%d: %s", k+1, failed)
	}
}

// sweep is one run of the fault test.
type sweep struct {
	kernel
	armed  bool // operations count, and one fails
	synced bool // by the plane that came with the restart
	absent bool // the Service does not answer before the first Sync of a process
}

// steady is a Service that no change of the run touches.
func (*sweep) steady() netip.AddrPort { return netip.MustParseAddrPort("10.96.0.10:80") }

const steadyRows = `
frontend 10.96.0.10:80/tcp any forward default/steady cluster snat offcluster
pool default/steady cluster
backend default/steady cluster 10.244.1.11:8080 local
pods 10.244.0.0/16
guard 10.96.0.0/16 drop
`

// sweepStates are what the run goes through: every kind of row comes, changes and goes.
func sweepStates() []string {
	return []string{"", `
frontend 10.96.0.11:80/tcp any forward default/web:http cluster snat offcluster
frontend 192.0.2.1:30080/tcp any forward default/web:http local snat never
frontend 192.0.2.1:30080/tcp internal forward default/web:http cluster snat offcluster
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat always allow 192.0.2.8/29
frontend 10.96.0.11:53/udp any forward default/web:dns cluster snat offcluster
pool default/web:http cluster affinity 10m0s
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster 10.244.2.13:8080
pool default/web:http local
backend default/web:http local 10.244.1.11:8080 local
pool default/web:dns cluster
backend default/web:dns cluster 10.244.1.12:5353 local
guard 10.96.0.11/32 reject
`, `
frontend 10.96.0.11:80/tcp any forward default/web:http cluster snat always
frontend 192.0.2.1:30080/tcp any drop default/web:http
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat always allow 192.0.2.9/32,198.51.100.0/24
frontend 10.96.0.11:53/udp any forward default/web:dns cluster snat offcluster
pool default/web:http cluster
backend default/web:http cluster 10.244.1.11:8080 local weight 0
backend default/web:http cluster 10.244.2.13:8080
backend default/web:http cluster 10.244.2.14:8080 weight 3
pool default/web:dns cluster
backend default/web:dns cluster 10.244.2.13:5353
guard 10.96.0.11/32 reject
guard 10.96.7.0/24 reject
`, `
frontend 10.96.0.11:80/tcp any reject default/web:http
guard 10.96.0.11/32 reject
`, ""}
}

// run installs the steady Service, and puts a plane whose calls fail in the place of the one that did.
func (s *sweep) run(ctx context.Context) error {
	first, err := model.ParseState(steadyRows)
	if err != nil {
		return err
	}
	if err := errors.Join(s.start(), s.sync(ctx, first)); err != nil {
		return err
	}
	s.armed = true
	if err := s.restart(); err != nil {
		return err
	}
	states := sweepStates()
	if s.absent {
		if err := s.reach(ctx, states[0]); err != nil {
			return err
		}
	}
	if err := s.watch(ctx, func(ctx context.Context) error { return s.changes(ctx, states) }); err != nil {
		return err
	}
	if err := s.plane.Remove(ctx); err != nil && !errors.Is(err, errInjected) {
		return err
	}
	s.armed = false
	return s.stop(ctx) // Remove is idempotent, too
}

// changes goes through the States.
func (s *sweep) changes(ctx context.Context, states []string) error {
	for i, rows := range states {
		if err := s.reach(ctx, rows); err != nil {
			return fmt.Errorf("at State %d: %w", i, err)
		}
	}
	return nil
}

// reach brings the kernel to a State. After an error it calls Sync, as the engine does.
func (s *sweep) reach(ctx context.Context, rows string) error {
	next, err := model.ParseState(steadyRows + rows)
	if err != nil {
		return err
	}
	if s.synced {
		err = s.apply(ctx, next, model.Diff(s.state, next))
	} else {
		err = s.sync(ctx, next)
	}
	if errors.Is(err, errInjected) {
		err = s.sync(ctx, next)
	}
	s.synced = err == nil
	if err == nil {
		err = s.audit(ctx, dataplane.Quick)
	}
	if errors.Is(err, errInjected) { // Audit lists
		err = s.audit(ctx, dataplane.Quick)
	}
	return err
}

// watch connects to the steady Service again and again while f runs.
func (s *sweep) watch(ctx context.Context, f func(context.Context) error) error {
	group, ctx := errgroup.WithContext(ctx)
	done := make(chan struct{})
	group.Go(func() error {
		defer close(done)
		return f(ctx)
	})
	group.Go(func() error {
		for {
			o, err := s.at.Probe(ctx, testbed.Probe{From: "client", To: s.steady(), Timeout: patience})
			if err == nil && o.Result != testbed.Answered {
				err = errors.New(o.String())
			}
			if err != nil {
				return fmt.Errorf("the untouched Service: %w", err)
			}
			select {
			case <-done:
				return nil
			case <-time.After(time.Millisecond): //nolint:forbidigo // the pace of a client
			}
		}
	})
	return group.Wait()
}
