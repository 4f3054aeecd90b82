package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// inspection asks the running daemon or, if manifests are named, computes the answer from them.
type inspection struct {
	flags  *config.Flags
	output string
}

// offlineFlags are those of run that matter for the rows.
var offlineFlags = []string{
	"config", "fairlead-config", "proxy-mode", "hostname-override", "node-ip", "bind-address",
	"cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix",
	"nodeport-addresses", "iptables-localhost-nodeports", "masquerade-all", "feature-gates",
}

// addTo adds the flags of a command that asks the running daemon only.
func (i *inspection) addTo(f *pflag.FlagSet) {
	i.flags = newFlags()
	f.SortFlags = false
	f.StringVarP(&i.output, "output", "o", "text", "text or json")
	socket := lookup(i.flags, "control-socket")
	socket.Usage = "the running proxy"
	f.AddFlag(socket)
}

// addOfflineTo adds those of one that can do without.
func (i *inspection) addOfflineTo(f *pflag.FlagSet) {
	i.addTo(f)
	manifests := lookup(i.flags, "manifests")
	manifests.Usage = "compute the answer from this `file or directory`, not from the running proxy (repeatable)"
	f.AddFlag(manifests)
	for _, name := range offlineFlags {
		f.AddFlag(lookup(i.flags, name))
	}
}

func (i *inspection) check() error {
	if i.output != "text" && i.output != "json" {
		return misused(fmt.Errorf("--output: %q is neither text nor json", i.output))
	}
	return nil
}

// offline compiles the manifests. Problems are printed, one a line.
func (i *inspection) offline(ctx context.Context) (*service.Table, error) {
	c, err := i.flags.Load()
	if err != nil {
		return nil, misused(err)
	}
	table, problems, err := daemon.Compile(ctx, c, daemon.NewLogs(io.Discard))
	for _, p := range problems {
		fmt.Fprintln(os.Stderr, "problem:", p.Error())
	}
	return table, asked(err)
}

// isOffline reports whether manifests are named.
func (i *inspection) isOffline() bool { return lookup(i.flags, "manifests").Changed }

// ask puts a question to the running proxy. Without one, the answer can be computed.
func (i *inspection) ask(ctx context.Context, path string, q url.Values) ([]byte, error) {
	if i.output == "json" {
		q.Set("format", "json")
	}
	answer, err := i.answer(ctx, path+"?"+q.Encode())
	if errors.Is(err, errNoProxy) {
		return nil, misused(fmt.Errorf("%w, or name --manifests", err))
	}
	return answer, failed(err)
}

var errNoProxy = errors.New("no proxy listens")

// answer is the running proxy's to a question; the error is errNoProxy if there is none.
func (i *inspection) answer(ctx context.Context, question string) ([]byte, error) {
	answer, err := i.order(ctx, http.MethodGet, question)
	if err != nil {
		return nil, err
	}
	defer answer.Close()
	return io.ReadAll(answer)
}

// order is answer for what is not only a question.
func (i *inspection) order(ctx context.Context, method, what string) (io.ReadCloser, error) {
	socket := lookup(i.flags, "control-socket").Value.String()
	answer, err := engine.Order(ctx, socket, method, what)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%w on %s; start \"fairlead run\"", errNoProxy, socket)
	}
	return answer, err
}

// print writes what the user asked for; text has its own line end.
func (i *inspection) print(v fmt.Stringer) error {
	if i.output == "text" {
		fmt.Print(v)
		return nil
	}
	e := json.NewEncoder(os.Stdout)
	e.SetIndent("", "  ")
	return failed(e.Encode(v))
}

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
	i.addOfflineTo(c.Flags())
	c.Flags().BoolVar(&counters, "counters", false,
		"print what the running data plane has counted instead (modes ebpf, userspace)")
	return c
}

