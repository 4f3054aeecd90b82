package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/demo"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/programs"
)

func demoCommand() *cobra.Command {
	o := demo.Options{Out: os.Stdout}
	var output string
	c := &cobra.Command{
		Use:   "demo [-f MANIFEST]...",
		Short: "bring Services to life in a virtual cluster on this machine, use them all, and check what happens",
		Long: "demo builds a cluster of network namespaces, starts a virtual pod for each replica of the manifests,\n" +
			"runs the proxy on the cluster's node, and connects to every port of every Service from a pod, from\n" +
			"the node and from outside. Nothing outside of the namespaces is touched, and nothing remains.\n" +
			"Exit status 1: a Service did not do what it should. 2: the manifests have problems.",
		Example: "  fairlead demo\n  fairlead demo -f app.yaml -f more/\n" +
			"  kubectl get svc,endpointslices,pods,nodes -A -o yaml | fairlead demo -f -",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkFlags(output, o.Mode); err != nil {
				return err
			}
			o.JSON = output == "json"
			return runDemo(c.Context(), o)
		},
	}
	c.Flags().StringArrayVarP(&o.Files, "filename", "f", nil,
		"manifests: a file, a directory, or - for the standard input (repeatable; default: a small shop)")
	c.Flags().StringVar(&o.Mode, "proxy-mode", demo.Modes()[0], "the data plane: one of "+strings.Join(demo.Modes(), ", "))
	c.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	c.Flags().BoolVar(&o.Strict, "strict", false,
		"run nothing if anything in the manifests is wrong or probably a mistake, and exit with status 1")
	c.Flags().BoolVar(&o.Keep, "keep", false, "let the cluster run until Ctrl-C, and say how to look into it")
	return c
}

// checkFlags refuses values of --output and --proxy-mode that demo and verify do not know.
func checkFlags(output string, modes ...string) error {
	if output != "text" && output != "json" {
		return cli.Misused(fmt.Errorf("--output: %q is neither text nor json", output))
	}
	for _, mode := range modes {
		if !slices.Contains(demo.Modes(), mode) {
			return cli.Misused(fmt.Errorf("--proxy-mode: %q is none of %s", mode, strings.Join(demo.Modes(), ", ")))
		}
	}
	return nil
}

func runDemo(ctx context.Context, o demo.Options) error {
	status, done, err := testbed.Reexec()
	if err != nil {
		return cli.Failed(err)
	}
	if done {
		return cli.Exit(status, nil)
	}
	agent, err := programs.Find(programs.Agent)
	if err != nil {
		return cli.Misused(fmt.Errorf("demo needs the program that it shows: %w", err))
	}
	o.Proxy = []string{agent, "run"}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGPIPE) // as in "fairlead demo | head": clean up then, too
	defer stop()
	switch err := demo.Run(ctx, o); {
	case err == nil:
		return nil
	case errors.Is(err, demo.ErrInput):
		return cli.Misused(err)
	case ctx.Err() != nil && !errors.Is(err, demo.ErrFault):
		return cli.Exit(cli.ExitInterrupted, errors.New("interrupted"))
	default:
		return cli.Failed(err)
	}
}
