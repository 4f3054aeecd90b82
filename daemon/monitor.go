package daemon

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"fairlead.dev/fairlead/recorder"
)

// serveEvents answers
//
//	GET /events              what happened lately, an Event of package recorder a line
//	GET /events?follow=true  what happens, until the client hangs up
func (d *Daemon) serveEvents(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	if r.FormValue("follow") == "true" {
		d.followEvents(w, r)
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

// followEvents says once a second how many events the client did not take in time.
func (d *Daemon) followEvents(w http.ResponseWriter, r *http.Request) {
	events := d.options.Logs.Events.Follow()
	defer events.Close()
	second := time.NewTicker(time.Second)
	defer second.Stop()
	to, flush := json.NewEncoder(w), http.NewResponseController(w).Flush
	for err := flush(); err == nil; err = flush() {
		select {
		case e := <-events.Events:
			_ = to.Encode(e) // fails if the client has hung up
		case <-second.C:
			if n := events.LeftOut(); n > 0 {
				_ = to.Encode(recorder.Event{Time: time.Now(), Kind: recorder.LeftOut, Count: n,
					Message: "events came faster than they were read"})
			}
		case <-r.Context().Done():
			return
		}
	}
}
