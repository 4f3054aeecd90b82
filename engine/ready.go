package engine

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/said"
)

// These are the names of the checks in /readyz. A check of /livez fails when the same has been wrong for HealthTimeout.
const (
	checkProgrammed = "programmed" // all rows have been in force once
	checkChanges    = "changes"    // are programmed
	checkRules      = "rules"      // stay as they are
	checkAudit      = "audit"      // the kernel can be compared with the rows
)

// check is what is wrong; empty: nothing.
type check struct{ name, wrong string }

// checks reports what is wrong. A condition that should pass by itself is wrong after patience, a failure after
// tolerance.
func (s Status) checks(now time.Time, patience, tolerance time.Duration) []check {
	all := []check{{name: checkProgrammed}, {name: checkChanges}, {name: checkRules}, {name: checkAudit}}
	lasts := func(since time.Time, limit time.Duration) bool { return !since.IsZero() && now.Sub(since) > limit }
	if s.LastProgrammed.IsZero() && !defect.Is(defect.HealthEarly) {
		all[0].wrong = "nothing has been programmed yet"
	}
	failing := s.Failures > 0 && !s.Partial
	if lasts(s.WaitingSince, patience) || failing && lasts(s.WaitingSince, tolerance) {
		all[1].wrong = "a change waits " + lasting(now, s.WaitingSince) + ": " + cmp.Or(s.Error, "the process is busy")
	}
	if u := s.Undone; u != nil && lasts(u.Since, tolerance) {
		all[2].wrong = fmt.Sprintf("%s undoes them %s; %d repairs did not hold",
			cmp.Or(u.Author, "another program"), lasting(now, u.Since), u.Repairs)
	}
	if lasts(s.AuditUnfinishedSince, patience) {
		all[3].wrong = "the kernel could not be compared with the rows " + lasting(now, s.AuditUnfinishedSince)
	}
	return all
}

func lasting(now, at time.Time) string {
	return fmt.Sprintf("since %s (for %v)", at.UTC().Format(time.RFC3339), now.Sub(at).Round(time.Second))
}

// Healthy reports whether all is well, or has not been for less than the timeout.
func (s Status) Healthy(now time.Time, timeout time.Duration) bool {
	return s.healthyBut(nil, now, timeout)
}

// healthyBut is Healthy without some checks.
func (s Status) healthyBut(excluded []string, now time.Time, timeout time.Duration) bool {
	return !slices.ContainsFunc(s.checks(now, timeout, timeout), func(c check) bool {
		return c.wrong != "" && !slices.Contains(excluded, c.name)
	})
}

// excluded are the checks that a request leaves out, as for the components of Kubernetes.
func excluded(r *http.Request) []string { return r.URL.Query()["exclude"] }

// livezHandler answers as kube-proxy does. A request can exclude checks that a restart of this process does not cure.
func (c *checks) livezHandler(w http.ResponseWriter, r *http.Request) {
	status, _ := c.health()
	healthy := status.healthyBut(excluded(r), time.Now(), c.timeout)
	c.answered("/livez", healthy)
	answer(w, healthy, health(status, healthy, nil))
}

// readyzHandler says which check fails, as the components of Kubernetes do. Problems of single rows, or of the API
// server, are reported and fail no check: no connection would be better off on another node.
func (c *checks) readyzHandler(w http.ResponseWriter, r *http.Request) {
	status, _ := c.health()
	text, ok := c.report(status, excluded(r), time.Now())
	c.answered("/readyz", ok)
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(httpStatus(ok))
	switch _, verbose := r.URL.Query()["verbose"]; {
	case !ok:
		fmt.Fprintf(w, "%sreadyz check failed\n", text)
	case verbose:
		fmt.Fprintf(w, "%sreadyz check passed\n", text)
	default:
		fmt.Fprint(w, "ok")
	}
}

// report has a line for each check.
func (c *checks) report(status Status, excluded []string, now time.Time) (lines string, ok bool) {
	var text strings.Builder
	ok = true
	for _, one := range status.checks(now, c.timeout, 0) {
		switch {
		case slices.Contains(excluded, one.name):
			fmt.Fprintf(&text, "[+]%s excluded: ok\n", one.name)
		case one.wrong == "":
			fmt.Fprintf(&text, "[+]%s ok\n", one.name)
		default:
			ok = false
			fmt.Fprintf(&text, "[-]%s failed: %s\n", one.name, line(one.wrong))
		}
	}
	text.WriteString("[+]rows ok")
	if status.Partial {
		text.WriteString(", but some are not in force: " + line(status.Error))
	}
	text.WriteString("\n")
	if c.about != nil {
		for _, w := range c.about().Watches {
			fmt.Fprintf(&text, "[+]watch-%s ok, heard of %v ago\n", w.Resource, now.Sub(w.LastMessage).Round(time.Second))
		}
	}
	return text.String(), ok
}

// line is a text in one line of bounded length.
func line(text string) string { return strings.Join(strings.Fields(said.Brief(text)), " ") }
