package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
)

// cleaning is what is to be cleaned up.
type cleaning struct {
	own    bool
	force  bool
	socket string // for control
	log    *slog.Logger
}

func cleanCommand() *cobra.Command {
	o := cleaning{log: daemon.NewLogs(os.Stderr).Logger()}
	c := &cobra.Command{
		Use:   "clean",
		Short: "delete all that any data plane of Fairlead, or kube-proxy, has made in the kernel",
		Args:  cobra.NoArgs,
	}
	socket := daemon.NewFlags().Lookup("control-socket")
	socket.Usage = "remove this socket if no process listens on it"
	c.Flags().AddFlag(socket)
	c.RunE = func(c *cobra.Command, _ []string) error {
		o.socket = socket.Value.String()
		return clean(c.Context(), o)
	}
	c.Flags().BoolVar(&o.own, "own", false,
		"only what Fairlead has made, and no open connection needs: for a node where kube-proxy is back")
	c.Flags().BoolVar(&o.force, "force", false, "clean even while Fairlead runs here, which will restore its rules")
	return c
}

func clean(ctx context.Context, o cleaning) error {
	if err := daemon.Alone(); err != nil && !o.force {
		return cli.Failed(fmt.Errorf("%w, or use fairlead clean --force", err))
	}
	var said strings.Builder
	out, what := io.MultiWriter(os.Stdout, &said), "Fairlead"
	dead, err := engine.RemoveDeadSocket(o.socket)
	if dead && err == nil {
		fmt.Fprintf(out, "control socket: removed %s\n", o.socket)
	}
	if checks := daemon.HealthFileBeside(o.socket); o.socket != "" && os.Remove(checks) == nil {
		fmt.Fprintf(out, "health checks: removed %s\n", checks)
	}
	if o.own {
		err = errors.Join(err, daemon.CleanOwn(ctx, out))
	} else {
		what += " or kube-proxy"
		err = errors.Join(err, daemon.Clean(ctx, out, o.log))
	}
	if err == nil && said.Len() == 0 {
		fmt.Printf("nothing was left of %s\n", what)
	}
	return cli.Failed(err)
}
