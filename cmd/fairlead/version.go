package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/version"
)

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "print which Fairlead this is",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(c.OutOrStdout(), version.Line("fairlead"))
			return err
		},
	}
}
