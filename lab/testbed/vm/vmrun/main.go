// Command vmrun runs a command as root in the test kernel, see package vm.
//
//	vmrun [-t 10m] [-w DIR]... [-m 4G] [-k FILE] [--] COMMAND [ARGUMENT...]
//
// The command sees this machine's files and may write anywhere, but only what it writes in a directory
// DIR stays. The exit status is its own (128 and the signal's number if one killed it), or 125 if there
// is none, and then the standard error says why.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed/vm"
)

// noStatus is the exit status where the command has none.
const noStatus = 125

func main() {
	vm.Guest()
	status, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "vmrun:", err)
		status = noStatus
	}
	os.Exit(status)
}

func run() (status int, err error) {
	m := vm.Machine{Stdout: os.Stdout, Stderr: os.Stderr}
	f := flag.NewFlagSet("vmrun", flag.ContinueOnError)
	limit := f.Duration("t", 0, "end the command after that `time`")
	f.StringVar(&m.Memory, "m", "4G", "at most that much memory (`SIZE`)")
	f.StringVar(&m.Kernel, "k", "", "run that kernel (`FILE`), not "+vm.Variable+" or what ./dev kernel builds")
	f.Func("w", "let the command write this machine's files in `DIR`; may be repeated", func(dir string) error {
		m.Shared = append(m.Shared, dir)
		return nil
	})
	if err := f.Parse(os.Args[1:]); err != nil {
		return noStatus, err
	}
	if m.Args = f.Args(); len(m.Args) == 0 {
		return noStatus, errors.New("no command")
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	if *limit > 0 {
		ctx, stop = context.WithTimeoutCause(ctx, *limit, fmt.Errorf("not done after %v", *limit))
		defer stop()
	}
	return m.Run(ctx)
}
