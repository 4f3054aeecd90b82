package engine

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"os"
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

// healthRecord is what is in the file. The agent and the responder are upgraded one by one: fields are only added.
type healthRecord struct {
	MaxAge  time.Duration `json:"maxAge"`
	Healthy bool          `json:"healthy"`
	Rows    string        `json:"rows"` // of State.Health
}

// healthWriter writes the file when something changed, and often enough that it counts.
type healthWriter struct {
	log    *slog.Logger
	health func() (Status, bool)

	mu      sync.Mutex
	file    HealthFile
	rows    map[netip.AddrPort]model.Health // nil: not known yet
	healthy bool                            // as is written
	written time.Time                       // zero: the file has something else
	failure said.Condition
}

// use has another file written, and ends the former one: its responder closes its sockets.
func (w *healthWriter) use(f HealthFile) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file.Path != f.Path && w.file.Path != "" {
		_ = os.Remove(w.file.Path)
	}
	w.file, w.written = f, time.Time{}
}

// put has other rows written.
func (w *healthWriter) put(rows map[netip.AddrPort]model.Health) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rows, w.written = rows, time.Time{}
}

// answers reports whether there is a responder, which then has all that is known.
func (w *healthWriter) answers() bool {
	defer w.confirm(context.Background()) // unlocked
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.file.Path != ""
}

// confirm writes the file unless what is in it counts for long.
func (w *healthWriter) confirm(context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	status, healthy := w.health()
	if w.file.Path == "" || w.rows == nil || status.LastProgrammed.IsZero() {
		return
	}
	now := time.Now()
	if healthy == w.healthy && now.Sub(w.written) < w.file.MaxAge/4 {
		return
	}
	text := (&model.State{Health: w.rows}).String()
	err := (healthRecord{w.file.MaxAge, healthy, text}).write(w.file.Path)
	if w.failure.Failed(err) {
		w.log.Error("cannot tell the responder what to answer to health checks; trying again", "error", err)
	}
	if err == nil {
		w.healthy, w.written = healthy, now
	}
}

// write replaces the file. It has no secrets, the responder is another user, and the control socket is beside it.
func (r healthRecord) write(path string) error {
	text, err := json.Marshal(r)
	if err == nil {
		err = os.WriteFile(path+".new", text, 0o644)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	return err
}
