package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/cli"
)

// cleaning is what is to be cleaned up.
type cleaning struct {
	own   bool
	force bool
	log   *slog.Logger
}

func cleanCommand() *cobra.Command {
	o := cleaning{log: daemon.NewLogs(os.Stderr).Logger()}
	c := &cobra.Command{
		Use:   "clean",
		Short: "delete all that any data plane of Fairlead, or kube-proxy, has made in the kernel",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return clean(c.Context(), o) },
	}
	c.Flags().BoolVar(&o.own, "own", false, "only what Fairlead has made: for a node where kube-proxy is back")
	c.Flags().BoolVar(&o.force, "force", false, "clean even while Fairlead runs here, which will restore its rules")
	return c
}

func clean(ctx context.Context, o cleaning) error {
	if err := daemon.Alone(); err != nil && !o.force {
		return cli.Failed(fmt.Errorf("%w, or use fairlead clean --force", err))
	}
	if o.own {
		return cli.Failed(daemon.CleanOwn(ctx, os.Stdout))
	}
	return cli.Failed(daemon.Clean(ctx, os.Stdout, o.log))
}
