// Package answer has what commands say of agents' answers: as text for people, and as JSON for programs.
//
//	agent ─ JSON ─► fairlead status, why ─┬─ text ──────────────────────► person on the node
//	                                      └─ JSON ─► kubectl fairlead ──► person anywhere
//
// Both programs print by it, so that they agree.
package answer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/said"
)

// Status is a Report for people.
type Status struct{ engine.Report }

// Good reports whether /healthz says 200.
func (r Status) Good() bool { return r.Healthy && r.NodeEligible }

// String has one line for each question.
func (r Status) String() string {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, row := range [][2]string{
		{"healthy", r.Health()},
		{"node", r.node()},
		{"data plane", r.PlaneText()},
		{"chosen", r.Why},
		{"configuration", r.configuration()},
		{"in force since", r.time(r.InForceSince)},
		{"draining", r.draining()},
		{"last correct", r.time(r.LastProgrammed)},
		{"waiting", r.waiting()},
		{"failures", r.failures()},
		{"drifts repaired", fmt.Sprint(r.Drifts)},
		{"undone", r.undone()},
		{"rows", r.rows()},
		{"problems", r.problems()},
		{"heard of", r.watches()},
		{"version", r.Version},
	} {
		if row[1] != "" {
			fmt.Fprintf(w, "%s\t%s\n", row[0], row[1])
		}
	}
	_ = w.Flush() // a Builder takes everything
	return text.String()
}

// Health says whether the agent is healthy, and if not, why.
func (r Status) Health() string {
	switch {
	case r.Healthy:
		return "yes"
	case r.LastProgrammed.IsZero():
		return "no, nothing has been programmed yet: the log says what it waits for"
	}
	return "no: " + r.wrong()
}

// wrong is what has been so for too long.
func (r Status) wrong() string {
	switch {
	case r.Undone != nil:
		return "repairs of the rules do not hold, undone " + r.undone()
	case r.WaitingSince.IsZero() && !r.AuditUnfinishedSince.IsZero():
		return "the kernel cannot be compared with the rows"
	}
	return "a change waits for too long"
}

// undone names the program that changes the rules again after repairs; it is empty where there is none.
func (r Status) undone() string {
	u := r.Undone
	if u == nil {
		return ""
	}
	text := fmt.Sprintf("by %s, since %s: rules changed again soon after %s",
		cmp.Or(u.Author, "another program"), r.time(u.Since), said.Count(u.Repairs, "repair"))
	if u.Rarer {
		text += "; the next repair waits until " + u.Next.Local().Format(time.RFC3339)
	}
	return text
}

func (r Status) node() string {
	switch {
	case !r.NodeEligible:
		return r.Node + ", load balancers should not use it: the Node is being deleted, or there is no such Node"
	case !r.Healthy:
		return r.Node + ", load balancers should not use it: it is not healthy"
	}
	return r.Node + ", load balancers may use it"
}

// PlaneText names the data plane.
func (r Status) PlaneText() string {
	text := r.Plane
	if r.Backend != "" {
		text += " (" + r.Backend + ")"
	}
	if r.Mode != r.Plane {
		text += ", for mode " + r.Mode
	}
	return text
}

// configuration says that the files are not in force; it is empty where they are.
func (r Status) configuration() string {
	if r.ConfigurationRefused == "" {
		return ""
	}
	return "refused, the one before stays: " + strings.ReplaceAll(r.ConfigurationRefused, "\n", " ")
}

// draining is what planes still have that are not in force any more.
func (r Status) draining() string {
	var words []string
	for _, c := range r.Draining {
		words = append(words, fmt.Sprintf("%s of data plane %s", said.Count(c.Connections, "connection"), c.Plane))
	}
	return strings.Join(words, ", ")
}

func (r Status) waiting() string {
	if r.WaitingSince.IsZero() {
		return "nothing"
	}
	return "a change, since " + r.time(r.WaitingSince)
}

func (r Status) failures() string {
	if r.Failures == 0 {
		return "none"
	}
	return fmt.Sprintf("%d in a row: %s", r.Failures, strings.ReplaceAll(r.Error, "\n", "\n\t"))
}

// BriefError is what failed, in one line: an error may have a line for each of very many rows.
func (r Status) BriefError() string { return strings.ReplaceAll(said.Brief(r.Error), "\n", "; ") }

// problems has a line for each, below each other.
func (r Status) problems() string {
	lines := make([]string, len(r.Problems))
	for i, p := range r.Problems {
		lines[i] = strings.ReplaceAll(p.Error(), "\n", " ")
	}
	return strings.Join(lines, "\n\t")
}

func (r Status) rows() string {
	return strings.Join([]string{
		said.Count(r.Rows.Frontends, "frontend"), said.Count(r.Rows.Pools, "pool"), said.Count(r.Rows.Guards, "guard"),
		said.Count(r.Rows.HealthChecks, "health check"),
	}, ", ")
}

// watches are the resources of the API server and how long ago it said something of them.
func (r Status) watches() string {
	all := slices.SortedFunc(slices.Values(r.Watches), func(a, b engine.Watch) int {
		return cmp.Compare(a.Resource, b.Resource)
	})
	var texts []string
	for _, w := range all {
		texts = append(texts, fmt.Sprintf("%s %s ago", w.Resource, r.Age(w.LastMessage)))
	}
	return strings.Join(texts, ", ")
}

func (r Status) time(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return fmt.Sprintf("%s (%s ago)", t.Local().Format(time.RFC3339), r.Age(t))
}

// Age is how long ago a time was, by the agent's clock.
func (r Status) Age(t time.Time) string { return duration.HumanDuration(r.Now.Sub(t)) }

// Facts are names and texts, what people look for first.
func (r Status) Facts() [][2]string {
	return [][2]string{{"healthy", r.Health()}, {"node", r.node()}, {"data plane", r.PlaneText()}}
}

// Alarms say what is wrong.
func (r Status) Alarms() (texts []string) {
	for _, a := range []struct {
		is         bool
		name, text string
	}{
		{!r.Healthy, "healthy: ", r.Health()},
		{!r.NodeEligible, "node ", r.node()},
		{r.Failures > 0, "failures: ", fmt.Sprintf("%d in a row: %s", r.Failures, r.BriefError())},
		{r.Undone != nil, "rules undone ", r.undone()},
		{r.ConfigurationRefused != "", "configuration ", r.configuration()},
	} {
		if a.is {
			texts = append(texts, a.name+a.text)
		}
	}
	for _, p := range r.Problems {
		texts = append(texts, p.Error())
	}
	return texts
}
