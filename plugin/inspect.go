package plugin

import (
	"context"
	"errors"
	"net/url"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/plugin/ask"
	"fairlead.dev/fairlead/service"
)

// inspection asks the running agent or, if manifests are named, computes the answer from them.
type inspection struct{ ask.Inspection }

func dumpCommand() *cobra.Command {
	var i inspection
	var counters bool
	c := &cobra.Command{
		Use:   "dump",
		Short: "print the rows: what this node does with packets to Service addresses",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if counters {
				return i.counters(c.Context())
			}
			return i.dump(c.Context())
		},
	}
	i.AddOfflineTo(c)
	c.Flags().BoolVar(&counters, "counters", false,
		"print what the running data plane has counted instead, see the setting counters")
	return c
}

// counters prints what only a running proxy knows.
func (i *inspection) counters(ctx context.Context) error {
	if i.IsOffline() {
		return cli.Misused(errors.New("--counters are those of the running proxy, and manifests have none"))
	}
	return i.pass(ctx, "/counters")
}

// pass prints an answer as it comes.
func (i *inspection) pass(ctx context.Context, path string) error {
	if i.Output == "json" {
		path += "?format=json"
	}
	text, err := i.Text(ctx, path)
	_, failure := os.Stdout.Write(text)
	return cli.Failed(errors.Join(err, failure))
}

func (i *inspection) dump(ctx context.Context) error {
	if !i.IsOffline() {
		return i.pass(ctx, "/dump")
	}
	table, err := i.Offline(ctx)
	if err != nil {
		return err
	}
	state, _, _ := table.Update(service.Batch{})
	return i.Print(state)
}

func explainCommand() *cobra.Command {
	var i inspection
	var iface string
	c := &cobra.Command{
		Use:   "explain SOURCE DESTINATION[:PORT][/PROTOCOL]",
		Short: "say where a packet goes, which backends it may reach, and why not the others",
		Long: "explain says what this node does with the first packet of a connection from SOURCE to a Service. SOURCE is\n" +
			"an address, or the word node. DESTINATION is an address, svc/NAMESPACE/NAME, the DNS name of a Service, or node\n" +
			"with a NodePort. explain prints the row that takes the packet, the backends that it may reach and how likely,\n" +
			"and the rule that excludes each other endpoint. Exit status 1: it does not reach a backend.",
		Example: "  fairlead explain 10.244.1.7 10.96.0.10:53/udp\n" +
			"  fairlead explain node svc/shop/cart:http\n  fairlead explain 192.0.2.9 node:30080\n" +
			"  fairlead explain node '[fd00::10]:80' --manifests all.yaml",
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return i.explain(c.Context(), !c.Flags().Changed("interface"), iface, args)
		},
	}
	i.AddOfflineTo(c)
	c.Flags().StringVar(&iface, "interface", "eth0", "on which the packet arrives; SOURCE node has none")
	return c
}

func (i *inspection) explain(ctx context.Context, assumed bool, iface string, args []string) error {
	destination, err := i.addressOf(ctx, args[1], args[0])
	if err != nil {
		return err
	}
	p, err := ask.ParsePacket(iface, args[0], destination)
	if err != nil {
		return cli.Misused(err)
	}
	x, err := i.explanation(ctx, p)
	if err != nil {
		return err
	}
	x.Assumed = assumed
	// Exit status 1 is for a packet that reaches no backend.
	return errors.Join(i.Print(x), cli.Found(x.Verdict != model.Forward.String()))
}

// explanation explains a packet.
func (i *inspection) explanation(ctx context.Context, p model.Packet) (x service.Explanation, err error) {
	if i.IsOffline() {
		table, err := i.Offline(ctx)
		if err != nil {
			return x, err
		}
		return table.Explain(p), nil
	}
	q := url.Values{
		"destination": {p.Destination.String()}, "protocol": {p.Protocol.String()}, "interface": {p.Interface},
	}
	if p.Source.IsValid() {
		q.Set("source", p.Source.String())
	}
	q.Set("format", "json")
	err = i.Get(ctx, "/explain?"+q.Encode(), &x)
	return x, err
}