// counters prints what only a running proxy knows.
func (i *inspection) counters(ctx context.Context) error {
	if err := i.check(); err != nil {
		return err
	}
	if i.isOffline() {
		return misused(errors.New("--counters are those of the running proxy, and manifests have none"))
	}
	answer, err := i.ask(ctx, "/counters", url.Values{})
	_, _ = os.Stdout.Write(answer)
	return err
}

func (i *inspection) dump(ctx context.Context) error {
	if err := i.check(); err != nil {
		return err
	}
	if !i.isOffline() {
		answer, err := i.ask(ctx, "/dump", url.Values{})
		_, _ = os.Stdout.Write(answer)
		return err
	}
	table, err := i.offline(ctx)
	if err != nil {
		return err
	}
	state, _, _ := table.Update(service.Batch{})
	return i.print(state)
}

func explainCommand() *cobra.Command {
	var i inspection
	var iface string
	c := &cobra.Command{
		Use:   "explain SOURCE DESTINATION:PORT[/PROTOCOL]",
		Short: "say where a packet goes, which backends it may reach, and why not the others",
		Long: "explain says what this node does with the first packet of a connection from SOURCE (an address, or\n" +
			"the word node) to a Service address: which row takes it, which backends it may reach and how likely,\n" +
			"and the rule that excludes each other endpoint. Exit status 1: it does not reach a backend.",
		Example: "  fairlead explain 10.244.1.7 10.96.0.10:53/udp\n" +
			"  fairlead explain node '[fd00::10]:80' --manifests all.yaml",
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return i.explain(c.Context(), iface, args[0], args[1])
		},
	}
	i.addOfflineTo(c.Flags())
	c.Flags().StringVar(&iface, "interface", "eth0", "on which the packet arrives; SOURCE node has none")
	return c
}

func (i *inspection) explain(ctx context.Context, iface, source, destination string) error {
	if err := i.check(); err != nil {
		return err
	}
	p, err := packet(iface, source, destination)
	if err != nil {
		return misused(err)
	}
	if !i.isOffline() {
		return i.askExplanation(ctx, p)
	}
	table, err := i.offline(ctx)
	if err != nil {
		return err
	}
	x := table.Explain(p)
	return errors.Join(i.print(x), unreached(x))
}

func (i *inspection) askExplanation(ctx context.Context, p model.Packet) error {
	q := url.Values{
		"destination": {p.Destination.String()}, "protocol": {p.Protocol.String()}, "interface": {p.Interface},
	}
	if p.Source.IsValid() {
		q.Set("source", p.Source.String())
	}
	output := i.output
	i.output = "json"
	answer, err := i.ask(ctx, "/explain", q)
	i.output = output
	if err != nil {
		return err
	}
	var x service.Explanation
	if err := json.Unmarshal(answer, &x); err != nil {
		return failed(fmt.Errorf("the proxy's answer: %w", err))
	}
	return errors.Join(i.print(x), unreached(x))
}

// unreached is exit status 1 for a packet that reaches no backend.
func unreached(x service.Explanation) error {
	if x.Verdict == model.Forward.String() {
		return nil
	}
	return exitError{status: exitFound}
}

// packet reads the arguments of explain.
func packet(iface, source, destination string) (p model.Packet, err error) {
	where, protocol, named := strings.Cut(destination, "/")
	p.Protocol = model.TCP
	if named {
		if p.Protocol, err = model.ParseProtocol(protocol); err != nil {
			return p, err
		}
	}
	if p.Destination, err = netip.ParseAddrPort(where); err != nil {
		return p, fmt.Errorf("%q is not an address and port like 10.96.0.10:80, 10.96.0.10:53/udp or [fd00::10]:80",
			destination)
	}
	if source == "node" {
		return p, nil
	}
	if p.Source, err = netip.ParseAddr(source); err != nil {
		return p, fmt.Errorf("%q is neither an IP address nor the word node", source)
	}
	p.Interface = iface
	if p.Source.Is4() != p.Destination.Addr().Is4() {
		return p, fmt.Errorf("%s and %s are of different address families", p.Source, p.Destination)
	}
	return p, nil
}
