package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/version"
)

// drop is the name under which the program takes kube-proxy's place.
const drop = "kube-proxy"

func runCommand() *cobra.Command {
	flags := daemon.NewFlags()
	c := &cobra.Command{
		Use:   "run",
		Short: "serve Services until stopped; the kernel keeps the last state",
		Long: "run serves the Services of a Kubernetes cluster on this node, or those of manifests. It takes kube-proxy's\n" +
			"flags and its configuration file. The file may be edited while it runs: what changed is brought into force,\n" +
			"and what is invalid is refused. Without a file of its own the node keeps the last state when it stops.",
		Example: "  fairlead run --config /var/lib/kube-proxy/config.conf\n" +
			"  fairlead run --manifests /etc/fairlead\n" +
			"  kubectl get services,endpointslices,nodes -A -o yaml >all.yaml && fairlead run --manifests all.yaml",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return run(c.Context(), flags) },
	}
	flags.AddTo(c.Flags())
	groupHelp(c, flags)
	return c
}

// kubeProxyCommand is run under the name that a DaemonSet for kube-proxy starts.
func kubeProxyCommand() *cobra.Command {
	c := runCommand()
	c.Use, c.Example = drop, "  kube-proxy --config /var/lib/kube-proxy/config.conf"
	c.CompletionOptions.DisableDefaultCmd = true
	return c
}

// noArgs accepts empty arguments, as kube-proxy does: templates leave some behind.
func noArgs(c *cobra.Command, args []string) error {
	for _, arg := range args {
		if arg != "" {
			return fmt.Errorf("%q is not a flag; %s takes nothing else", arg, c.CommandPath())
		}
	}
	return nil
}

// groupHelp shows the flags under headings.
func groupHelp(c *cobra.Command, flags *config.Flags) {
	c.SetUsageFunc(func(c *cobra.Command) error {
		fmt.Fprintf(c.OutOrStderr(), "Usage:\n  %s\n", c.UseLine())
		if c.HasExample() {
			fmt.Fprintf(c.OutOrStderr(), "\nExamples:\n%s\n", c.Example)
		}
		return flags.PrintHelp(c.OutOrStderr(), cli.Columns())
	})
	c.SetHelpFunc(func(c *cobra.Command, _ []string) {
		fmt.Fprintf(c.OutOrStdout(), "%s\n\n", cmp.Or(c.Long, c.Short))
		c.SetOut(c.OutOrStdout())
		_ = c.Usage()
	})
}

func run(ctx context.Context, flags *config.Flags) error {
	if v := flags.Version; v != "" && v != "false" {
		fmt.Println(version.Line("fairlead"))
		return nil
	}
	if flags.Strict {
		if err := checkManifests(ctx, flags); err != nil {
			return err
		}
	}
	boundGarbage()
	out, err := logOutput(flags)
	if err != nil {
		return cli.Failed(err)
	}
	o := daemon.Options{
		Load:  flags.Load,
		Once:  flags.Once,
		Flags: func() map[string]string { return values(flags) },
		Logs:  daemon.NewLogs(out),
	}
	switch {
	case flags.WriteConfigTo != "":
		return write(flags)
	case flags.Cleanup:
		return clean(ctx, cleaning{log: o.Logs.Logger(), socket: flags.Lookup("control-socket").Value.String()})
	case flags.InitOnly:
		return cli.ConfigError(daemon.Init(o))
	}
	return cli.ConfigError(serve(ctx, flags, o))
}

// checkManifests prints all that is wrong in the manifests, or probably a mistake, and fails if there is anything.
func checkManifests(ctx context.Context, flags *config.Flags) error {
	c, err := flags.Load()
	if err == nil && len(c.Fairlead.Manifests) == 0 {
		err = errors.New("--strict is about manifests, and --manifests names none")
	}
	if err != nil {
		return cli.Misused(err)
	}
	_, problems, err := daemon.Compile(ctx, c, daemon.NewLogs(io.Discard))
	for _, p := range problems {
		fmt.Fprintf(os.Stderr, "%s: %s\n", p.Word(), p.Error())
	}
	if err == nil && len(problems) > 0 {
		err = fmt.Errorf("nothing is served: %s, see above", said.Count(len(problems), "problem"))
	}
	return cli.ConfigError(err)
}

// logOutput is where the log goes, until the process ends.
func logOutput(flags *config.Flags) (io.Writer, error) {
	if flags.LogFile != "" {
		return os.OpenFile(flags.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	}
	return standardLog(flags)
}

// values are what the flags say, by name.
func values(flags *config.Flags) map[string]string {
	all, set := map[string]string{}, pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.AddTo(set)
	set.VisitAll(func(f *pflag.Flag) { all[f.Name] = f.Value.String() })
	return all
}

func write(flags *config.Flags) error {
	c, err := flags.Load()
	if err != nil {
		return cli.Misused(err)
	}
	return cli.Failed(c.WriteKubeProxy(flags.WriteConfigTo))
}
