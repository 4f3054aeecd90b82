package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"fairlead.dev/fairlead/dataplane/handover"
)

// switches take orders for other data planes, one at a time, over the control socket:
//
//	POST /switch?plane=NAME   a SwitchStep a line, until it is done; a client that hangs up before the new plane
//	                          is in force ends it
//	DELETE /switch            ends it, if the new plane is not yet in force
type switches struct {
	orders chan *switchOrder // to the goroutine that reloads

	mu     sync.Mutex
	to     string             // the plane to which a change is under way; empty: none is
	cancel context.CancelFunc // ends it; nil: no order may end it
}

// switchOrder asks for another data plane.
type switchOrder struct {
	context context.Context
	plane   string
	steps   chan SwitchStep // closed at the end
}

// maxSteps is more than a change ever takes.
const maxSteps = 100

// begin notes that the configuration changes the data plane, and what ends that. The result is to be called when it is
// over.
func (s *switches) begin(to string, cancel context.CancelFunc) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.to == "" {
		s.to, s.cancel = to, cancel
		return s.end
	}
	waits := s.cancel // an order does: it will find this plane, or be ended with it
	s.cancel = func() {
		cancel()
		waits()
	}
	return func() {}
}

func (s *switches) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.to, s.cancel = "", nil
}

// enter notes an order of a data plane. It fails while a change is under way.
func (s *switches) enter(to string, cancel context.CancelFunc) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.to != "" {
		return fmt.Errorf("a change to the data plane %s is under way; wait for its end", s.to)
	}
	s.to, s.cancel = to, cancel
	return nil
}

// ServeHTTP implements http.Handler.
func (s *switches) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodPost:
		s.post(w, r)
	case http.MethodDelete:
		s.stop()
	default:
		http.Error(w, "POST or DELETE", http.StatusMethodNotAllowed)
	}
}

func (s *switches) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cancel != nil {
		s.cancel()
	}
}

func (s *switches) post(w http.ResponseWriter, r *http.Request) {
	name := r.FormValue("plane")
	if !slices.Contains(Planes(), name) {
		http.Error(w, fmt.Sprintf("there is no data plane %q; there are %s", name, strings.Join(Planes(), ", ")),
			http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	if err := s.enter(name, cancel); err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	defer s.end()
	o := &switchOrder{context: ctx, plane: name, steps: make(chan SwitchStep, maxSteps)}
	select {
	case s.orders <- o:
		stream(w, o.steps)
	case <-ctx.Done():
		http.Error(w, "the proxy was busy reading its configuration; nothing has changed", http.StatusServiceUnavailable)
	}
}

// stream writes one step a line, as they come, until there are no more.
func stream(w http.ResponseWriter, steps <-chan SwitchStep) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	c, e := http.NewResponseController(w), json.NewEncoder(w)
	_ = c.Flush()
	for s := range steps {
		_ = e.Encode(s) // fails if the client has hung up
		_ = c.Flush()
	}
}

// obey changes the data plane as ordered.
func (d *Daemon) obey(ctx context.Context, o *switchOrder) {
	defer close(o.steps)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(o.context, cancel)()
	from := d.mode()
	if from == o.plane {
		o.steps <- SwitchStep{Step: StepUnchanged, Plane: o.plane, Message: o.plane + " is in force already"}
		return
	}
	to := planeOf(d.config.Load(), o.plane)
	err := d.switchTo(ctx, to, func(s SwitchStep) { o.steps <- s })
	if err != nil {
		if errors.Is(err, handover.ErrStarting) {
			err = fmt.Errorf("%w; try again in a moment", err)
		}
		if o.context.Err() != nil {
			err = fmt.Errorf("cancelled: %s stays in force", from)
		}
		o.steps <- SwitchStep{Step: StepFailed, Plane: from, Message: err.Error()}
		return
	}
	if d.chosen = d.choice(o.plane); d.chosen != "" {
		o.steps <- SwitchStep{Step: stepNote, Plane: o.plane, Message: d.advice()}
	}
	done := fmt.Sprintf("done: %s has taken the place of %s", o.plane, from)
	o.steps <- SwitchStep{Step: StepDone, Plane: o.plane, Message: done}
}

// choice is a plane that is not that of the configuration, or "". Mode auto keeps what there is.
func (d *Daemon) choice(plane string) string {
	if said := d.config.Load().Plane; plane == said || said == autoPlane {
		return ""
	}
	return plane
}

// advice says how to keep a plane that is not that of the configuration.
func (d *Daemon) advice() string {
	return fmt.Sprintf("the configuration says mode %s: the next start goes back to it; "+
		"set mode (--proxy-mode) to %s to keep this", d.config.Load().KubeProxy.Mode, d.chosen)
}
