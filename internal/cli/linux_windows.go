package cli

import (
	"fmt"

	"github.com/spf13/cobra"
)

// OnlyOnLinux is a command that can do nothing on Windows but say why, whatever its flags are.
func OnlyOnLinux(name, short, why string) *cobra.Command {
	return &cobra.Command{
		Use:                name,
		Short:              short + " (on Linux)",
		FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
		RunE: func(*cobra.Command, []string) error {
			return Failed(fmt.Errorf("%s needs Linux: %s", name, why))
		},
	}
}
