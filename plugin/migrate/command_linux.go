package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/plugin/ask"
)

// migration is what the command line asks for.
type migration struct {
	ask.Inspection
	seen     *seen
	to       string
	watch    time.Duration
	forward  bool // apply
	backward bool // undo that
	check    time.Duration
	// Commands start and stop proxies. A shell runs them; they return when that is done.
	stop, start, agentStop, agentStart string
}

// Command is "fairlead migrate".
func Command() *cobra.Command {
	var m migration
	c := &cobra.Command{
		Use:   "migrate",
		Short: "say what changes on this node when Fairlead, in a mode, takes the place of its proxy",
		Long: "migrate finds the proxy of this node by its process, ConfigMap or rules, and reads the Services. It lists\n" +
			"what differs under Fairlead in the proposed mode, and what to do: what blocks, what changes, and notes. It\n" +
			"changes nothing. With --manifests it looks at a dump of a cluster, not at this node.\n\n" +
			"With --watch it goes on, and compares each connection that begins with the rows. It lists those that the\n" +
			"kernel sends where Fairlead would not.\n\n" +
			"With --apply it does it, while connections go on: it stops the old proxy and starts Fairlead, or has a running\n" +
			"Fairlead change its mode. It checks before and after which addresses of Services answer, and how many\n" +
			"connections fail. A datagram of UDP fails if it is refused. If more fail than before, it goes back. --back\n" +
			"undoes --apply. A shell runs the commands.\n\n" +
			"Exit status 1: something blocks, a connection contradicts the rows, or it is as it was before.",
		Example: "  fairlead migrate --to nftables\n  fairlead migrate --watch 10m\n" +
			"  fairlead migrate --apply --stop \"systemctl stop kube-proxy\" --start \"systemctl start kube-proxy\" \\\n" +
			"    --agent-start \"systemctl start fairlead\" --agent-stop \"systemctl stop fairlead\"\n" +
			"  kubectl get services,endpointslices,nodes,configmaps -A -o yaml >dump.yaml\n" +
			"  fairlead migrate --manifests dump.yaml",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return m.run(c.Context()) },
	}
	m.AddOfflineTo(c)
	f := c.Flags()
	f.AddFlag(m.Flags.Lookup("kubeconfig"))
	f.StringVar(&m.to, "to", "", "the `mode` to go to (default: nftables, or iptables before Linux 5.13)")
	f.DurationVar(&m.watch, "watch", 0, "compare the rows with real connections for so long")
	f.BoolVar(&m.forward, "apply", false, "do it, unless something blocks")
	f.BoolVar(&m.backward, "back", false, "undo it")
	f.StringVar(&m.stop, "stop", "", "the `command` that stops kube-proxy")
	f.StringVar(&m.start, "start", "", "the `command` that starts kube-proxy, for the way back")
	f.StringVar(&m.agentStart, "agent-start", "", "the `command` that starts Fairlead")
	f.StringVar(&m.agentStop, "agent-stop", "", "the `command` that stops Fairlead, for the way back")
	f.DurationVar(&m.check, "check", 10*time.Second, "count connections for so long, before and after")
	c.MarkFlagsMutuallyExclusive("watch", "apply", "back")
	c.MarkFlagsMutuallyExclusive("apply", "manifests")
	c.MarkFlagsMutuallyExclusive("back", "manifests")
	_ = c.RegisterFlagCompletionFunc("to", cobra.FixedCompletions(daemon.Planes(), cobra.ShellCompDirectiveNoFileComp))
	return c
}

func (m *migration) run(ctx context.Context) (err error) {
	if m.to != "" && !slices.Contains(daemon.Planes(), m.to) {
		return cli.Misused(fmt.Errorf("--to: %q is none of %s", m.to, strings.Join(daemon.Planes(), ", ")))
	}
	if m.seen, err = look(ctx, &m.Inspection, m.to); err != nil {
		return err
	}
	if m.backward {
		return m.back(ctx)
	}
	r := m.seen.report()
	blocked := r.Count(Blocks) > 0
	if m.watch == 0 {
		if err := m.Print(r); err != nil || blocked || !m.forward {
			return errors.Join(err, cli.Found(blocked))
		}
		return m.apply(ctx)
	}
	c, err := m.rowsConfig()
	if err == nil && m.seen.config == nil && !m.IsOffline() {
		err = errors.New("--watch needs kube-proxy's configuration: name it by --config")
	}
	if err != nil {
		return cli.Misused(err)
	}
	w, err := watch(ctx, c, m.seen.Mode, m.watch)
	if err != nil {
		return cli.ConfigError(err)
	}
	return errors.Join(m.Print(w), cli.Found(len(w.Contradictions) > 0))
}

// rowsConfig is the configuration by which rows are computed: that of the other proxy, for the objects that are read.
// It is the caller's to change.
func (m *migration) rowsConfig() (*config.Config, error) {
	if m.seen.config == nil || m.IsOffline() {
		return m.Flags.Load()
	}
	c := *m.seen.config
	if own := m.Flags.Lookup("kubeconfig"); own.Changed {
		c.KubeProxy.ClientConnection.Kubeconfig = own.Value.String()
	}
	return &c, nil
}
