package plugin

import (
	"errors"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
)

func traceCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "trace",
		Short: "send one real packet, print each step that it takes, and compare (on Linux)",
		RunE: func(*cobra.Command, []string) error {
			return cli.Failed(errors.New("trace needs Linux: it asks that kernel's packet filter"))
		},
	}
}
