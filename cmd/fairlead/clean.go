package main

import (
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/daemon"
)

func cleanCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "clean",
		Short: "delete all that any data plane of Fairlead, or kube-proxy, has made in the kernel",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return failed(daemon.Clean(c.Context(), os.Stdout, daemon.NewLogs(os.Stderr).Logger()))
		},
	}
}
