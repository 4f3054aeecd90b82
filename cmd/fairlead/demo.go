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

	"fairlead.dev/fairlead/demo"
	"fairlead.dev/fairlead/testbed"
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
			"  kubectl get all,endpoints -A -o yaml | fairlead demo -f -",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return misused(fmt.Errorf("--output: %q is neither text nor json", output))
			}
			if !slices.Contains(demo.Modes(), o.Mode) {
				return misused(fmt.Errorf("--proxy-mode: %q is none of %s", o.Mode, strings.Join(demo.Modes(), ", ")))
			}
			o.JSON = output == "json"
			return runDemo(c.Context(), o)
		},
	}
	c.Flags().StringArrayVarP(&o.Files, "filename", "f", nil,
		"manifests: a file, a directory, or - for the standard input (repeatable; default: a small shop)")
	c.Flags().StringVar(&o.Mode, "proxy-mode", demo.Modes()[0], "the data plane: one of "+strings.Join(demo.Modes(), ", "))
	c.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	c.Flags().BoolVar(&o.Keep, "keep", false, "let the cluster run until Ctrl-C, and say how to look into it")
	return c
}

// interrupted is the exit status of programs that end by Ctrl-C.
const interrupted = 130

func runDemo(ctx context.Context, o demo.Options) error {
	status, done, err := testbed.Reexec()
	if err != nil {
		return failed(err)
	}
	if done {
		return exitError{status: status}
	}
	self, err := os.Executable()
	if err != nil {
		return failed(fmt.Errorf("find the program that is to run as the proxy: %w", err))
	}
	o.Proxy = []string{self, "run"}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGPIPE) // as in "fairlead demo | head": clean up then, too
	defer stop()
	switch err := demo.Run(ctx, o); {
	case err == nil:
		return nil
	case errors.Is(err, demo.ErrInput):
		return misused(err)
	case ctx.Err() != nil && !errors.Is(err, demo.ErrFault):
		return exitError{interrupted, errors.New("interrupted")}
	default:
		return failed(err)
	}
}
