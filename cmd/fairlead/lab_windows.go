package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
)

// labCommand is a command of the laboratory, which builds virtual clusters of network namespaces.
func labCommand(name, short string) *cobra.Command {
	return &cobra.Command{
		Use:                name,
		Short:              short + " (on Linux)",
		DisableFlagParsing: true,
		RunE: func(*cobra.Command, []string) error {
			return cli.Failed(fmt.Errorf("%s needs Linux: it builds virtual clusters of network namespaces", name))
		},
	}
}
