package conformance

import (
	"context"
	"maps"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/model"
)

// lies are what a plane may do instead of what it is told.
func lies() map[string]func(s *model.State) {
	return map[string]func(s *model.State){
		"masquerades nobody": func(s *model.State) {
			eachFrontend(s, func(_ model.Key, f *model.Frontend) { f.SNAT = model.Never })
		},
		"admits everybody": func(s *model.State) {
			eachFrontend(s, func(_ model.Key, f *model.Frontend) { f.Allow = nil })
		},
		"drops instead of refusing": func(s *model.State) {
			eachFrontend(s, func(_ model.Key, f *model.Frontend) {
				if f.Verdict == model.Reject {
					f.Verdict = model.Drop
				}
			})
		},
		"knows no scopes": func(s *model.State) {
			maps.DeleteFunc(s.Frontends, func(k model.Key, _ model.Frontend) bool { return k.Scope == model.Internal })
		},
		"has no guards": func(s *model.State) { clear(s.Guards) },
		"uses draining backends": func(s *model.State) {
			for id, p := range s.Pools {
				backends := make([]model.Backend, len(p.Backends))
				for i, b := range p.Backends {
					backends[i] = model.Backend{Addr: b.Addr, Port: b.Port, Local: b.Local, Weight: 1}
				}
				p.Backends = backends
				s.Pools[id] = p
			}
		},
	}
}

// TestRandom_notices proves that packets show when a plane does something else than the model says.
func TestRandom_notices(t *testing.T) {
	for name, lie := range lies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			made, err := NewBed(t.Context(), false)
			if err != nil {
				t.Fatal(err)
			}
			defer made.Close()
			notices(t, kernel{at: bed{made}, new: lying(nftables.New, lie)})
		})
	}
}

// notices wants one of many random runs to fail.
func notices(t *testing.T, k kernel) {
	for seed := uint64(1); seed < 200; seed++ {
		if err := newRandomRun(seed, k).run(t.Context()); err != nil {
			t.Logf("seed %d: %v", seed, err)
			return
		}
	}
	t.Error("nobody noticed")
}

func eachFrontend(s *model.State, change func(model.Key, *model.Frontend)) {
	for k, f := range s.Frontends {
		change(k, &f)
		s.Frontends[k] = f
	}
}

// liar is a plane that programs another State than it is told, and denies it.
type liar struct {
	dataplane.Dataplane
	lie func(*model.State)
}

func lying(honest dataplane.New, lie func(*model.State)) dataplane.New {
	return func(c dataplane.Config) (dataplane.Dataplane, error) {
		p, err := honest(c)
		return liar{p, lie}, err
	}
}

func (l liar) twist(s *model.State) *model.State {
	s = s.Clone()
	l.lie(s)
	used := map[model.PoolID]bool{}
	for _, f := range s.Frontends {
		used[f.Pool] = true
	}
	maps.DeleteFunc(s.Pools, func(id model.PoolID, _ model.Pool) bool { return !used[id] })
	return s
}

func (l liar) Sync(ctx context.Context, s *model.State) error {
	return l.Dataplane.Sync(ctx, l.twist(s))
}

func (l liar) Apply(ctx context.Context, s *model.State, _ model.Change) error { return l.Sync(ctx, s) }

func (l liar) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return l.Sync(ctx, s)
}

func (l liar) Audit(ctx context.Context, s *model.State, d dataplane.Depth) (dataplane.Report, error) {
	return l.Dataplane.Audit(ctx, l.twist(s), d)
}
