package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/said"
)

func statusCommand() *cobra.Command {
	var i inspection
	c := &cobra.Command{
		Use:   "status",
		Short: "say how the running proxy does, and what keeps load balancers from using this node",
		Long: "status says how the running proxy does: whether the kernel follows the cluster, what failed,\n" +
			"and when the API server was last heard. Exit status 1: no proxy runs, or its /healthz says 503.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return i.status(c.Context()) },
	}
	i.AddTo(c.Flags())
	return c
}

func (i *inspection) status(ctx context.Context) error {
	if err := i.Check(); err != nil {
		return err
	}
	r, err := i.askStatus(ctx)
	if err != nil {
		return err
	}
	return errors.Join(i.Print(r), r.exit())
}

// askStatus has the running proxy say how it does.
func (i *inspection) askStatus(ctx context.Context) (r report, err error) {
	answer, err := i.Answer(ctx, "/status")
	if err != nil {
		return r, cli.Failed(err)
	}
	if err := json.Unmarshal(answer, &r.Report); err != nil {
		return r, cli.Failed(fmt.Errorf("the proxy's answer: %w", err))
	}
	return r, nil
}

// report is a Report for people.
type report struct{ engine.Report }

// exit is exit status 1 if /healthz says 503.
func (r report) exit() error {
	if r.Healthy && r.NodeEligible {
		return nil
	}
	return cli.Exit(cli.ExitFound, nil)
}

// String has one line for each question.
func (r report) String() string {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, row := range [][2]string{
		{"healthy", r.health()},
		{"node", r.node()},
		{"data plane", r.plane()},
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

func (r report) health() string {
	switch {
	case r.Healthy:
		return "yes"
	case r.LastProgrammed.IsZero():
		return "no, nothing has been programmed yet: the log says what it waits for"
	}
	return "no: " + r.wrong()
}

// wrong is what has been so for too long.
func (r report) wrong() string {
	switch {
	case r.Undone != nil:
		return "repairs of the rules do not hold"
	case r.WaitingSince.IsZero() && !r.AuditUnfinishedSince.IsZero():
		return "the kernel cannot be compared with the rows"
	}
	return "a change waits for too long"
}

// undone names the program that changes the rules again after repairs; it is empty where there is none.
func (r report) undone() string {
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

func (r report) node() string {
	switch {
	case !r.NodeEligible:
		return r.Node + ", load balancers should not use it: the Node is being deleted, or there is no such Node"
	case !r.Healthy:
		return r.Node + ", load balancers should not use it: it is not healthy"
	}
	return r.Node + ", load balancers may use it"
}

func (r report) plane() string {
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
func (r report) configuration() string {
	if r.ConfigurationRefused == "" {
		return ""
	}
	return "refused, the one before stays: " + strings.ReplaceAll(r.ConfigurationRefused, "\n", " ")
}

// draining is what planes still have that are not in force any more.
func (r report) draining() string {
	var words []string
	for _, c := range r.Draining {
		words = append(words, fmt.Sprintf("%s of data plane %s", said.Count(c.Connections, "connection"), c.Plane))
	}
	return strings.Join(words, ", ")
}

func (r report) waiting() string {
	if r.WaitingSince.IsZero() {
		return "nothing"
	}
	return "a change, since " + r.time(r.WaitingSince)
}

func (r report) failures() string {
	if r.Failures == 0 {
		return "none"
	}
	return fmt.Sprintf("%d in a row: %s", r.Failures, r.Error)
}

// problems has a line for each, below each other.
func (r report) problems() string {
	lines := make([]string, len(r.Problems))
	for i, p := range r.Problems {
		lines[i] = strings.ReplaceAll(p.Error(), "\n", " ")
	}
	return strings.Join(lines, "\n\t")
}

func (r report) rows() string {
	return strings.Join([]string{
		said.Count(r.Rows.Frontends, "frontend"), said.Count(r.Rows.Pools, "pool"), said.Count(r.Rows.Guards, "guard"),
		said.Count(r.Rows.HealthChecks, "health check"),
	}, ", ")
}

// watches are the resources of the API server and how long ago it said something of them.
func (r report) watches() string {
	all := slices.SortedFunc(slices.Values(r.Watches), func(a, b engine.Watch) int {
		return cmp.Compare(a.Resource, b.Resource)
	})
	var texts []string
	for _, w := range all {
		texts = append(texts, fmt.Sprintf("%s %s ago", w.Resource, r.age(w.LastMessage)))
	}
	return strings.Join(texts, ", ")
}

func (r report) time(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return fmt.Sprintf("%s (%s ago)", t.Local().Format(time.RFC3339), r.age(t))
}

func (r report) age(t time.Time) string { return duration.HumanDuration(r.Now.Sub(t)) }
