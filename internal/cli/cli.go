// Package cli is what the command lines of Fairlead's programs have in common: exit statuses, signals, and output.
//
//	main ─► Execute(command) ─► RunE returns an error ─► Failed: 1, Misused: 2, ExitError: its own ─► exit status
//
// Exit status 0 means that all is well, 1 that the command found something (a difference, ill health) or failed, and 2
// that usage or input is wrong. 130 is the status of programs that end by Ctrl-C.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/version"
)

// The exit statuses other than 0.
const (
	ExitFound       = 1
	ExitUsage       = 2
	ExitInterrupted = 130
)

// Execute runs a command line and returns the exit status. The first SIGINT or SIGTERM cancels the
// context, the second ends the process at once. Windows' close of a console counts as SIGTERM.
func Execute(program string, c *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	c.SilenceErrors, c.SilenceUsage = true, true
	ran, err := c.ExecuteContextC(ctx)
	status := Report(program, err)
	if _, own := errors.AsType[ExitError](err); err != nil && !own { // cobra's, about usage
		if !ran.HasSubCommands() {
			fmt.Fprintf(os.Stderr, "usage: %s\n", ran.UseLine())
		}
		fmt.Fprintf(os.Stderr, "\"%s --help\" says more\n", ran.CommandPath())
	}
	return status
}

// Report prints the error of a command, unless that is printed already, and returns the exit status that it asks for.
func Report(program string, err error) int {
	if err == nil {
		return 0
	}
	var exit ExitError
	if !errors.As(err, &exit) {
		// Errors of cobra itself are about usage.
		exit = ExitError{ExitUsage, err}
	}
	if exit.Err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, exit.Err)
	}
	return exit.Status
}

// SetVersion gives the root command of a program the flag --version. Cobra's SetVersionTemplate would use
// text/template, which calls methods by name: for its sake the linker keeps every exported method of every type,
// 5 MB in the agent.
func SetVersion(root *cobra.Command, program string) {
	root.Flags().BoolP("version", "v", false, "version for "+program)
	root.RunE = func(c *cobra.Command, _ []string) error {
		if asked, err := c.Flags().GetBool("version"); err != nil || !asked {
			return errors.Join(err, c.Help())
		}
		_, err := fmt.Fprintln(c.OutOrStdout(), version.Line(program))
		return err
	}
}

// ExitError is an error with the exit status that it asks for; a nil Err has been printed already.
type ExitError struct {
	Status int
	Err    error
}

func (e ExitError) Unwrap() error { return e.Err }

func (e ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit status %d", e.Status)
	}
	return e.Err.Error()
}

// Exit makes an ExitError.
func Exit(status int, err error) error { return ExitError{status, err} }

// Failed asks for ExitFound, unless err asks for a status itself; nil stays nil.
func Failed(err error) error {
	var exit ExitError
	if err == nil || errors.As(err, &exit) {
		return err
	}
	return ExitError{ExitFound, err}
}

// Found is exit status 1 if there is something.
func Found(something bool) error {
	if something {
		return Exit(ExitFound, nil)
	}
	return nil
}

// Misused asks for ExitUsage; nil stays nil.
func Misused(err error) error {
	if err == nil {
		return nil
	}
	return ExitError{ExitUsage, err}
}

// ConfigError makes an error of the daemon one of usage, if it is about the configuration, and else a failure.
func ConfigError(err error) error {
	var misuse interface {
		error
		Misused() // as daemon.ConfigError has it
	}
	if errors.As(err, &misuse) {
		return Misused(err)
	}
	return Failed(err)
}

// PrintJSON writes v to the standard output, indented.
func PrintJSON(v any) error {
	e := json.NewEncoder(os.Stdout)
	e.SetIndent("", "  ")
	return Failed(e.Encode(v))
}

// Format is the flag --output: text, json, or one of More.
type Format struct {
	Output string
	More   []string
}

// AddFormatTo adds the flag to a command, which refuses other values then.
func (f *Format) AddFormatTo(c *cobra.Command) {
	words := append([]string{"text", "json"}, f.More...)
	c.Flags().StringVarP(&f.Output, "output", "o", "text", strings.Join(words, ", "))
	c.PreRunE = func(*cobra.Command, []string) error {
		if !slices.Contains(words, f.Output) {
			return Misused(fmt.Errorf("--output: %q is none of %s", f.Output, strings.Join(words, ", ")))
		}
		return nil
	}
}

// Print writes v as text, which has its own line end, or as JSON if that is the output.
func Print(output string, v fmt.Stringer) error {
	if output == "json" {
		return PrintJSON(v)
	}
	_, err := fmt.Print(v)
	return Failed(err)
}

// PrintTable writes rows of cells in columns.
func PrintTable(rows [][]string) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return Failed(w.Flush())
}
