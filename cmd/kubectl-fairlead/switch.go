package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/programs"
)

func switchCommand(k *cluster) *cobra.Command {
	timeout := 2 * time.Minute
	c := &cobra.Command{
		Use:   "switch PLANE",
		Short: "change the data plane node by node, while connections go on",
		Long: "switch has one agent after another serve by another data plane, as fairlead switch does on a node. Before\n" +
			"the next one it waits until the agent is healthy. It stops at the first failure and says which nodes are\n" +
			"switched. Interrupted (Ctrl-C), it ends after the node that is being switched. It leaves Windows nodes alone.\n\n" +
			"The configuration stays as it is: an agent that starts again goes back to its mode, unless you set that, too.\n\n" +
			"Exit status 1: not all nodes are switched.",
		Example: "  kubectl fairlead switch ebpf --node worker-1\n  kubectl fairlead switch ebpf",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			agents, err := k.agents(c.Context())
			if err != nil {
				return err
			}
			agents = slices.DeleteFunc(agents, func(a agent) bool {
				if a.windows {
					fmt.Printf("%s: not switched: Windows has one data plane\n", a.node)
				}
				return a.windows
			})
			if len(agents) == 0 {
				return cli.Failed(errors.New("no node is switched"))
			}
			return k.switchAll(c.Context(), agents, args[0], timeout)
		},
	}
	c.Flags().DurationVar(&timeout, "timeout", timeout, "for each agent to be healthy after its switch")
	return c
}

func (k *cluster) switchAll(ctx context.Context, agents []agent, plane string, timeout time.Duration) error {
	for i, a := range agents {
		left := fmt.Sprintf("switched: %s; not begun: %s", names(agents[:i]), names(agents[i:]))
		if ctx.Err() != nil {
			return cli.Exit(cli.ExitInterrupted, fmt.Errorf("interrupted; %s", left))
		}
		if err := k.switchOne(context.WithoutCancel(ctx), a, plane, timeout); err != nil {
			left = fmt.Sprintf("switched: %s; not begun: %s", names(agents[:i]), names(agents[i+1:]))
			return cli.Failed(fmt.Errorf("%s: %w\n%s", a.node, err, left))
		}
	}
	return nil
}

// switchOne switches a node, and waits until its agent is healthy.
func (k *cluster) switchOne(ctx context.Context, a agent, plane string, timeout time.Duration) error {
	var problem bytes.Buffer
	out := &prefixed{to: os.Stdout, prefix: a.node + ": "}
	err := k.exec(ctx, a, remotecommand.StreamOptions{Stdout: out, Stderr: &problem}, "switch", plane)
	var exit exec.CodeExitError
	if errors.As(err, &exit) {
		err = errors.New(strings.TrimPrefix(strings.TrimSpace(problem.String()), programs.Agent+": "))
	}
	if err != nil {
		return fmt.Errorf("not switched: %w", err)
	}
	for end := time.Now().Add(timeout); ; time.Sleep(time.Second) {
		s := k.statusOf(ctx, a)
		if s.Status != nil && s.Status.Good() && s.Status.Plane == plane {
			_, err := fmt.Fprintf(out, "healthy\n")
			return err
		}
		if time.Now().After(end) {
			why := s.Error
			if s.Status != nil {
				why = fmt.Sprintf("data plane %s, %s", s.Status.PlaneText(), strings.Join(s.Status.Alarms(), "; "))
			}
			return fmt.Errorf("switched, and not healthy after %s: %s", timeout, oneLine(why))
		}
	}
}

// prefixed begins each line with a text.
type prefixed struct {
	to     io.Writer
	prefix string
	within bool // a line
}

func (p *prefixed) Write(text []byte) (int, error) {
	for line := range bytes.Lines(text) {
		if !p.within {
			_, _ = io.WriteString(p.to, p.prefix)
		}
		if _, err := p.to.Write(line); err != nil {
			return 0, err
		}
		p.within = !bytes.HasSuffix(line, []byte("\n"))
	}
	return len(text), nil
}
