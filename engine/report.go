package engine

import (
	"encoding/json"
	"time"

	"fairlead.dev/fairlead/dataplane/handover"
)

// Report is what "fairlead status" tells.
type Report struct {
	Now     time.Time `json:"currentTime"`
	Healthy bool      `json:"healthy"` // as /livez says; /healthz wants the node to be eligible, too
	About
	Status
}

// MarshalJSON has the keys of the release before, too.
func (r Report) MarshalJSON() ([]byte, error) {
	type plain Report
	return json.Marshal(struct {
		plain
		Carrying       []handover.Kept `json:"carrying,omitempty"`
		UncheckedSince time.Time       `json:"uncheckedSince,omitzero"`
	}{plain(r), r.Draining, r.AuditUnfinishedSince})
}

// About is what an Engine's owner knows of it. An empty field is not known.
type About struct {
	Version string `json:"version,omitempty"`
	Mode    string `json:"mode,omitempty"`    // as it is configured
	Plane   string `json:"plane,omitempty"`   // that serves it
	Why     string `json:"why,omitempty"`     // it does, where that was chosen
	Backend string `json:"backend,omitempty"` // of the plane, if it has several
	Node    string `json:"node,omitempty"`
	// ConfigurationRefused is why the configuration files are not in force; empty: they are.
	ConfigurationRefused string  `json:"configurationRefused,omitempty"`
	Watches              []Watch `json:"watches,omitempty"`
	// Draining are planes that another one has replaced, and whose connections live on.
	Draining []handover.Kept `json:"draining,omitempty"`
}

// Watch is how the watch of one kind of objects does.
type Watch struct {
	Resource    string    `json:"resource"`
	LastMessage time.Time `json:"heard"` // when the API server last said something, be it a bookmark; or was asked first
	Lists       int       `json:"-"`     // how often all objects were listed
}

// report does not wait for the loop: it is wanted most when that is stuck.
func (e *Engine) report() Report {
	r := Report{Now: time.Now(), Healthy: e.Healthy(), Status: e.Status()}
	if e.options.About != nil {
		r.About = e.options.About()
	}
	return r
}
