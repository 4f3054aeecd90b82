package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/study"
	"fairlead.dev/fairlead/programs"
)

// failover is a run of that.
type failover struct {
	benchmark
	study.FailoverOptions
	short bool
}

func benchFailoverCommand() *cobra.Command {
	var o failover
	names, does := study.Failures()
	long := "failover has clients in a pod, on the node and outside connect to a Service, 200 times a second, while\n" +
		"backends fail. The API server hears of it forty seconds later. Failures are\n"
	for i, name := range names {
		long += fmt.Sprintf("  %-10s%s\n", name, does[i])
	}
	c := &cobra.Command{
		Use:   "failover",
		Short: "count the connections that fail while backends are dead and the API server does not know",
		Long:  long + "Exit status 1: something could not be measured.",
		Example: "  fairlead bench failover --planes nftables --short\n" +
			"  fairlead bench failover --peer kube-proxy=/usr/local/bin/kube-proxy --failure silent,slow",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c.Context()) },
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringSliceVar(&o.planes, "planes", study.Planes(), "Fairlead's data planes to compare")
	f.StringArrayVar(&o.peers, "peer", nil,
		"a kube-proxy to compare, in modes nftables and iptables: `NAME=PATH` (repeatable)")
	f.StringSliceVar(&o.Failures, "failure", names[:1], "what happens to backends: "+strings.Join(names, ", "))
	f.StringSliceVar(&o.Health, "health", []string{"off"}, "settings of backendHealth to compare: off, observe, eject")
	f.DurationVar(&o.Timeout, "timeout", 5*time.Second, "how long a client waits for a connection and its answer")
	f.BoolVar(&o.short, "short", false, "20 seconds instead of 65: the API server hears of it after ten")
	f.StringVarP(&o.format, "format", "o", "text", "what to print, text or json")
	return c
}

func (o *failover) run(ctx context.Context) error {
	if err := o.complete(); err != nil {
		return cli.Misused(err)
	}
	if status, done, err := o.reexec(); done || err != nil {
		return cli.Exit(status, err)
	}
	agent, err := programs.Find(programs.Agent)
	if err != nil {
		return cli.Misused(fmt.Errorf("bench needs the program that it compares: %w", err))
	}
	o.Program = []string{agent}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGPIPE, unix.SIGHUP) // clean up then, too
	defer stop()
	line := newProgress()
	o.Say = line.say
	rows, err := study.Failover(ctx, o.FailoverOptions)
	line.clear()
	if err := errors.Join(err, o.print(rows)); err != nil {
		return cli.Failed(err)
	}
	if slices.ContainsFunc(rows, func(r study.FailoverRow) bool { return r.Lacking != "" }) {
		return cli.Exit(cli.ExitFound, errors.New("not all of it could be measured"))
	}
	return nil
}

// complete checks the flags, and says what follows from them.
func (o *failover) complete() error {
	names, _ := study.Failures()
	for flag, both := range map[string][2][]string{
		"failure": {o.Failures, names}, "health": {o.Health, {"off", "observe", "eject"}},
		"format": {{o.format}, {"text", "json"}},
	} {
		for _, v := range both[0] {
			if !slices.Contains(both[1], v) {
				return fmt.Errorf("--%s: %q is none of %s", flag, v, strings.Join(both[1], ", "))
			}
		}
	}
	if o.Timeout <= 0 {
		return fmt.Errorf("--timeout: %s is no time", o.Timeout)
	}
	all, err := o.contenders()
	if err != nil {
		return err
	}
	o.Contenders = slices.DeleteFunc(all, func(c study.Contender) bool {
		return c.Kind == study.Direct || c.Kind == study.Again || c.Kind == study.Peer && c.Plane == "ipvs"
	})
	o.Rate, o.Event, o.Removal, o.End = 200, 5*time.Second, 45*time.Second, 65*time.Second
	if o.short {
		o.Event, o.Removal, o.End = 2*time.Second, 12*time.Second, 20*time.Second
	}
	return nil
}

func (o *failover) print(rows []study.FailoverRow) error {
	if o.format == "json" {
		return cli.PrintJSON(rows)
	}
	var lacking []string
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PLANE\tFAILURE\tHEALTH\tATTEMPTS\tFAILED\tWORST SECOND\tLAST FAILURE\tAFTER REMOVAL\t"+
		"WRONGLY EJECTED\t> 0.9 S")
	for _, r := range rows {
		if r.Lacking != "" {
			lacking = append(lacking, fmt.Sprintf("%s, %s: %s", r.Contender, r.Failure, r.Lacking))
			continue
		}
		last := "-"
		if r.Failed > 0 {
			last = fmt.Sprintf("%.1f s", r.LastFailure)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%d\t%s\t%d\t%d\t%d\n", r.Contender, r.Failure, r.Health, r.Attempts, r.Failed,
			r.WorstSecond, last, r.AfterRemoval, r.WronglyEjected, r.Delayed)
	}
	for _, line := range lacking {
		fmt.Fprintln(w, line)
	}
	return w.Flush()
}
