package plugin

import (
	"errors"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
)

func migrateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "say what a change of the proxy or mode means for this node (on Linux)",
		RunE: func(*cobra.Command, []string) error {
			return cli.Failed(errors.New("migrate needs Linux: Windows has one mode"))
		},
	}
}
