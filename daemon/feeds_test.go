package daemon

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

// late is a source whose first batch comes when it is told to.
type late struct{ batches chan service.Batch }

func (s late) Next(ctx context.Context) (service.Batch, error) {
	select {
	case b := <-s.batches:
		return b, nil
	case <-ctx.Done():
		return service.Batch{}, ctx.Err()
	}
}

func (late) Close() error { return nil }

func TestPrimed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := late{make(chan service.Batch, 2)}
		s.batches <- service.Batch{Node: &service.Node{Name: "first"}}
		p, err := primed(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		s.batches <- service.Batch{Node: &service.Node{Name: "second"}}
		for _, want := range []string{"first", "second"} {
			if b, err := p.Next(t.Context()); err != nil || b.Node.Name != want {
				t.Errorf("%+v %v, want %s", b.Node, err, want)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := p.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if _, err := primed(ctx, s); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}

// closable is a late source that says which one was closed.
type closable struct {
	late
	name   string
	closed *[]string
}

func (c closable) Close() error {
	*c.closed = append(*c.closed, c.name)
	return nil
}

func TestFeeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var closed, used []string
		f := feeds{log: slog.New(slog.DiscardHandler), onChange: func(f *feed) { used = append(used, f.settings.node) }}
		begin := func(name string) closable {
			return closable{late{make(chan service.Batch, 1)}, name, &closed}
		}
		of := func(s closable) *feed {
			return &feed{settings: feedSettings{node: s.name}, source: s, events: silence{}}
		}
		expect := func(when, wanted string, inUse, ended []string) {
			t.Helper()
			if got := f.wanted().node; got != wanted || !slices.Equal(used, inUse) || !slices.Equal(closed, ended) {
				t.Errorf("%s: wanted is %s, used were %q, closed %q", when, got, used, closed)
			}
		}
		arrive := func(s closable, adopted error) {
			t.Helper()
			f.await(t.Context(), of(s))
			s.batches <- service.Batch{Node: &service.Node{Name: s.name}}
			f.settle(<-f.arrives(), func(got source.Source) error {
				if b, err := got.Next(t.Context()); err != nil || b.Node.Name != s.name {
					t.Errorf("%+v %v", b, err)
				}
				return adopted
			})
		}
		f.use(of(begin("a")))
		if f.arrives() != nil {
			t.Error("nothing is awaited")
		}
		f.abandon()
		expect("at first", "a", []string{"a"}, nil)
		f.await(t.Context(), of(begin("b")))
		expect("b is awaited", "b", []string{"a"}, nil)
		f.abandon()
		expect("b is abandoned", "a", []string{"a"}, []string{"b"})
		arrive(begin("c"), errors.New("no"))
		expect("c cannot be adopted", "a", []string{"a"}, []string{"b", "c"})
		arrive(begin("d"), nil)
		expect("d is adopted", "d", []string{"a", "d"}, []string{"b", "c", "a"})

		ctx, cancel := context.WithCancel(t.Context())
		f.await(ctx, of(begin("e")))
		cancel()
		f.settle(<-f.arrives(), func(source.Source) error {
			t.Error("it has not delivered")
			return nil
		})
		expect("e has failed", "d", []string{"a", "d"}, []string{"b", "c", "a", "e"})
	})
}
