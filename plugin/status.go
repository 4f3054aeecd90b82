package plugin

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/answer"
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
	i.AddTo(c)
	return c
}

func (i *inspection) status(ctx context.Context) error {
	var s answer.Status
	if err := i.Get(ctx, "/status", &s.Report); err != nil {
		return err
	}
	return errors.Join(i.Print(s), cli.Found(!s.Good()))
}
