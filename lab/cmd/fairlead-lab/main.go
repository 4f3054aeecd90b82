// Command fairlead-lab is Fairlead's laboratory: it builds virtual clusters on this machine, and measures in them.
//
//	demo       a virtual cluster on this machine, with Services in use.
//	recommend  which data plane suits this node.
//	bench      compare the data planes on this machine, as published studies did.
//	verify     whether a kernel is safe for this node.
//
// "fairlead demo" and the like run this program. Exit statuses are those of fairlead.
//
//	fairlead demo ─► fairlead-lab demo ─► virtual cluster ─► on its node: fairlead run
package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/programs"
)

func main() {
	vm.Guest() // bench repeats experiments in a test kernel
	traffic.Main()
	name := filepath.Base(os.Args[0])
	if name != programs.Agent {
		name = programs.Lab
	}
	os.Exit(cli.Execute(name, root(name)))
}

func root(name string) *cobra.Command {
	c := &cobra.Command{
		Use:   name,
		Short: "builds virtual clusters on this machine, and measures in them",
	}
	c.AddCommand(demoCommand(), recommendCommand(), benchCommand(), verifyCommand())
	cli.SetVersion(c, programs.Lab)
	return c
}
