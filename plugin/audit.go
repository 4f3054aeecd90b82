package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/said"
)

func auditCommand() *cobra.Command {
	var i inspection
	c := &cobra.Command{
		Use:   "audit",
		Short: "compare every row with the kernel, say what is missing, foreign or wrong, and repair it",
		Long: "audit has the running proxy compare every row with what the kernel holds, now, and prints each\n" +
			"difference in a line. The proxy repairs it, as it does what it finds by itself. With --manifests the\n" +
			"kernel is compared with what these mean, and nothing is repaired; no proxy need run.\n" +
			"Exit status 1: there is a difference.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return i.audit(c.Context()) },
	}
	i.AddOfflineTo(c)
	return c
}

func (i *inspection) audit(ctx context.Context) error {
	var a audited
	var err error
	if i.IsOffline() {
		a, err = i.auditOffline(ctx)
	} else {
		err = i.Get(ctx, "/audit", &a.Audited)
	}
	if err != nil {
		return err
	}
	slices.SortFunc(a.Drifts, func(a, b dataplane.Drift) int { return strings.Compare(a.String(), b.String()) })
	return errors.Join(i.Print(a), cli.Found(len(a.Drifts)+len(a.Refused) > 0))
}

// auditOffline compares the kernel with manifests.
func (i *inspection) auditOffline(ctx context.Context) (a audited, err error) {
	table, err := i.Offline(ctx)
	if err != nil {
		return a, err
	}
	c, err := i.Flags.Load()
	if err != nil {
		return a, cli.Misused(err)
	}
	a.offline = true
	a.Audited, err = daemon.Audit(ctx, c, table, daemon.NewLogs(io.Discard).Logger())
	return a, cli.Failed(err)
}

// audited is an Audited for people.
type audited struct {
	engine.Audited
	offline bool // no agent repairs
}

// String has one line for each difference, and one about all.
func (a audited) String() string {
	var text strings.Builder
	for _, d := range a.Drifts {
		fmt.Fprintln(&text, d)
	}
	for _, d := range a.Refused {
		fmt.Fprintf(&text, "cannot be in force: %s\n", d)
	}
	for _, f := range a.ExternalChanges {
		fmt.Fprintf(&text, "the kernel reports: %s\n", f)
	}
	fmt.Fprintf(&text, "%s compared with the data plane %s in %s: %s\n",
		said.Count(a.Rows, "row"), a.Plane, a.Took.Round(100*time.Microsecond), a.result())
	return text.String()
}

func (a audited) result() string {
	n := said.Count(len(a.Drifts), "difference")
	switch {
	case len(a.Drifts)+len(a.Refused) == 0:
		return "no difference"
	case len(a.Drifts) == 0:
		return said.Count(len(a.Refused), "difference") +
			", which could not be programmed; the log and `fairlead status` say why"
	case a.offline:
		return n
	case a.Repaired:
		return n + ", repaired"
	default:
		return n + "; repairing failed and is tried again: " + a.Error
	}
}
