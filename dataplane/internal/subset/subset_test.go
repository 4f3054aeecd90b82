package subset_test

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/dataplane/internal/subset"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

// met keeps the rows that a process of the node meets: those of scope Internal, and of Any where there is none.
func met(s *model.State, key model.Key, f model.Frontend) (model.Frontend, bool) {
	internal := key
	internal.Scope = model.Internal
	_, hidden := s.Frontends[internal]
	return f, key.Scope == model.Internal || !hidden
}

// without keeps no row that forwards to a port, and rejects another one.
func without(_ *model.State, key model.Key, f model.Frontend) (model.Frontend, bool) {
	if key.Port == 2 {
		return model.Frontend{Service: f.Service, Verdict: model.Reject}, true
	}
	return f, key.Port != 1 || f.Verdict != model.Forward
}

// Any chain of changes leads the part where Of does, and changes nothing that is as it should be.
func TestSubset_randomChanges(t *testing.T) {
	random := rand.New(rand.NewPCG(sample.Seed(t), 0))
	for name, row := range map[string]subset.Row{"met": met, "without": without} {
		for range 200 {
			from := model.NewState()
			part := subset.Of(from, row)
			for range 10 {
				to := randomState(random)
				before := part.Clone()
				change := part.Change(to, model.Diff(from, to))
				if got, want := part.String(), subset.Of(to, row).String(); got != want {
					t.Fatalf("%s: Change leads to\n%sOf makes\n%s", name, got, want)
				}
				after := before.Clone()
				after.Apply(change)
				if got, want := after.String(), part.String(); got != want {
					t.Fatalf("%s: the change leads to\n%sthe part is\n%s", name, got, want)
				}
				least := model.Diff(before, part.State)
				if len(change.Frontends.Set) != len(least.Frontends.Set) || len(change.Pools.Set) != len(least.Pools.Set) ||
					len(change.Frontends.Delete) != len(least.Frontends.Delete) ||
					len(change.Pools.Delete) != len(least.Pools.Delete) {
					t.Fatalf("%s: %v is not the least change, %v", name, change, least)
				}
				if len(change.Frontends.Set) > 0 && !row.Touches(to, model.Diff(from, to)) {
					t.Fatalf("%s: %v does not touch the part", name, change)
				}
				from = to
			}
		}
	}
}

func randomState(random *rand.Rand) *model.State {
	s := model.NewState()
	ids := []model.PoolID{{Service: "default/a"}, {Service: "default/b"}}
	for port := range uint16(4) {
		for _, scope := range []model.Scope{model.Any, model.Internal} {
			key := model.Key{Addr: netip.MustParseAddr("192.0.2.1"), Port: 1 + port, Protocol: model.TCP, Scope: scope}
			id := ids[random.IntN(2)]
			switch random.IntN(4) {
			case 0:
				s.Frontends[key] = model.Frontend{Service: id.Service, Verdict: model.Reject}
			case 1:
				s.Frontends[key] = model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id, SNAT: model.Always}
				s.Pools[id] = model.Pool{Backends: []model.Backend{
					{Addr: netip.MustParseAddr("192.0.2.2"), Port: uint16(1 + random.IntN(2)), Weight: 1},
				}}
			}
		}
	}
	if random.IntN(2) == 0 {
		s.Guards[netip.MustParsePrefix("198.51.100.0/24")] = model.Reject
	}
	return s
}
