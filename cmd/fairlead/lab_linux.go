package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/programs"
)

// labCommand is a command of the laboratory. fairlead-lab takes the place of this process: arguments, standard
// streams, signals and the exit status are those of one process. It is also what answers "fairlead help" and the shell
// about the command: only fairlead-lab has its subcommands and flags.
func labCommand(name, short string) *cobra.Command {
	c := &cobra.Command{
		Use:                name,
		Short:              short,
		DisableFlagParsing: true,
		RunE:               func(*cobra.Command, []string) error { return becomeLab(name) },
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			_ = becomeLab(name) // without a laboratory there is nothing to complete
			return nil, cobra.ShellCompDirectiveError
		},
	}
	c.SetHelpFunc(func(*cobra.Command, []string) {
		if err := becomeLab(name); err != nil {
			os.Exit(cli.Report(programs.Agent, err)) // help functions return no error
		}
	})
	return c
}

// becomeLab runs fairlead-lab with the arguments of this process. It returns only if there is no laboratory.
func becomeLab(command string) error {
	lab, err := programs.Find(programs.Lab)
	var missing *programs.Missing
	if errors.As(err, &missing) {
		return cli.Misused(fmt.Errorf("%s is a command of the laboratory: %w", command, err))
	}
	if err != nil {
		return cli.Failed(err)
	}
	// Usage and errors call the program by the name that the user typed.
	err = unix.Exec(lab, append([]string{programs.Agent}, os.Args[1:]...), os.Environ())
	return cli.Failed(fmt.Errorf("run %s: %w", lab, err))
}
