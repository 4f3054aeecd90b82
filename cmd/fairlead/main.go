// Command fairlead makes Kubernetes Services work on a node.
//
//	run            the daemon: API server or manifests ─► rows ─► kernel; under the name kube-proxy, this only.
//	answer-health  answers at health check ports while run restarts.
//	clean          delete all that run, or kube-proxy, has made.
//	config         the configuration that results from files and flags.
//	status, why, … what a person, or a pod, asks of the running daemon: package plugin.
//	demo, bench, … commands of the laboratory, the program fairlead-lab.
//	help           … symptoms, modes, glossary: documents for a terminal.
//
// Exit statuses: 0 all is well. 1 it found something (no route for a packet, ill health, a difference) or failed. 2 bad
// usage or input.
package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin"
	"fairlead.dev/fairlead/programs"
)

func main() {
	os.Exit(cli.Execute(programs.Agent, named(filepath.Base(os.Args[0]))))
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
		Use:   programs.Agent,
		Short: "makes Kubernetes Services work on a node",
	}
	c.AddCommand(runCommand(), answerHealthCommand(), cleanCommand(), configCommand(), versionCommand())
	c.AddCommand(plugin.Commands()...)
	for name, short := range map[string]string{
		"demo":      "bring Services to life in a virtual cluster on this machine, use them all, and check what happens",
		"recommend": "say which data plane suits this node, by what its kernel can do and by measuring",
		"bench":     "compare the data planes on this machine, as published studies did",
		"verify":    "say whether a kernel is safe for this node's configuration and Services",
	} {
		c.AddCommand(labCommand(name, short))
	}
	c.AddCommand(topics()...)
	cli.SetVersion(c, programs.Agent)
	return c
}
