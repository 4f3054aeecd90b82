package dataplane

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
)

func TestSessions(t *testing.T) {
	web, web6 := model.PoolID{Service: "default/web"}, model.PoolID{Service: "default/web", V6: true}
	s := model.NewState()
	s.Pools[web] = model.Pool{Affinity: time.Hour, Backends: []model.Backend{backend("10.1.0.1:80", 1), backend("10.1.0.2:80", 1),
		backend("10.1.0.3:80", 0)}}
	s.Pools[web6] = model.Pool{Affinity: time.Hour, Backends: []model.Backend{backend("[fd00::1]:80", 1)}}
	plain := model.PoolID{Service: "default/plain"}
	s.Pools[plain] = model.Pool{Backends: []model.Backend{backend("10.1.0.1:80", 1)}}

	now := time.Now()
	session := func(pool model.PoolID, client, to string, left time.Duration) Session {
		return Session{pool, netip.MustParseAddr(client), netip.MustParseAddrPort(to), now.Add(left)}
	}
	m := NewSessions(s)
	must(t, m.Add(all(
		session(web, "10.0.0.1", "10.1.0.1:80", 100*time.Second),
		session(web, "10.0.0.1", "10.1.0.2:80", 200*time.Second), // later
		session(web, "10.0.0.1", "10.1.0.1:80", 150*time.Second), // earlier again
		session(web, "10.0.0.2", "10.1.0.3:80", time.Minute),     // drains
		session(web, "10.0.0.3", "10.1.0.9:80", time.Minute),     // a stranger
		session(web, "10.0.0.4", "10.1.0.1:80", -time.Second),    // over
		session(web, "10.0.0.5", "10.1.0.1:80", 5*time.Hour),     // longer than the pool remembers anybody
		session(plain, "10.0.0.1", "10.1.0.1:80", time.Minute),   // no affinity
		session(web6, "fd01::1", "[fd00::1]:80", time.Minute),
		session(web6, "10.0.0.6", "[fd00::1]:80", time.Minute), // the other family
		session(web, "10.0.0.7", "10.1.0.1:80", 50*time.Second),
		session(web, "10.0.0.8", "10.1.0.1:80", 50*time.Second),
		session(web, "10.0.0.9", "10.1.0.1:80", 50*time.Second),
		session(web, "10.0.0.10", "10.1.0.1:80", 50*time.Second),
	)))
	for _, own := range []struct {
		Session
		superseded bool
	}{
		{session(web, "10.0.0.7", "10.1.0.2:80", 60*time.Second), false},                      // came later
		{session(web, "10.0.0.8", "10.1.0.2:80", 40*time.Second), true},                       // came earlier
		{session(web, "10.0.0.9", "10.1.0.1:80", 49*time.Second+500*time.Millisecond), false}, // as good as the same
		{session(web, "10.0.0.10", "10.1.0.9:80", 60*time.Second), true},                      // a stranger
		{session(web, "10.0.0.11", "10.1.0.1:80", 60*time.Second), false},                     // only there
	} {
		if got := m.Supersedes(own.Session); got != own.superseded {
			t.Errorf("%s: supersedes: %t", own.Client, got)
		}
	}
	want := `
10.0.0.1 default/web cluster 10.1.0.2:80 200s
10.0.0.10 default/web cluster 10.1.0.1:80 50s
10.0.0.5 default/web cluster 10.1.0.1:80 3600s
10.0.0.8 default/web cluster 10.1.0.1:80 50s
fd01::1 default/web cluster6 [fd00::1]:80 60s`[1:]
	var got []string
	for one := range m.All() {
		left := one.Until.Sub(now).Round(time.Second)
		got = append(got, fmt.Sprintf("%s %s %s %.0fs", one.Client, one.Pool, one.Backend, left.Seconds()))
	}
	slices.Sort(got)
	if text := strings.Join(got, "\n"); text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	broken := errors.New("broken")
	if err := m.Add(func(yield func(Session, error) bool) { yield(Session{}, broken) }); !errors.Is(err, broken) {
		t.Errorf("an error of who tells became %v", err)
	}
}

func backend(at string, weight uint16) model.Backend {
	b := model.BackendAt(netip.MustParseAddrPort(at))
	b.Weight = weight
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func all(list ...Session) iter.Seq2[Session, error] {
	return func(yield func(Session, error) bool) {
		for _, one := range list {
			if !yield(one, nil) {
				return
			}
		}
	}
}
