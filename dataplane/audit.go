package dataplane

import (
	"fmt"
	"slices"
	"strings"
)

// ExternalChange is an external change of the kernel, as the kernel reports it.
type ExternalChange struct {
	What    string `json:"what"`              // was changed, in the kernel's words
	Process string `json:"process,omitempty"` // name of the process that did; empty: the kernel does not tell
	PID     int    `json:"pid,omitempty"`     // its number; 0: the kernel does not tell
	// Only, if not empty, is what the Object of a Drift begins with that it may be the cause of. Otherwise it was
	// something else, as in another network namespace.
	Only string `json:"-"`
}

// Candidates are the external changes that may be the cause of one of the drifts.
func Candidates(all []ExternalChange, drifts []Drift) []ExternalChange {
	var out []ExternalChange
	for _, f := range all {
		if slices.ContainsFunc(drifts, func(d Drift) bool { return strings.HasPrefix(d.Object, f.Only) }) {
			out = append(out, f)
		}
	}
	return out
}

// String names the changed object, and the author.
func (c ExternalChange) String() string {
	if c.Author() == "" {
		return c.What
	}
	return c.What + " by " + c.Author()
}

// Author is the author; empty if that is not known.
func (c ExternalChange) Author() string {
	switch {
	case c.PID == 0:
		return c.Process
	case c.Process == "":
		return fmt.Sprintf("process %d", c.PID)
	}
	return fmt.Sprintf("%s (process %d)", c.Process, c.PID)
}

// Authors are all programs that changed something, each once; empty if none is known.
func Authors(all []ExternalChange) string {
	var names []string
	seen := map[string]bool{"": true}
	for _, f := range all {
		if by := f.Author(); !seen[by] {
			seen[by] = true
			names = append(names, by)
		}
	}
	return strings.Join(names, ", ")
}
