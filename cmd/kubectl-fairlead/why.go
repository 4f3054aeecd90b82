package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/answer"
)

// nodeFindings are those of a node's agent.
type nodeFindings struct {
	Node     string           `json:"node"`
	Error    string           `json:"error,omitempty"` // why there are none
	Findings *answer.Findings `json:"findings,omitempty"`
}

func whyCommand(k *cluster) *cobra.Command {
	var o cli.Format
	c := &cobra.Command{
		Use:   "why [NAMESPACE/]SERVICE",
		Short: "say why a Service does not work, as each node finds; the worst first",
		Long: "why has each agent check each step between the Service and its backends, on its node. Nodes where a step\n" +
			"fails come first. Exit status 1: a step fails on a node, or an agent does not answer.",
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return k.why(c.Context(), o, args[0]) },
	}
	o.AddFormatTo(c)
	return c
}

func (k *cluster) why(ctx context.Context, o cli.Format, name string) error {
	agents, err := k.agents(ctx)
	if err != nil {
		return err
	}
	if name, err = k.named(name); err != nil {
		return err
	}
	all := each(agents, func(a agent) nodeFindings {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		var f answer.Findings
		if err := k.get(ctx, a, &f, "why", name); err != nil {
			return nodeFindings{Node: a.node, Error: err.Error()}
		}
		return nodeFindings{Node: a.node, Findings: &f}
	})
	slices.SortStableFunc(all, func(a, b nodeFindings) int { return cmp.Compare(b.badness(), a.badness()) })
	bad := cli.Found(all[0].badness() > answer.Warned)
	if o.Output == "json" {
		return errors.Join(cli.PrintJSON(all), bad)
	}
	for _, f := range all {
		fmt.Print(f)
	}
	return bad
}

// badness of an agent that does not answer is between those of a warning and a failure.
func (f nodeFindings) badness() int {
	if f.Findings == nil {
		return answer.Warned + 1
	}
	return f.Findings.Badness()
}

// String has one line for a node where all is well.
func (f nodeFindings) String() string {
	if f.Findings == nil {
		return fmt.Sprintf("%s: %s\n", f.Node, oneLine(f.Error))
	}
	text := f.Findings.String()
	if f.badness() == 0 {
		text, _, _ = strings.Cut(text, "\n")
		text += "\n"
	}
	return f.Node + ": " + text
}
