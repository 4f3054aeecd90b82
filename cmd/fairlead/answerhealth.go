package main

import (
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/engine"
)

func answerHealthCommand() *cobra.Command {
	socket := daemon.NewFlags().Lookup("control-socket")
	c := &cobra.Command{
		Use:   "answer-health",
		Short: "answer load balancers at health check ports for run, also while that restarts",
		Long: "answer-health answers at the healthCheckNodePorts of Services what a process run says that has\n" +
			"healthCheckMaxAge (--health-check-max-age). It goes on for that time when that process ends, and says 503 then.\n" +
			"It needs no rights, but to read the file beside the control socket.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			log := daemon.NewLogs(os.Stderr).Logger()
			engine.Respond(c.Context(), daemon.HealthFileBeside(socket.Value.String()), log)
			return nil
		},
	}
	socket.Usage = "the control socket of run"
	c.Flags().AddFlag(socket)
	return c
}
