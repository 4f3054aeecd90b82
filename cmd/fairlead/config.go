package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/cli"
)

func configCommand() *cobra.Command {
	flags := daemon.NewFlags()
	c := &cobra.Command{
		Use:   "config [flags of run]",
		Short: "print the configuration that results from files and flags, or its schema",
		Example: "  fairlead config --config /var/lib/kube-proxy/config.conf\n" +
			"  fairlead config schema FairleadConfiguration",
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error { return printConfig(flags) },
	}
	flags.AddTo(c.Flags())
	groupHelp(c, flags)
	c.AddCommand(schemaCommand())
	return c
}

func printConfig(flags *config.Flags) error {
	c, err := flags.Load()
	if err != nil {
		return cli.Misused(err)
	}
	for i, kind := range []string{config.KubeProxyKind, config.FairleadKind} {
		text, err := c.Document(kind)
		if err != nil {
			return cli.Failed(err)
		}
		if i > 0 {
			fmt.Println("---")
		}
		if _, err := fmt.Print(string(text)); err != nil {
			return cli.Failed(err)
		}
	}
	for _, w := range c.Warnings {
		fmt.Fprintln(os.Stderr, "warning:", w)
	}
	return nil
}

func schemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:       "schema KIND",
		Short:     "print the JSON schema of " + config.KubeProxyKind + " or " + config.FairleadKind,
		ValidArgs: []string{config.KubeProxyKind, config.FairleadKind},
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		RunE: func(_ *cobra.Command, args []string) error {
			_, err := fmt.Print(string(config.Schema(args[0])))
			return cli.Failed(err)
		},
	}
}
