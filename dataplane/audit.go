package dataplane

import (
	"fmt"
	"slices"
	"strings"
)

// Foreign is an external change of the kernel, as the kernel reports it.
type Foreign struct {
	What    string `json:"what"`              // was changed, in the kernel's words
	Process string `json:"process,omitempty"` // name of the process that did; empty: the kernel does not tell
	PID     int    `json:"pid,omitempty"`     // its number; 0: the kernel does not tell
	// Only, if not empty, is what the Object of a Drift begins with that it may be the cause of. Otherwise it was
	// something else, as in another network namespace.
	Only string `json:"-"`
}

// Candidates are the external changes that may be the cause of one of the drifts.
func Candidates(all []Foreign, drifts []Drift) []Foreign {
	var out []Foreign
	for _, f := range all {
		if slices.ContainsFunc(drifts, func(d Drift) bool { return strings.HasPrefix(d.Object, f.Only) }) {
			out = append(out, f)
		}
	}
	return out
}

// String names the changed object, and the author.
func (f Foreign) String() string {
	if f.By() == "" {
		return f.What
	}
	return f.What + " by " + f.By()
}

// By is the author; empty if that is not known.
func (f Foreign) By() string {
	switch {
	case f.PID == 0:
		return f.Process
	case f.Process == "":
		return fmt.Sprintf("process %d", f.PID)
	}
	return fmt.Sprintf("%s (process %d)", f.Process, f.PID)
}

// By are all programs that changed something, each once; empty if none is known.
func By(all []Foreign) string {
	var names []string
	seen := map[string]bool{"": true}
	for _, f := range all {
		if by := f.By(); !seen[by] {
			seen[by] = true
			names = append(names, by)
		}
	}
	return strings.Join(names, ", ")
}
