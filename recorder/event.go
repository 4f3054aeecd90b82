package recorder

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"fairlead.dev/fairlead/said"
)

// Kind is what an Event is about.
type Kind string

// The kinds. Those from Info to Sync are lines of the log, told apart by their keys.
const (
	Info    Kind = "info"
	Warning Kind = "warning"
	Error   Kind = "error"
	Problem Kind = "problem" // of an object, arisen or over
	Rows    Kind = "rows"    // of a Service: a change is in force
	Drift   Kind = "drift"   // another program changed Fairlead's rules
	Sync    Kind = "sync"    // all rows were programmed

	Repair Kind = "repair" // of drifts, which the log does not repeat
	Joined Kind = "joined" // backends take new connections
	Left   Kind = "left"   // they do not any more

	// fairlead monitor adds these.
	Monitor    Kind = "monitor"    // what it can tell of
	Connection Kind = "connection" // that a client opened
	Refused    Kind = "refused"    // connections to a row, or to none
	LeftOut    Kind = "left out"   // events that came too fast
)

// The verdicts on connections.
const (
	Forwarded = "forwarded"
	Rejected  = "refused"
	Dropped   = "dropped"
)

// Event is one thing that happened. Fields that do not apply are empty.
type Event struct {
	Time        time.Time         `json:"time"`
	Kind        Kind              `json:"kind"`
	Service     string            `json:"service,omitempty"`     // namespace/name, or namespace/name:port
	Verdict     string            `json:"verdict,omitempty"`     // forwarded, refused or dropped
	Client      string            `json:"client,omitempty"`      // address:port
	Destination string            `json:"destination,omitempty"` // address:port/protocol that the client asked for
	Backends    []string          `json:"backends,omitempty"`    // address:port, the first few
	Count       int               `json:"count,omitempty"`       // of backends, connections, repaired differences or lines
	Message     string            `json:"message"`
	Details     map[string]string `json:"details,omitempty"` // of a line of the log, by its keys
}

// Handler is a handler of the log that records each line, verbose ones excepted, and passes all on.
func (r *Recorder) Handler(next slog.Handler) slog.Handler { return handler{next, r, nil} }

type handler struct {
	slog.Handler
	recorder *Recorder
	attrs    []slog.Attr
}

// Handle implements slog.Handler.
func (h handler) Handle(ctx context.Context, record slog.Record) error {
	if record.Level >= slog.LevelInfo {
		h.recorder.Record(h.event(record))
	}
	return h.Handler.Handle(ctx, record)
}

// WithAttrs implements slog.Handler.
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return handler{h.Handler.WithAttrs(attrs), h.recorder, append(slices.Clip(h.attrs), attrs...)}
}

// WithGroup implements slog.Handler. No line of Fairlead's has groups, so their names are left out.
func (h handler) WithGroup(name string) slog.Handler {
	return handler{h.Handler.WithGroup(name), h.recorder, h.attrs}
}

// event makes an Event of a line of the log. The keys of lines are stable.
func (h handler) event(record slog.Record) Event {
	e := Event{Time: record.Time, Kind: Info, Message: record.Message, Details: map[string]string{}}
	switch {
	case record.Level >= slog.LevelError:
		e.Kind = Error
	case record.Level >= slog.LevelWarn:
		e.Kind = Warning
	}
	take := func(a slog.Attr) bool {
		e.Details[a.Key] = said.Brief(a.Value.String())
		return true
	}
	for _, a := range h.attrs {
		take(a)
	}
	record.Attrs(take)
	for key, kind := range map[string]Kind{"object": Problem, "set": Rows, "drift": Drift, "frontends": Sync} {
		if _, ok := e.Details[key]; ok {
			e.Kind = kind
		}
	}
	e.Service = e.Details["service"]
	delete(e.Details, "service")
	return e
}
