package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

func probeCommand() *cobra.Command {
	var q serviceQuestion
	timeout := 2 * time.Second
	c := &cobra.Command{
		Use:   "probe [[NAMESPACE/]NAME]",
		Short: "connect to each endpoint of a Service, or of all, and say which answers, and how fast",
		Long: "probe connects from here to each endpoint of a Service, not by its addresses. It says which endpoint\n" +
			"answers, how fast, or with what error. A connection of TCP is opened and closed. UDP and SCTP are left out: an\n" +
			"endpoint of UDP answers only what it understands. Exit status 1: a ready endpoint does not answer.",
		Example: "  fairlead probe shop/cart\n  fairlead probe -n shop --timeout 5s",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return q.probe(c.Context(), args, timeout)
		},
		ValidArgsFunction: q.complete,
	}
	q.addTo(c)
	c.Flags().DurationVar(&timeout, "timeout", timeout, "for each connection")
	return c
}

// probed is what came of an endpoint.
type probed struct {
	Service  string        `json:"service"`
	Port     string        `json:"port"`
	Endpoint string        `json:"endpoint"`
	Node     string        `json:"node,omitempty"`
	State    string        `json:"state"`
	Took     time.Duration `json:"nanoseconds"`
	Error    string        `json:"error,omitempty"` // empty: it answers
}

// atATime bounds the connections that are being opened.
const atATime = 64

func (q *serviceQuestion) probe(ctx context.Context, args []string, timeout time.Duration) error {
	all, err := q.some(ctx, args, true)
	if err != nil {
		return err
	}
	results, others := probeAll(ctx, all, timeout)
	if ctx.Err() != nil {
		return cli.Exit(cli.ExitInterrupted, nil)
	}
	if others > 0 {
		fmt.Fprintf(os.Stderr, "fairlead: left out: %s of UDP or SCTP\n", said.Count(others, "port"))
	}
	silent := slices.ContainsFunc(results, func(r probed) bool { return r.Error != "" && r.State == service.Ready })
	if q.Output == "json" {
		return errors.Join(cli.PrintJSON(results), cli.Found(silent))
	}
	rows := [][]string{{"SERVICE", "PORT", "ENDPOINT", "NODE", "STATE", "ANSWER"}}
	for _, r := range results {
		rows = append(rows, []string{r.Service, r.Port, r.Endpoint, r.Node, r.State, r.answer()})
	}
	return errors.Join(cli.PrintTable(rows), cli.Found(silent))
}

func (r probed) answer() string {
	if r.Error == "" {
		return "in " + r.Took.Round(10*time.Microsecond).String()
	}
	return r.Error
}

// probeAll connects to each endpoint of TCP, and counts the ports of other protocols.
func probeAll(ctx context.Context, all engine.Services, timeout time.Duration) (results []probed, others int) {
	results = []probed{}
	for _, s := range all.Services {
		for _, p := range s.Ports {
			if !strings.HasSuffix(p.Port, "/tcp") {
				others++
				continue
			}
			for _, e := range p.Endpoints {
				results = append(results, probed{
					Service: s.Service, Port: portText(p), Endpoint: e.At, Node: e.Node, State: e.State,
				})
			}
		}
	}
	var group errgroup.Group
	group.SetLimit(atATime)
	for i := range results {
		group.Go(func() error {
			results[i].Took, results[i].Error = connect(ctx, results[i].Endpoint, timeout)
			return nil
		})
	}
	_ = group.Wait()
	return results, others
}

// connect opens a connection and closes it.
func connect(ctx context.Context, to string, timeout time.Duration) (took time.Duration, failure string) {
	start := time.Now()
	conn, err := (&net.Dialer{Timeout: timeout}).DialContext(ctx, "tcp", to)
	took = time.Since(start)
	var op *net.OpError
	switch {
	case err == nil:
		_ = conn.Close()
		return took, ""
	case errors.As(err, &op) && op.Timeout():
		return took, fmt.Sprintf("no answer in %s", timeout)
	case errors.As(err, &op):
		return took, strings.TrimPrefix(op.Err.Error(), "connect: ")
	}
	return took, err.Error()
}
