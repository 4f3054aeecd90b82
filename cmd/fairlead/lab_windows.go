package main

import (
	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
)

// labCommand is a command of the laboratory.
func labCommand(name, short string) *cobra.Command {
	return cli.OnlyOnLinux(name, short, "it builds virtual clusters of network namespaces")
}
