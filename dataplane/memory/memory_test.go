package memory

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

const rows = `backend default/web:http cluster 10.244.1.2:8080 local
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.10:81/tcp any reject default/web:admin
guard 10.96.0.0/16 drop
health 192.0.2.1:32000 default/web local 2
pods 10.244.0.0/16
pool default/web:http cluster
`

// String is the rows of the plane Name in canonical text form.
func (k *Kernel) String() (text string) {
	k.Do(func(rows *model.State) { text = rows.String() })
	return text
}

func state(t *testing.T, text string) *model.State {
	s, err := model.ParseState(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func open(t *testing.T, k *Kernel, fault func(string) error) dataplane.Dataplane {
	p, err := k.New(dataplane.Config{Fault: fault})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPlane_followsRows(t *testing.T) {
	var k Kernel
	p, ctx := open(t, &k, nil), t.Context()
	one, two := state(t, rows), state(t, strings.ReplaceAll(rows, "81", "82"))
	if err := p.Sync(ctx, one); err != nil || k.String() != rows {
		t.Fatal(err, k.String())
	}
	report, err := p.Audit(ctx, two, dataplane.Quick)
	want := []string{
		"frontend 10.96.0.10:82/tcp any reject default/web:admin: missing: a row",
		"frontend 10.96.0.10:81/tcp any reject default/web:admin: surplus: a row",
	}
	var got []string
	for _, d := range report.Drifts {
		got = append(got, d.String())
	}
	if err != nil || !slices.Equal(got, want) {
		t.Fatal(got, err)
	}
	if err := p.Apply(ctx, two, model.Diff(one, two)); err != nil || k.String() != two.String() {
		t.Fatal(err, k.String())
	}
	if report, err := p.Audit(ctx, two, dataplane.Quick); len(report.Drifts) > 0 || err != nil {
		t.Fatal(report.Drifts, err)
	}
	if err := open(t, &k, nil).Remove(ctx); err != nil || k.String() != "" {
		t.Fatal(err, k.String())
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

// Whichever operation fails, no frontend refers to a pool that is not there, and another Sync repairs.
func TestPlane_faults(t *testing.T) {
	errBroken := errors.New("broken")
	for _, way := range [][2]string{{"", rows}, {rows, served}, {served, ""}} {
		for failing, failed := 0, true; failed; failing++ {
			var k Kernel
			before, want := state(t, way[0]), state(t, way[1])
			if err := open(t, &k, nil).Sync(t.Context(), before); err != nil {
				t.Fatal(err)
			}
			n := 0
			failed = false
			p := open(t, &k, func(string) error {
				failed = failed || n == failing
				if n++; n != failing+1 {
					return nil
				}
				return errBroken
			})
			if err := p.Sync(t.Context(), want); failed != errors.Is(err, errBroken) {
				t.Fatal(err)
			}
			k.Do(func(s *model.State) {
				for key, f := range s.Frontends {
					if _, ok := s.Pools[f.Pool]; f.Verdict == model.Forward && !ok {
						t.Fatalf("operation %d failed: %s has no pool", failing, key)
					}
				}
			})
			if err := open(t, &k, nil).Sync(t.Context(), want); err != nil || k.String() != want.String() {
				t.Fatal(err, k.String())
			}
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := open(t, &Kernel{}, nil).Sync(ended, state(t, rows)); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}
