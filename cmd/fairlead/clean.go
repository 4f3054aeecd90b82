package main

import (
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/daemon"
)

func cleanCommand() *cobra.Command {
	own := false
	c := &cobra.Command{
		Use:   "clean",
		Short: "delete all that any data plane of Fairlead, or kube-proxy, has made in the kernel",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if own {
				return failed(daemon.CleanOwn(c.Context(), os.Stdout))
			}
			return failed(daemon.Clean(c.Context(), os.Stdout, daemon.NewLogs(os.Stderr).Logger()))
		},
	}
	c.Flags().BoolVar(&own, "own", false, "only what Fairlead has made: for a node where kube-proxy is back")
	return c
}
