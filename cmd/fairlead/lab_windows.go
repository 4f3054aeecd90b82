package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
)

// labCommand is a command of the laboratory, whose virtual clusters Windows cannot have.
func labCommand(name, short string) *cobra.Command { return needsLinux(name, short, "virtual clusters") }

func switchCommand() *cobra.Command {
	return needsLinux("switch", "change the data plane of the running proxy (on Linux)", "several data planes")
}

// needsLinux is a command that fails, and says for want of what.
func needsLinux(name, short, lack string) *cobra.Command {
	return &cobra.Command{
		Use:                name,
		Short:              short,
		DisableFlagParsing: true,
		RunE: func(*cobra.Command, []string) error {
			return cli.Failed(fmt.Errorf("%s needs Linux: Windows has no %s", name, lack))
		},
	}
}
