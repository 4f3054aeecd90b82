// Command fairlead makes Kubernetes Services work on a Linux node.
//
//	run        the daemon: API server or manifests ─► rows ─► kernel; under the name kube-proxy, this only
//	demo       a virtual cluster on this machine, with Services in use
//	explain    why does a packet go where it goes?
//	dump       the rows
//	status     how the running proxy does
//	audit      what in the kernel is not as it should be
//	switch     another data plane for the running proxy
//	recommend  which data plane suits this node
//	bench      compare the data planes on this machine, as published studies did
//	clean      delete all that run, or kube-proxy, has made
//	config     the configuration that results from files and flags
//	version    which Fairlead this is
//
// Exit status: 0 all is well, 1 it found something (no route for a packet, ill health, a difference) or failed, 2 bad
// usage or input.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/testbed/traffic"
	"fairlead.dev/fairlead/testbed/vm"
	"fairlead.dev/fairlead/version"
)

const (
	exitFound = 1
	exitUsage = 2
)

func main() {
	vm.Guest() // bench repeats experiments in a test kernel
	traffic.Main()
	os.Exit(execute())
}

// execute runs the command line and returns the exit status. The first SIGINT or SIGTERM cancels the
// context, the second ends the process at once.
func execute() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	err := named(filepath.Base(os.Args[0])).ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var exit exitError
	if !errors.As(err, &exit) {
		// What cobra itself complains about is usage.
		exit = exitError{exitUsage, err}
	}
	if exit.error != nil {
		fmt.Fprintln(os.Stderr, "fairlead:", exit.error)
	}
	return exit.status
}

// exitError is an error with the exit status that it asks for; a nil error has been printed already.
type exitError struct {
	status int
	error
}

func (e exitError) Unwrap() error { return e.error }

func (e exitError) Error() string {
	if e.error == nil {
		return fmt.Sprintf("exit status %d", e.status)
	}
	return e.error.Error()
}

func failed(err error) error {
	var exit exitError
	if err == nil || errors.As(err, &exit) {
		return err
	}
	return exitError{exitFound, err}
}

func misused(err error) error {
	if err == nil {
		return nil
	}
	return exitError{exitUsage, err}
}

// named is what the program is under a name.
func named(name string) *cobra.Command {
	if name == drop {
		return kubeProxyCommand()
	}
	return root()
}

func root() *cobra.Command {
	c := &cobra.Command{
		Use:           "fairlead",
		Short:         "makes Kubernetes Services work on a Linux node",
		Version:       version.String(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	c.CompletionOptions.HiddenDefaultCmd = true
	c.AddCommand(runCommand(), demoCommand(), explainCommand(), dumpCommand(), statusCommand(),
		auditCommand(), switchCommand(), recommendCommand(), benchCommand(), cleanCommand(), configCommand(),
		versionCommand())
	c.SetVersionTemplate(version.Line("fairlead") + "\n")
	return c
}
