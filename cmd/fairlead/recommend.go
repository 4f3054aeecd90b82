package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/signal"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/advise"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// recommendation is what is to be found out.
type recommendation struct {
	inspection
	duration    time.Duration
	connections string
}

func recommendCommand() *cobra.Command {
	var r recommendation
	c := &cobra.Command{
		Use:   "recommend",
		Short: "say which data plane suits this node, by what its kernel can do and by measuring",
		Long: "recommend opens each data plane in network namespaces of its own, fills it with this node's rows and\n" +
			"measures it: connections, requests and changes. It says which one suits the node, why, and what it found.\n" +
			"The rows are those of the running proxy, of manifests or of an API server. Nothing on the machine is changed.\n" +
			"It needs root; without it there are published figures. Exit status 1: no data plane can run here.",
		Example: "  fairlead recommend\n  fairlead recommend --manifests all.yaml --duration 1m --connections short",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return r.run(c.Context()) },
	}
	r.addOfflineTo(c.Flags())
	for _, name := range []string{"kubeconfig", "master", "iptables-backend"} {
		c.Flags().AddFlag(lookup(r.flags, name))
	}
	c.Flags().DurationVar(&r.duration, "duration", 10*time.Second, "how long to measure, all data planes together")
	c.Flags().StringVar(&r.connections, "connections", string(advise.Mixed),
		"what they are like: short (one request each), long (they stay open), or mixed")
	return c
}

func (r *recommendation) run(ctx context.Context) error {
	if err := r.check(); err != nil {
		return err
	}
	c, err := r.flags.Load()
	if err != nil {
		return misused(err)
	}
	rows, err := r.rows(ctx)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGPIPE) // clean up then, too
	defer stop()
	line := newProgress()
	report := daemon.Recommend(ctx, daemon.Question{
		Config: c, State: rows, Traffic: advise.Traffic(r.connections), Duration: r.duration, Progress: line.measuring,
	})
	line.clear()
	if ctx.Err() != nil {
		return exitError{interrupted, errors.New("interrupted")}
	}
	if err := r.print(recommended{report}); err != nil || report.Plane != "" {
		return err
	}
	return exitError{status: exitFound}
}

func (r *recommendation) check() error {
	if err := r.inspection.check(); err != nil {
		return err
	}
	kinds := []advise.Traffic{advise.Mixed, advise.Short, advise.Long}
	if !slices.Contains(kinds, advise.Traffic(r.connections)) {
		return misused(fmt.Errorf("--connections: %q is none of mixed, short, long", r.connections))
	}
	if r.duration < time.Second {
		return misused(fmt.Errorf("--duration: %s is too short, want 1s or more", r.duration))
	}
	return nil
}

// rows are what the node serves.
func (r *recommendation) rows(ctx context.Context) (*model.State, error) {
	if !r.isOffline() && !lookup(r.flags, "kubeconfig").Changed && !lookup(r.flags, "master").Changed {
		output := r.output
		r.output = "text"
		answer, err := r.ask(ctx, "/dump", url.Values{})
		if r.output = output; err != nil {
			return nil, err
		}
		state, err := model.ParseState(string(answer))
		return state, failed(err)
	}
	table, err := r.offline(ctx)
	if err != nil {
		return nil, err
	}
	state, _, _ := table.Update(service.Batch{})
	return state, nil
}

// recommended is a Report for a terminal.
type recommended struct{ advise.Report }

func (r recommended) String() string { return r.Text(columns()) }
