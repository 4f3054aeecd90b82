package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/demo"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/verify"
)

// exitUntested is the status of verify where it has no answer.
const exitUntested = 3

func verifyCommand() *cobra.Command {
	p := newProgress()
	o := verify.Options{Progress: p.verifying}
	var output, guest string
	c := &cobra.Command{
		Use:   "verify [--kernel VERSION|FILE] [-f MANIFEST]...",
		Short: "say whether a kernel is safe for this node's configuration and Services",
		Long: "verify boots a kernel, has each data plane serve the Services there, and tries all of them by\n" +
			"connections. It says whether the kernel is safe: whether the mode of the node's configuration, or each\n" +
			"mode of --proxy-mode, does all that it should. Where it does, cases of conformance are played, too, but\n" +
			"not those of mode ebpf in an emulated kernel, which take long. Nothing on this machine is changed.\n" +
			"Exit status 1: the kernel is not safe. 2: usage. 3: it could not be tested.",
		Example: "  fairlead verify --config /var/lib/kube-proxy/config.conf\n" +
			"  kubectl get svc,endpointslices,pods,nodes -A -o yaml | fairlead verify --kernel 6.12 -f -\n" +
			"  fairlead verify --kernel /boot/vmlinuz-6.1.0 --modules /lib/modules/6.1.0 --proxy-mode nftables",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkFlags(output, o.Modes...); err != nil {
				return err
			}
			if guest != "" {
				return cli.Failed(verify.Guest(c.Context(), guest, o.Modes, os.Stdout))
			}
			defer p.clear()
			return runVerify(c.Context(), o, output)
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&o.Kernel, "kernel", "",
		"a `kernel` of Debian for amd64, 5.10, 6.1 or 6.12, which is fetched and emulated, some 20 times slower; "+
			"a file; or a User-Mode Linux (default: this machine's)")
	f.StringVar(&o.Modules, "modules", "", "the `directory` /lib/modules/RELEASE of a kernel that is a file")
	f.StringSliceVar(&o.Modes, "proxy-mode", nil,
		"data planes that must be safe (default: all are tried, that of --config must be safe, else nftables)")
	f.StringArrayVarP(&o.Files, "filename", "f", nil,
		"manifests: a file, a directory, or - for the standard input (repeatable; default: a small shop)")
	f.StringVar(&o.Config, "config", "", "`file` with the KubeProxyConfiguration of the node")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	f.StringVar(&guest, "guest", "", "")
	_ = f.MarkHidden("guest") // it is there
	return c
}

func runVerify(ctx context.Context, o verify.Options, output string) error {
	if o.Kernel == "" {
		if status, done, err := testbed.Reexec(); err != nil {
			return cli.Exit(exitUntested, err)
		} else if done {
			return cli.Exit(status, nil)
		}
	}
	r, err := verify.Run(ctx, o)
	switch {
	case errors.Is(err, verify.ErrUsage), errors.Is(err, demo.ErrInput):
		return cli.Misused(err)
	case ctx.Err() != nil:
		return cli.Exit(cli.ExitInterrupted, errors.New("interrupted"))
	case err != nil:
		return cli.Exit(exitUntested, err)
	}
	if output == "json" {
		err = cli.PrintJSON(r)
	} else {
		_, err = fmt.Print(r)
	}
	if err == nil && !r.Safe {
		err = cli.Exit(cli.ExitFound, nil)
	}
	return err
}

// verifying is show for verify. Without a terminal there is a line for each mode.
func (p *progress) verifying(doing string, n, of int) {
	p.show(doing, n, of)
	if p.bar == nil {
		fmt.Fprintf(p.out, "fairlead: %s (%d of %d)\n", doing, n+1, of)
	}
}
