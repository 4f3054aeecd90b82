package localhost_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
)

// recorder is a plane that notes what it is told.
type recorder struct {
	dataplane.Base
	t      *testing.T
	synced *model.State // the very one
	state  *model.State // what its kernel would hold
}

func (r *recorder) Sync(_ context.Context, s *model.State) error {
	r.synced, r.state = s, s.Clone()
	return s.Validate()
}

func (r *recorder) Apply(_ context.Context, s *model.State, c model.Change) error {
	for _, key := range c.Frontends.Delete {
		if _, ok := r.state.Frontends[key]; !ok {
			r.t.Errorf("%s is deleted, which it does not have", key)
		}
	}
	r.state.Apply(c)
	if got, want := r.state.String(), s.String(); got != want {
		r.t.Errorf("the change leads to\n%sthe State is\n%s", got, want)
	}
	return s.Validate()
}

func (r *recorder) Audit(context.Context, *model.State, dataplane.Depth) (dataplane.Report, error) {
	return dataplane.Report{}, nil
}

func (r *recorder) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	return r.Sync(ctx, s)
}
func (r *recorder) Remove(context.Context) error { return nil }
func (r *recorder) Close() error                 { return nil }

func wrapRecorder(t *testing.T) (*recorder, dataplane.Dataplane) {
	t.Helper()
	r := &recorder{t: t}
	p, err := localhost.Wrap(func(dataplane.Config) (dataplane.Dataplane, error) { return r, nil })(dataplane.Config{
		Fault: func(string) error { return context.Canceled }, // no sockets
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return r, p
}

func TestInner_getsTheVeryState(t *testing.T) {
	r, p := wrapRecorder(t)
	s := parse(t, strings.ReplaceAll(both, "[::1]", "[fd00::1]"))
	if err := p.Sync(t.Context(), s); err != nil || r.synced != s {
		t.Errorf("%v, other State: %v", err, r.synced != s)
	}
}

func TestInner_rows(t *testing.T) {
	r, p := wrapRecorder(t)
	s := parse(t, both+`
		frontend 127.0.0.1:30081/tcp internal reject default/web:none
		frontend [::1]:30081/tcp internal reject default/web:none
		frontend [::1]:30082/tcp internal drop default/web:none
		frontend [::1]:30083/tcp internal forward default/web:http cluster6 snat always allow fd00::/96
		frontend [::1]:30084/sctp internal forward default/web:http cluster6 snat always
		frontend [fd00::1]:30080/tcp any forward default/web:http cluster6 snat always`)
	before := s.String()
	_ = p.Sync(t.Context(), s) // nothing can listen here
	var got []string
	for _, line := range r.state.Lines() {
		if strings.HasPrefix(line, "frontend") {
			got = append(got, line)
		}
	}
	want := []string{
		"frontend 127.0.0.1:30081/tcp internal reject default/web:none",
		"frontend [::1]:30081/tcp internal reject default/web:none",
		"frontend [::1]:30082/tcp internal drop default/web:none",
		"frontend [::1]:30083/tcp internal forward default/web:http cluster6 snat always allow fd00::/96",
		"frontend [::1]:30084/sctp internal reject default/web:http",
		"frontend [fd00::1]:30080/tcp any forward default/web:http cluster6 snat always",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
	if s.String() != before {
		t.Error("the State has changed")
	}
}

// Any chain of changes leads the wrapped plane where a Sync would.
func TestInner_randomChanges(t *testing.T) {
	random := rand.New(rand.NewPCG(sample.Seed(t), 0))
	for range 200 {
		r, p := wrapRecorder(t)
		from := model.NewState()
		_ = p.Sync(t.Context(), from)
		for range 10 {
			to := randomState(random)
			_ = p.Apply(t.Context(), to, model.Diff(from, to)) // nothing can listen here
			applied := r.state.String()
			_ = p.Sync(t.Context(), to)
			if got := r.state.String(); got != applied {
				t.Fatalf("Apply leads to\n%sSync leads to\n%s", applied, got)
			}
			if err := errors.Join(to.Validate(), r.state.Validate()); err != nil {
				t.Fatal(err)
			}
			from = to
		}
	}
}

func randomState(random *rand.Rand) *model.State {
	s := model.NewState()
	ids := []model.PoolID{{Service: "default/a", V6: true}, {Service: "default/b", V6: true}}
	for _, addr := range []string{"::1", "fd00::1"} {
		for _, port := range []uint16{30080, 30081} {
			for _, protocol := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
				key := model.Key{Addr: netip.MustParseAddr(addr), Port: port, Protocol: protocol, Scope: model.Scope(random.IntN(2))}
				id := ids[random.IntN(2)]
				switch random.IntN(4) {
				case 0:
					s.Frontends[key] = model.Frontend{Service: id.Service, Verdict: model.Reject}
				case 1:
					s.Frontends[key] = model.Frontend{Service: id.Service, Verdict: model.Forward, Pool: id, SNAT: model.Always}
					s.Pools[id] = randomPool(random)
				}
			}
		}
	}
	return s
}

func randomPool(random *rand.Rand) model.Pool {
	addr := netip.AddrPortFrom(netip.MustParseAddr("fd00::2"), uint16(1+random.IntN(2)))
	return model.Pool{Backends: []model.Backend{{Addr: addr.Addr(), Port: addr.Port(), Weight: 1}}}
}
