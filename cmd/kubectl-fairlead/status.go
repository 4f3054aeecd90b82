package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/answer"
)

// nodeStatus is what an agent says of itself.
type nodeStatus struct {
	Node   string         `json:"node"`
	Error  string         `json:"error,omitempty"` // why there is no status
	Status *answer.Status `json:"status,omitempty"`
}

func statusCommand(k *cluster) *cobra.Command {
	var o cli.Format
	c := &cobra.Command{
		Use:   "status",
		Short: "show all agents in a table: version, data plane, rows, health, what is wrong",
		Long: "status has each agent say how it does. Exit status 1: an agent is not healthy, or does not answer. Nodes\n" +
			"without an agent are not listed.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return k.status(c.Context(), o) },
	}
	o.AddFormatTo(c)
	return c
}

func (k *cluster) status(ctx context.Context, o cli.Format) error {
	agents, err := k.agents(ctx)
	if err != nil {
		return err
	}
	all := each(agents, func(a agent) nodeStatus { return k.statusOf(ctx, a) })
	bad := slices.ContainsFunc(all, func(s nodeStatus) bool { return s.Status == nil || !s.Status.Good() })
	if o.Output == "json" {
		return errors.Join(cli.PrintJSON(all), cli.Found(bad))
	}
	rows := [][]string{{"NODE", "VERSION", "DATA PLANE", "ROWS", "SINCE", "HEALTHY", "ERROR"}}
	for _, s := range all {
		rows = append(rows, append([]string{s.Node}, s.cells()...))
	}
	return errors.Join(cli.PrintTable(rows), cli.Found(bad))
}

func (k *cluster) statusOf(ctx context.Context, a agent) nodeStatus {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var s answer.Status
	if err := k.get(ctx, a, &s.Report, "status"); err != nil {
		return nodeStatus{Node: a.node, Error: err.Error()}
	}
	return nodeStatus{Node: a.node, Status: &s}
}

func (s nodeStatus) cells() []string {
	if s.Status == nil {
		return []string{"", "", "", "", "no", oneLine(s.Error)}
	}
	r, since, healthy := s.Status, "", "no"
	if !r.InForceSince.IsZero() {
		since = r.Age(r.InForceSince)
	}
	if r.Good() {
		healthy = "yes"
	}
	count := fmt.Sprint(r.Rows.Frontends + r.Rows.Pools + r.Rows.Guards)
	return []string{r.Version, r.PlaneText(), count, since, healthy, oneLine(strings.Join(r.Alarms(), "; "))}
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// patience is how long an agent has for an answer.
const patience = time.Minute

// passCommand is a command of the agent's program, which one node's agent runs.
func passCommand(k *cluster, use, short string, args cobra.PositionalArgs) *cobra.Command {
	var o cli.Format
	c := &cobra.Command{Use: use, Short: short + "; --node says by which agent", Args: args}
	name, _, _ := strings.Cut(use, " ")
	switch name {
	case "services":
		o.More = []string{"wide", "yaml"}
	case "explain":
		c.Flags().String("interface", "", "on which the packet arrives (default: eth0)")
	}
	o.AddFormatTo(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		agents, err := k.agents(c.Context())
		if err != nil {
			return err
		}
		if len(agents) > 1 {
			return cli.Misused(fmt.Errorf("name one --node of %s", names(agents)))
		}
		if name == "services" && len(args) > 0 {
			if args[0], err = k.named(args[0]); err != nil {
				return err
			}
		}
		words := append([]string{name, "-o", o.Output}, args...)
		if at := c.Flags().Lookup("interface"); at != nil && at.Changed {
			words = append(words, "--interface", at.Value.String())
		}
		if namespace := c.Flags().Lookup("namespace"); name == "services" && namespace.Changed {
			words = append(words, "-n", namespace.Value.String())
		}
		err = k.exec(c.Context(), agents[0], remotecommand.StreamOptions{Stdout: os.Stdout, Stderr: os.Stderr}, words...)
		var exit exec.CodeExitError
		if errors.As(err, &exit) {
			return cli.Exit(exit.Code, nil)
		}
		return cli.Failed(err)
	}
	return c
}

// names are the nodes of agents.
func names(agents []agent) string {
	var nodes []string
	for _, a := range agents {
		nodes = append(nodes, a.node)
	}
	return cmp.Or(strings.Join(nodes, ", "), "none")
}
