// Command kubectl-fairlead asks the agents of a cluster, and orders another data plane. It is a plugin of kubectl.
//
//	kubectl fairlead status                    all nodes in one table
//	                 why SERVICE               what keeps a Service from working, the worst node first
//	                 switch PLANE              another data plane, node by node
//	                 services, explain, audit  those commands, by the agent of one node
//
//	person ─► kubectl fairlead ─► API server: pods/exec ─► kubelet ─► "fairlead …" in the agent's pod ─► control socket
//
// pods/exec needs no port and no new right of the agent, and the user's own rights decide. The other way would be the
// proxy of the API server to the agent's port for operators: that port is on loopback by default, and takes no orders.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
)

func main() { os.Exit(cli.Execute("kubectl fairlead", root())) }

func root() *cobra.Command {
	c := &cobra.Command{
		Use:         "kubectl-fairlead",
		Short:       "ask the agents of Fairlead, and order another data plane",
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl fairlead"},
	}
	var k cluster
	k.addTo(c.PersistentFlags())
	c.AddCommand(statusCommand(&k), whyCommand(&k), switchCommand(&k),
		passCommand(&k, "services [[NAMESPACE/]NAME]", "list the Services and their endpoints", cobra.MaximumNArgs(1)),
		passCommand(&k, "explain SOURCE DESTINATION[:PORT][/PROTOCOL]", "say where a packet goes", cobra.ExactArgs(2)),
		passCommand(&k, "audit", "compare the rows with the kernel", cobra.NoArgs))
	cli.SetVersion(c, "kubectl-fairlead")
	return c
}
