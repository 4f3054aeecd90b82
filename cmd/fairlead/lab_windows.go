package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
)

// labCommand is a command of the laboratory.
func labCommand(name, short string) *cobra.Command {
	return needsLinux(name, short, "it builds virtual clusters of network namespaces")
}

func switchCommand() *cobra.Command {
	return needsLinux("switch", "change the data plane of the running proxy", "Windows has one data plane")
}

// needsLinux is a command that fails, and says why.
func needsLinux(name, short, why string) *cobra.Command {
	return &cobra.Command{
		Use:                name,
		Short:              short + " (on Linux)",
		DisableFlagParsing: true,
		RunE: func(*cobra.Command, []string) error {
			return cli.Failed(fmt.Errorf("%s needs Linux: %s", name, why))
		},
	}
}
