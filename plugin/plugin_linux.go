package plugin

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/plugin/ask"
	"fairlead.dev/fairlead/plugin/migrate"
	"fairlead.dev/fairlead/plugin/trace"
	"fairlead.dev/fairlead/service"
)

func migrateCommand() *cobra.Command { return migrate.Command() }

func traceCommand() *cobra.Command {
	var q serviceQuestion
	timeout := 2 * time.Second
	c := &cobra.Command{
		Use:   "trace SOURCE DESTINATION[:PORT][/PROTOCOL]",
		Short: "send one real packet, print each step that it takes, and compare that with what explain predicts",
		Long: "trace opens a connection of TCP, or sends a datagram of UDP with one byte, and closes. It prints the rules\n" +
			"of nf_tables that the packet meets, what the socket and connection tracking say, and what explain predicts.\n" +
			"SOURCE is node, pod/NAMESPACE/NAME, netns:PATH or netns:PID. DESTINATION is as for explain. A pod is found by\n" +
			"its processes: run trace on its node, as root and outside of containers.\n" +
			"Exit status 1: there is no answer, or a contradiction.",
		Example: "  fairlead trace node svc/shop/cart:http\n  fairlead trace pod/shop/web-7d4b 10.96.0.10:53/udp",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return q.trace(c.Context(), args[0], args[1], timeout)
		},
	}
	q.AddTo(c)
	c.Flags().DurationVar(&timeout, "timeout", timeout, "for the answer")
	return c
}

func (q *serviceQuestion) trace(ctx context.Context, source, destination string, timeout time.Duration) error {
	sender, err := trace.Find(source)
	if err != nil {
		return cli.Misused(err)
	}
	at, err := q.addressOf(ctx, destination, source)
	if err != nil {
		return err
	}
	p, err := ask.ParsePacket("", "node", at)
	if err == nil && p.Protocol != model.TCP && p.Protocol != model.UDP {
		err = errors.New("only TCP and UDP can be traced")
	}
	if err != nil {
		return cli.Misused(err)
	}
	t := trace.Question{From: sender, To: p.Destination, Protocol: p.Protocol, Timeout: timeout, Count: q.connections}
	t.Explain = func(ctx context.Context, source netip.Addr, iface string) (service.Explanation, error) {
		p.Source, p.Interface = source, iface
		return q.explanation(ctx, p)
	}
	a, err := trace.Run(ctx, t)
	if err != nil {
		return cli.Failed(err)
	}
	return errors.Join(q.Print(a), cli.Found(!a.Good()))
}

// connections are those that each backend of a Service's port got so far.
func (q *serviceQuestion) connections(
	ctx context.Context, port string,
) (plane string, counts map[string]uint64, err error) {
	name, _, _ := strings.Cut(port, ":")
	all, err := q.one(ctx, name)
	if err != nil {
		return "", nil, err
	}
	counts = map[string]uint64{}
	for _, p := range all.Services[0].Ports {
		for _, e := range p.Endpoints {
			counts[e.At] += e.Connections
		}
	}
	return all.Plane, counts, nil
}
