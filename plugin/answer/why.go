package answer

import (
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/said"
)

// Step is one of the checks of why.
type Step struct {
	Result string `json:"result"` // ok, warning, failed or unknown
	Text   string `json:"text"`
	Do     string `json:"do,omitempty"`
}

const (
	stepOK      = "ok"
	stepWarning = "warning"
	stepFailed  = "failed"
	stepUnknown = "unknown" // it could not be tried
)

// Findings are the steps up to the first that failed.
type Findings struct {
	Service string `json:"service"`
	Steps   []Step `json:"steps"`
}

// OK adds a step that is as it should be.
func (f *Findings) OK(format string, args ...any) {
	f.Steps = append(f.Steps, Step{Result: stepOK, Text: fmt.Sprintf(format, args...)})
}

// Warn adds one that is not, while the Service works.
func (f *Findings) Warn(do, format string, args ...any) {
	f.Steps = append(f.Steps, Step{stepWarning, fmt.Sprintf(format, args...), do})
}

// Fail adds one that keeps the Service from working.
func (f *Findings) Fail(do, format string, args ...any) {
	f.Steps = append(f.Steps, Step{stepFailed, fmt.Sprintf(format, args...), do})
}

// Unknown adds one that could not be tried.
func (f *Findings) Unknown(format string, args ...any) {
	f.Steps = append(f.Steps, Step{Result: stepUnknown, Text: fmt.Sprintf(format, args...)})
}

// Failed reports whether a step failed.
func (f *Findings) Failed() bool {
	return slices.ContainsFunc(f.Steps, func(s Step) bool { return s.Result == stepFailed })
}

// String has the step that failed as its first line, and then all.
func (f *Findings) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s: %s\n", f.Service, f.conclusion())
	for _, s := range f.Steps {
		fmt.Fprintf(&text, "  %-8s %s\n", s.Result, s.Text)
		if s.Do != "" {
			fmt.Fprintf(&text, "  %-8s %s\n", "", "→ "+s.Do)
		}
	}
	return text.String()
}

func (f *Findings) conclusion() string {
	warnings, works := 0, "it works from this node"
	for _, s := range f.Steps {
		switch s.Result {
		case stepFailed:
			return s.Text
		case stepUnknown:
			works = "its rules are in force; whether backends answer is not known"
		case stepWarning:
			warnings++
		}
	}
	if warnings > 0 {
		return said.Count(warnings, "warning") + ", else " + works
	}
	return works
}

// Warned is the Badness of steps with a warning, and none that failed.
const Warned = 1

// Badness says how wrong a Service is: 0 if nothing is.
func (f *Findings) Badness() (n int) {
	for _, s := range f.Steps {
		switch s.Result {
		case stepFailed:
			return Warned + 2
		case stepWarning, stepUnknown:
			n = Warned
		}
	}
	return n
}
