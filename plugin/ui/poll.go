package ui

import (
	"bytes"
	"context"
	"encoding/json"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/plugin/answer"
	"fairlead.dev/fairlead/recorder"
	"fairlead.dev/fairlead/service"
)

const (
	every    = 2 * time.Second // the agent is asked at most so often
	share    = 10              // and is busy with answers at most one part in so many
	patience = 5 * time.Second // for one answer
	stale    = time.Minute     // rates over a longer time say nothing about now
	kept     = 100             // events
)

// poller asks the agent when a browser asks, and what it has learned is too old.
type poller struct {
	agent Ask

	mu   sync.Mutex // also held while the agent is asked: all browsers wait for the same answer
	last *snapshot
	next time.Time
}

// snapshot is what the agent has answered. It is never modified.
type snapshot struct {
	Now   time.Time `json:"now"`             // by the agent's clock
	Error string    `json:"error,omitempty"` // why this is an older one; empty: it is not
	Head
	Counts bool             `json:"counts"` // whether the data plane counts connections
	Totals totals           `json:"totals"`
	Events []recorder.Event `json:"events"` // the newest first

	rows    []*row
	counted map[string]service.Counted // by the key of the row
}

func (p *poller) current() *snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	if begun := time.Now(); !begun.Before(p.next) {
		p.last = p.look(p.last)
		p.next = begun.Add(max(every*9/10, share*time.Since(begun)))
	}
	return p.last
}

// look asks the agent. If it fails, what was known before remains.
func (p *poller) look(before *snapshot) *snapshot {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var status answer.Status
	var all engine.Services
	s, err := *before, p.ask(ctx, "/status", &status.Report)
	if err == nil {
		// This answer comes even while the agent's loop is stuck.
		s.Head = Head{status.Facts(), status.String(), status.Alarms()}
		err = p.ask(ctx, "/services", &all)
	}
	if err == nil {
		s.take(all)
		s.Events, err = p.events(ctx)
	}
	s.Error = ""
	if err != nil {
		s.Error = err.Error()
	}
	return &s
}

func (p *poller) ask(ctx context.Context, question string, to any) error {
	text, err := p.agent(ctx, question)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, to)
}

// events are the newest ones.
func (p *poller) events(ctx context.Context) (events []recorder.Event, err error) {
	text, err := p.agent(ctx, "/events")
	for line := range bytes.Lines(text) {
		var e recorder.Event
		if json.Unmarshal(line, &e) == nil {
			events = append(events, e)
		}
	}
	slices.Reverse(events)
	return events[:min(kept, len(events))], err
}

// open asks for the Service of a row, with its endpoints.
func (p *poller) open(ctx context.Context, r *row) json.RawMessage {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	namespace, name, _ := strings.Cut(r.Service, "/")
	q := url.Values{"namespace": {namespace}, "name": {name}, "endpoints": {"1"}}
	text, err := p.agent(ctx, "/services?"+q.Encode())
	if err != nil {
		text, _ = json.Marshal(map[string]string{"error": err.Error()})
	}
	return text
}
