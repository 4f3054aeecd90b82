// Package plugin has what a person, or a pod that ends, asks of running agents. Nothing of it runs unless it is asked
// for.
//
//	on the node                                          from anywhere
//	fairlead status, why, …                              kubectl fairlead status, why, …
//	  │ Commands                                           │ cmd/kubectl-fairlead
//	  ▼                                                    ▼
//	plugin/ask ─► control socket ─► agent ◄─ fairlead … ◄─ pods/exec of the agent's pod
//	  │
//	  └─► plugin/answer: text or JSON ◄──────────────────── (the same)
package plugin

import "github.com/spf13/cobra"

// Commands are those of the program fairlead.
func Commands() []*cobra.Command {
	return []*cobra.Command{
		explainCommand(),     // why does a packet go where it goes?
		traceCommand(),       // does a real one go there?
		dumpCommand(),        // the rows.
		statusCommand(),      // how the agent does.
		auditCommand(),       // what in the kernel is not as it should be.
		servicesCommand(),    // where each Service is reached, its endpoints and connections.
		topCommand(),         // the same live.
		whyCommand(),         // which step fails between a Service and its backends?
		probeCommand(),       // do endpoints answer?
		monitorCommand(),     // what happens: changes, backends, connections.
		reportCommand(),      // an archive for a bug report.
		uiCommand(),          // a page that shows what the agent does.
		switchCommand(),      // another data plane for the agent.
		migrateCommand(),     // compares another proxy or mode with this one.
		waitDrainedCommand(), // which nodes still send a pod new connections?
	}
}
