package plugin

import (
	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/plugin/migrate"
)

func migrateCommand() *cobra.Command { return migrate.Command() }
