package plugin

import (
	"errors"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
)

func migrateCommand() *cobra.Command {
	return cli.OnlyOnLinux("migrate", "say what a change of the proxy or mode means for this node", "Windows has one mode")
}

func traceCommand() *cobra.Command {
	return cli.OnlyOnLinux("trace", "send one real packet, print each step that it takes, and compare",
		"it asks that kernel's packet filter")
}

// flowWatch is nothing on Windows: HNS does not tell which connections begin.
type flowWatch struct{}

func watchFlows(string) (w *flowWatch, counted bool, err error) {
	return nil, false, errors.New("HNS does not tell them")
}

func (*flowWatch) take() (all map[way]*opened, missed bool) { return nil, false }
func (*flowWatch) close()                                   {}
