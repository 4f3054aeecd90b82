package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/recorder"
	"fairlead.dev/fairlead/said"
)

// maxLines is how many lines a monitor gets of a namespace in a second, if there are few of others.
const maxLines = 50

// serveEvents answers
//
//	GET /events                     what happened lately, an Event of package recorder a line
//	GET /events?follow=true         what happens, with connections, until the client hangs up
//	            &service=NS/NAME    of this Service only
//	            &verdict=V,V        connections with one of these verdicts only
func (d *Daemon) serveEvents(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	if r.FormValue("follow") == "true" {
		newMonitor(w, r).follow(r.Context(), d)
		return
	}
	lines, forgotten := d.options.Logs.Events.Recent()
	if !forgotten.IsZero() {
		_ = json.NewEncoder(w).Encode(recorder.Event{Kind: recorder.LeftOut, Time: forgotten,
			Message: "memory had no room for some events until now"})
	}
	for _, line := range lines {
		_, _ = w.Write(append(slices.Clip(line), '\n')) // fails if the client has hung up
	}
}

// monitor writes events to one client.
type monitor struct {
	flush    *http.ResponseController
	encoder  *json.Encoder
	service  string   // empty: all
	verdicts []string // nil: all
	share    said.Share
}

func newMonitor(w http.ResponseWriter, r *http.Request) *monitor {
	m := &monitor{
		flush: http.NewResponseController(w), encoder: json.NewEncoder(w), service: r.FormValue("service"),
		share: said.Share{Words: 2 * maxLines, While: time.Second},
	}
	if v := r.FormValue("verdict"); v != "" {
		m.verdicts = strings.Split(v, ",")
	}
	return m
}

// follow ends when the client hangs up.
func (m *monitor) follow(ctx context.Context, d *Daemon) {
	events, s := d.options.Logs.Events.Follow(), sampler{daemon: d}
	defer events.Close()
	defer func() { s.flows.close() }()
	sample, second := time.NewTicker(sampleInterval), time.NewTicker(time.Second)
	defer sample.Stop()
	defer second.Stop()
	for err := m.tell(s.sample(ctx)...); err == nil; {
		select {
		case e := <-events.Events:
			err = m.tell(e)
		case <-sample.C:
			err = m.tell(s.sample(ctx)...)
		case <-second.C:
			err = m.tellLeftOut(events.LeftOut())
		case <-ctx.Done():
			return
		}
	}
}

// tell writes the events that the client wants, if their namespaces have not had their share.
func (m *monitor) tell(all ...recorder.Event) error {
	for _, e := range all {
		always := e.Kind == recorder.Monitor || e.Kind == recorder.LeftOut
		if !always && (!m.wants(&e) || !m.share.May(e.Namespace(), time.Now())) {
			continue
		}
		if err := m.encoder.Encode(e); err != nil {
			return err
		}
	}
	return m.flush.Flush()
}

func (m *monitor) wants(e *recorder.Event) bool {
	if m.service != "" && e.Service != m.service && !strings.HasPrefix(e.Service, m.service+":") &&
		e.Details["object"] != "Service "+m.service {
		return false
	}
	return m.verdicts == nil || slices.Contains(m.verdicts, e.Verdict)
}

// tellLeftOut says once a second how many lines were left out.
func (m *monitor) tellLeftOut(missed int) error {
	n, of := m.share.Withheld()
	if n+missed == 0 {
		return nil
	}
	e := recorder.Event{Time: time.Now(), Kind: recorder.LeftOut, Count: n + missed,
		Message: fmt.Sprintf("%s more", said.Count(n+missed, "line"))}
	if len(of) > 0 && of[0] != "" {
		e.Message += ", most of namespace " + of[0]
	}
	return m.tell(e)
}
