package engine

import (
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
)

// TestResponder_form: an agent and a responder of another version have the same file.
func TestResponder_form(t *testing.T) {
	const form = `{"maxAge":60000000000,"healthy":true,"rows":"health 192.0.2.1:32123 shop/web local 2\n"}`
	path := filepath.Join(t.TempDir(), "health-checks")
	programmed := func() (Status, bool) { return Status{LastProgrammed: time.Now()}, true }
	w := healthWriter{health: programmed, file: HealthFile{Path: path, MaxAge: time.Minute}}
	at := netip.MustParseAddrPort("192.0.2.1:32123")
	w.put(map[netip.AddrPort]model.Health{at: {Service: "shop/web", Local: 2}})
	w.confirm(t.Context())
	if text, err := os.ReadFile(path); err != nil || string(text) != form {
		t.Errorf("the agent writes %s, %v; want %s", text, err, form)
	}
	later := strings.Replace(form, `{`, `{"added":[1],`, 1)
	if err := os.WriteFile(path, []byte(later), 0o644); err != nil {
		t.Fatal(err)
	}
	r := &responder{path: path, log: slog.New(slog.DiscardHandler)}
	r.read()
	if _, healthy := r.health(); !healthy || r.answers.Load().rows[at].Local != 2 {
		t.Errorf("of %s the responder has %+v, healthy: %t", later, r.answers.Load(), healthy)
	}
}

// TestResponder_read: a file is read once, whether it can be parsed or not, until it is another one.
func TestResponder_read(t *testing.T) {
	const good, bad = `{"maxAge":60000000000,"healthy":true,"rows":""}`, `{"maxAge":60000000000,"healthy":true,"rows":17}`
	path := filepath.Join(t.TempDir(), "health-checks")
	now := time.Now()
	var log strings.Builder
	r := &responder{path: path, log: slog.New(slog.NewTextHandler(&log, nil))}
	r.answers.Store(&answers{})
	for _, step := range []struct {
		text    string
		written time.Time
		healthy bool
		errors  int // so far
	}{
		{bad, now, false, 1},
		{good, now, false, 1}, // it looks the same
		{good, now.Add(time.Second), true, 1},
		{bad, now.Add(time.Second), true, 1},
		{bad, now.Add(2 * time.Second), true, 2}, // what was known stays
		{"", time.Time{}, false, 2},
		{good, now.Add(2 * time.Second), true, 2},
	} {
		change := func() error { return os.Remove(path) }
		if step.text != "" {
			change = func() error {
				return errors.Join(os.WriteFile(path, []byte(step.text), 0o644), os.Chtimes(path, step.written, step.written))
			}
		}
		if err := change(); err != nil {
			t.Fatal(err)
		}
		r.read()
		_, healthy := r.health()
		if n := strings.Count(log.String(), "cannot read what to answer"); healthy != step.healthy || n != step.errors {
			t.Errorf("%+v: healthy: %t, %d errors", step, healthy, n)
		}
	}
}

// TestResponder_clock: a file of an agent that has ended counts for its time only, though the clock was ahead.
func TestResponder_clock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "health-checks")
		ahead := time.Now().Add(time.Hour)
		err := os.WriteFile(path, []byte(`{"maxAge":60000000000,"healthy":true,"rows":""}`), 0o644)
		if err = errors.Join(err, os.Chtimes(path, ahead, ahead)); err != nil {
			t.Fatal(err)
		}
		r := &responder{path: path, log: slog.New(slog.DiscardHandler)}
		for after, want := range []bool{true, false} {
			r.read()
			if _, healthy := r.health(); healthy != want {
				t.Errorf("after %d minutes it is healthy: %t", after, healthy)
			}
			bubble.Pass(61 * time.Second)
		}
	})
}
