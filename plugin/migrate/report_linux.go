// Package migrate leads a node from another proxy, or another mode, to a mode of Fairlead, and back.
//
//	ConfigMap, process, --config ─┐
//	rules, IPVS table, links ─────┼─► seen ─► differences ─► Report: what blocks, what changes
//	Services, or --manifests ─────┘
//	Services ─► rows ─┐
//	connections ──────┴─► Watch: what the kernel does and the rows would not
//
// The table of differences is differences.txt. docs/migrate.md shows it.
package migrate

import (
	"fmt"
	"strings"

	"fairlead.dev/fairlead/said"
)

// Report is what a change of the proxy means for a node.
type Report struct {
	Node     string    `json:"node,omitempty"`
	Kernel   string    `json:"kernel,omitempty"`
	Proxy    string    `json:"proxy"`          // that serves now
	Mode     string    `json:"mode,omitempty"` // of it; empty: not known
	By       []string  `json:"by"`             // how proxy and mode were found
	To       string    `json:"to"`
	Services int       `json:"services"`
	Unread   []string  `json:"unread,omitempty"` // objects that the API server or a file did not give
	Findings []Finding `json:"findings"`
}

// Finding is a difference that this node has.
type Finding struct {
	Severity Severity `json:"severity"`
	Subject  string   `json:"subject"`
	Text     string   `json:"text"`
	Do       string   `json:"do,omitempty"`
	Objects  []string `json:"objects,omitempty"`
}

// Severity says what a difference means to a user.
type Severity string

// The severities.
const (
	Blocks  Severity = "blocks"  // Services would not work
	Changes Severity = "changes" // users may notice
	Note    Severity = "note"    // good to know
)

// report judges what was seen.
func (s *seen) report() *Report {
	r := &s.Report
	r.Services, r.Findings = len(s.services), []Finding{}
	all := s.objects()
	for _, severity := range []Severity{Blocks, Changes, Note} {
		for _, d := range differences() {
			objects, is := all[d.Subject]
			if is && d.Severity == severity && among(d.from, r.Mode) && among(d.to, r.To) {
				d.Objects = objects
				r.Findings = append(r.Findings, d.Finding)
			}
		}
	}
	return r
}

// Count is how many findings are of a severity.
func (r *Report) Count(s Severity) (n int) {
	for _, f := range r.Findings {
		if f.Severity == s {
			n++
		}
	}
	return n
}

// String has a line about all, and then each finding.
func (r *Report) String() string {
	var text strings.Builder
	from := strings.TrimSpace(r.Proxy + " " + r.Mode)
	fmt.Fprintf(&text, "%s to Fairlead %s: %s, %d blocking; %s, %s\n", from, r.To,
		said.Count(len(r.Findings), "difference"), r.Count(Blocks), said.Count(r.Count(Changes), "change"),
		said.Count(r.Count(Note), "note"))
	fmt.Fprintf(&text, "found by %s; %s\n", strings.Join(r.By, ", "), said.Count(r.Services, "Service"))
	for _, u := range r.Unread {
		fmt.Fprintf(&text, "not judged: %s\n", u)
	}
	for _, f := range r.Findings {
		fmt.Fprintf(&text, "  %-8s %s: %s\n", f.Severity, f.Subject, f.Text)
		if len(f.Objects) > 0 {
			fmt.Fprintf(&text, "  %-8s %s\n", "", said.List(f.Objects))
		}
		if f.Do != "" {
			fmt.Fprintf(&text, "  %-8s → %s\n", "", f.Do)
		}
	}
	return text.String()
}
