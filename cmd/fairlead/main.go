// Command fairlead makes Kubernetes Services work on a node.
//
//	run        the daemon: API server or manifests ─► rows ─► kernel; under the name kube-proxy, this only.
//	explain    why does a packet go where it goes?
//	dump       the rows.
//	status     how the running proxy does.
//	audit      what in the kernel is not as it should be.
//	services   where each Service is reached, its endpoints and connections; top: the same live.
//	why        which step fails between a Service and its backends?
//	probe      do endpoints answer?
//	monitor    what happens: changes, backends, connections.
//	report     an archive for a bug report.
//	ui         a page that shows what the running proxy does.
//	switch     another data plane for the running proxy.
//	clean      delete all that run, or kube-proxy, has made.
//	config     the configuration that results from files and flags.
//	version    which Fairlead this is.
//	help       … symptoms, modes, glossary: documents for a terminal.
//
// The names demo, recommend and bench run commands of the laboratory, the program fairlead-lab.
//
// Exit statuses: 0 all is well. 1 it found something (no route for a packet, ill health, a difference) or failed. 2 bad
// usage or input.
package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
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
	c.AddCommand(runCommand(), explainCommand(), dumpCommand(), statusCommand(), servicesCommand(), whyCommand(),
		probeCommand(), topCommand(), monitorCommand(), reportCommand(), auditCommand(), uiCommand(), switchCommand(),
		cleanCommand(), configCommand(), versionCommand())
	for name, short := range map[string]string{
		"demo":      "bring Services to life in a virtual cluster on this machine, use them all, and check what happens",
		"recommend": "say which data plane suits this node, by what its kernel can do and by measuring",
		"bench":     "compare the data planes on this machine, as published studies did",
	} {
		c.AddCommand(labCommand(name, short))
	}
	c.AddCommand(topics()...)
	cli.SetVersion(c, programs.Agent)
	return c
}
