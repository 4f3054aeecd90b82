package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/advise"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/plugin/ask"
	"fairlead.dev/fairlead/service"
)

// recommendation is what is to be found out.
type recommendation struct {
	ask.Inspection
	duration    time.Duration
	connections string
	rowsFile    string
	planes      []string
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
	r.AddOfflineTo(c)
	for _, name := range []string{"kubeconfig", "master", "iptables-backend"} {
		c.Flags().AddFlag(r.Flags.Lookup(name))
	}
	c.Flags().DurationVar(&r.duration, "duration", 10*time.Second, "how long to measure, all data planes together")
	c.Flags().StringVar(&r.rowsFile, "rows", "",
		"the node's rows, as fairlead dump prints them: a `file`, or - for the standard input")
	c.Flags().StringSliceVar(&r.planes, "planes", daemon.Planes(), "the data planes to measure; others may be chosen, too")
	c.Flags().StringVar(&r.connections, "connections", string(advise.Mixed),
		"what they are like: short (one request each), long (they stay open), or mixed")
	return c
}

func (r *recommendation) run(ctx context.Context) error {
	if err := r.check(); err != nil {
		return err
	}
	c, err := r.Flags.Load()
	if err != nil {
		return cli.Misused(err)
	}
	interrupted := cli.Exit(cli.ExitInterrupted, errors.New("interrupted"))
	rows, err := r.rows(ctx)
	if ctx.Err() != nil {
		return interrupted
	}
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGPIPE) // clean up then, too
	defer stop()
	line := newProgress()
	begin := time.Now()
	m := advise.Measure(ctx, advise.Options{
		Planes: r.candidates(c), State: rows, Duration: r.duration, Progress: line.measuring,
	})
	took := time.Since(begin)
	defer m.Wait() // the answer need not wait for what is being removed
	line.clear()
	if ctx.Err() != nil {
		return interrupted
	}
	found := advise.Case{
		Rows: advise.Count(rows), Traffic: advise.Traffic(r.connections), Findings: append(m.Findings, r.others()...),
	}
	current, _ := daemon.Present() // without the right to look it is not said
	report := advise.NewReport(found, current, took)
	if err := r.Print(recommended{report}); err != nil || report.Plane != "" {
		return err
	}
	return cli.Exit(cli.ExitFound, nil)
}

// candidates are the data planes to measure, each as the configuration has it.
func (r *recommendation) candidates(c *config.Config) (all []advise.Plane) {
	for _, name := range r.planes {
		open := func(at advise.Place) (dataplane.Dataplane, error) { return daemon.OpenApart(c, name, daemon.Apart(at)) }
		all = append(all, advise.Plane{Name: name, Open: open})
	}
	return all
}

// others are the data planes that are not to be measured.
func (r *recommendation) others() (all []advise.Finding) {
	for _, name := range daemon.Planes() {
		if !slices.Contains(r.planes, name) {
			all = append(all, advise.Finding{Plane: name, Unmeasured: "it was not to be measured"})
		}
	}
	return all
}

func (r *recommendation) check() error {
	kinds := []advise.Traffic{advise.Mixed, advise.Short, advise.Long}
	if !slices.Contains(kinds, advise.Traffic(r.connections)) {
		return cli.Misused(fmt.Errorf("--connections: %q is none of mixed, short, long", r.connections))
	}
	for _, name := range r.planes {
		if !slices.Contains(daemon.Planes(), name) {
			return cli.Misused(fmt.Errorf("--planes: %q is none of %s", name, strings.Join(daemon.Planes(), ", ")))
		}
	}
	if r.rowsFile != "" && r.IsOffline() {
		return cli.Misused(errors.New("--rows and --manifests exclude each other: both say what the node's rows are"))
	}
	if r.duration < time.Second {
		return cli.Misused(fmt.Errorf("--duration: %s is too short, want 1s or more", r.duration))
	}
	return nil
}

// rows are what the node serves.
func (r *recommendation) rows(ctx context.Context) (*model.State, error) {
	if r.rowsFile != "" {
		return r.readRows()
	}
	if !r.IsOffline() && !r.Flags.Lookup("kubeconfig").Changed && !r.Flags.Lookup("master").Changed {
		answer, err := r.Text(ctx, "/dump")
		if err != nil {
			return nil, err
		}
		state, err := model.ParseState(string(answer))
		return state, cli.Failed(err)
	}
	table, err := r.Offline(ctx)
	if err != nil {
		return nil, err
	}
	state, _, _ := table.Update(service.Batch{})
	return state, nil
}

// readRows reads what fairlead dump has printed.
func (r *recommendation) readRows() (*model.State, error) {
	file := r.rowsFile
	if file == "-" {
		file = "/dev/stdin"
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, cli.Misused(fmt.Errorf("--rows: %w", err))
	}
	state, err := model.ParseState(string(text))
	if err != nil {
		return nil, cli.Misused(fmt.Errorf("--rows: %s: %w", r.rowsFile, err))
	}
	return state, nil
}

// recommended is a Report for a terminal.
type recommended struct{ advise.Report }

func (r recommended) String() string { return r.Text(cli.Columns()) }
