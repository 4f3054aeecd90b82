package source

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/service"
)

// script is a Source that delivers what a test puts into its channel.
type script struct {
	batches chan service.Batch
	err     chan error
	closed  atomic.Bool
}

func newScript() *script {
	return &script{batches: make(chan service.Batch, 8), err: make(chan error, 1)}
}

func (s *script) Next(ctx context.Context) (service.Batch, error) {
	select {
	case b := <-s.batches:
		return b, nil
	case err := <-s.err:
		return service.Batch{}, err
	case <-ctx.Done():
		return service.Batch{}, ctx.Err()
	}
}

func (s *script) Close() error { s.closed.Store(true); return nil }

func services(names ...string) service.Batch {
	b := service.Batch{}
	for _, n := range names {
		name := service.Name{Namespace: "default", Name: n}
		b.Services.Set(name, &service.Service{Name: name})
	}
	return b
}

func TestMerge_firstBatchWaitsForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newScript(), newScript()
		m := Merge(a, b)
		defer m.Close()
		a.batches <- services("one")
		a.batches <- services("two")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if got, err := m.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Next returned %v, %v before the second source had spoken", got, err)
		}
		b.batches <- service.Batch{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
		got, err := m.Next(t.Context())
		if err != nil || len(got.Services) != 2 || len(got.Addrs) != 1 {
			t.Fatalf("Next = %v, %v; want both services and the address", got, err)
		}
	})
}

func TestMerge_deadlineLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newScript()
		m := Merge(a)
		defer m.Close()
		a.batches <- services()
		if _, err := m.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		seen := map[service.Name]bool{}
		for i := range 50 {
			// The batch arrives at the very moment at which the reader gives up.
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			time.AfterFunc(time.Second, func() { a.batches <- services(string(rune('a' + i))) })
			b, err := m.Next(ctx)
			cancel()
			if err != nil {
				b, err = m.Next(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			for n := range b.Services.All() {
				seen[n] = true
			}
		}
		if len(seen) != 50 {
			t.Fatalf("%d of 50 services arrived", len(seen))
		}
	})
}

func TestMerge_latestWordWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newScript()
		m := Merge(a)
		defer m.Close()
		name := service.Name{Namespace: "default", Name: "web"}
		a.batches <- services("web")
		a.batches <- service.Batch{Services: service.One[service.Service](name, nil)}
		synctest.Wait()
		all := map[service.Name]*service.Service{}
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			b, _ := m.Next(ctx)
			cancel()
			for n, s := range b.Services.All() {
				all[n] = s
			}
		}
		if s, ok := all[name]; !ok || s != nil {
			t.Fatalf("web is %v, %v; want it deleted", s, ok)
		}
	})
}

// A problem that is over before its Batch was taken is not told.
func TestAdd_mended(t *testing.T) {
	var all service.Batch
	for _, b := range []service.Batch{
		{Problems: []service.Problem{{Object: "a", Reason: "1"}, {Object: "b", Reason: "2"}}},
		{Resolved: []string{"a"}, Problems: []service.Problem{{Object: "c", Reason: "3"}}},
	} {
		Add(&all, b)
	}
	if got := fmt.Sprint(all.Resolved, all.Problems); got != "[a] [b: 2 c: 3]" {
		t.Error(got)
	}
}

// A tenant whose objects are all wrong corrects them all at once. With a search for each among all this would take minutes.
func TestAdd_manyMended(t *testing.T) {
	const objects, patience = 200_000, 20 * time.Second
	var wrong, mended service.Batch
	for i := range objects {
		name := fmt.Sprintf("Service evil/s-%06d", i)
		wrong.Problems = append(wrong.Problems, service.Problem{Object: name, Reason: "bad"})
		mended.Resolved = append(mended.Resolved, name)
	}
	began := time.Now()
	var all service.Batch
	for _, b := range []service.Batch{wrong, mended, wrong, mended} {
		Add(&all, b)
	}
	if len(all.Problems) > 0 || !slices.Equal(all.Resolved, mended.Resolved) {
		t.Errorf("%d problems, and %d of %d resolved", len(all.Problems), len(all.Resolved), objects)
	}
	if took := time.Since(began); took > patience {
		t.Errorf("it took %s", took)
	}
}

func TestMerge_errorAndClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newScript(), newScript()
		m := Merge(a, b)
		broken := errors.New("broken")
		b.err <- broken
		for range 2 {
			if _, err := m.Next(t.Context()); !errors.Is(err, broken) {
				t.Fatalf("Next = %v, want the error of the second source, each time", err)
			}
		}
		if err := m.Close(); err != nil || !a.closed.Load() || !b.closed.Load() {
			t.Fatalf("Close = %v; every source must be closed", err)
		}
	}) // synctest fails if a goroutine is left
}
