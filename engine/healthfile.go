package engine

import (
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// Another process, the responder, can answer at the health check ports of Services. It has the sockets, so that load
// balancers notice nothing while the agent restarts:
//
//	agent ── rows, health ──► file ──► responder ◄── load balancer
//
// The file counts until MaxAge after it was written. An agent that has programmed nothing yet leaves it as it is.

// HealthFile is where the agent writes what the responder answers.
type HealthFile struct {
	Path   string        // empty: there is no responder
	MaxAge time.Duration // for which it counts
}

// healthRecord is what is in the file.
type healthRecord struct {
	MaxAge  time.Duration `json:"maxAge"`
	Healthy bool          `json:"healthy"`
	Rows    string        `json:"rows"` // of State.Health
	written time.Time
	file    os.FileInfo // that was read
}

// healthWriter writes the file when something changed, and often enough that it counts.
type healthWriter struct {
	log    *slog.Logger
	health func() (Status, bool)

	mu      sync.Mutex
	file    HealthFile
	rows    map[netip.AddrPort]model.Health // nil: not known yet
	text    string                          // of rows
	last    healthRecord
	failure said.Condition
}

// use has another file written, and ends the former one: its responder closes its sockets.
func (w *healthWriter) use(f HealthFile) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file.Path != f.Path && w.file.Path != "" {
		_ = os.Remove(w.file.Path)
	}
	w.file, w.last = f, healthRecord{}
}

// takes reports whether there is a responder, and gives it rows.
func (w *healthWriter) takes(rows map[netip.AddrPort]model.Health) bool {
	w.mu.Lock()
	if w.file.Path == "" {
		w.mu.Unlock()
		return false
	}
	if w.rows == nil || !maps.Equal(w.rows, rows) {
		s := model.NewState()
		maps.Copy(s.Health, rows)
		w.rows, w.text = s.Health, s.String()
	}
	w.mu.Unlock()
	w.confirm()
	return true
}

// keep confirms the file until ctx ends.
func (w *healthWriter) keep(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			w.confirm()
		case <-ctx.Done():
			return
		}
	}
}

// confirm writes the file unless what is in it counts for long.
func (w *healthWriter) confirm() {
	w.mu.Lock()
	defer w.mu.Unlock()
	status, healthy := w.health()
	if w.file.Path == "" || w.rows == nil || status.LastProgrammed.IsZero() {
		return
	}
	r := healthRecord{MaxAge: w.file.MaxAge, Healthy: healthy, Rows: w.text, written: w.last.written}
	if r == w.last && time.Since(r.written) < r.MaxAge/4 {
		return
	}
	r.written = time.Now()
	if err := r.write(w.file.Path); err != nil {
		if w.failure.Changed(err.Error()) {
			w.log.Error("cannot tell the responder what to answer to health checks; trying again", "error", err)
		}
		return
	}
	w.last = r
	w.failure.Cleared()
}

// write replaces the file. It has no secrets, and the responder is another user.
func (r *healthRecord) write(path string) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
