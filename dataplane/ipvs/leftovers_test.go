package ipvs_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

func TestLeftovers(t *testing.T) {
	t.Parallel()
	if _, err := ipvs.New(ipvs.Options{})(dataplane.Config{}); errors.Is(err, dataplane.ErrUnsupported) {
		vm.Replay(t, "IPVS")
		return
	}
	for name, test := range map[string]func(*namespace){
		"retires":       (*namespace).startsDraining,
		"serves again":  (*namespace).servesAgain,
		"stays closed":  (*namespace).staysClosed,
		"cleans":        (*namespace).cleans,
		"whose is what": (*namespace).owns,
	} {
		t.Run(name, func(t *testing.T) { inNamespace(t, test) })
	}
}

func (n *namespace) startDraining(connections int) {
	n.Helper()
	got, err := ipvs.Driver(ipvs.Options{}).Drain(context.Background(), dataplane.Config{})
	n.check(err)
	if (got > 0) != (connections > 0) {
		n.Errorf("%d connections are left, want %d", got, connections)
	}
}

func (n *namespace) expectLeftover(want dataplane.Leftover) {
	n.Helper()
	got, err := ipvs.Driver(ipvs.Options{}).Inspect()
	n.check(err)
	if got != want {
		n.Errorf("traces: %+v, want %+v", got, want)
	}
}

// startsDraining: nothing goes before a second look has seen that no client has come since.
func (n *namespace) startsDraining() {
	before := n.kernel()
	n.expectLeftover(dataplane.Leftover{})
	n.startDraining(0)
	n.sync(example)
	n.run("nft", "add", "set", "ip", "fairlead-ipvs", "other", "{ type mark; }") // of another version
	n.expectLeftover(dataplane.Leftover{Rules: true})
	n.startDraining(1)
	n.expectLeftover(dataplane.Leftover{Rules: true, Retired: true})
	var chains []string
	for line := range strings.Lines(n.run("nft", "list", "chains")) {
		if _, chain, ok := strings.Cut(strings.TrimSpace(line), "chain "); ok {
			chains = append(chains, strings.TrimSuffix(chain, " {"))
		}
	}
	slices.Sort(chains)
	n.equal(strings.Join(chains, " "), "input-after-ipvs input-after-ipvs refuse refuse")
	n.startDraining(0)
	n.expectLeftover(dataplane.Leftover{})
	n.equal(n.kernel(), before)
}

// staysClosed: the node's own sockets are not reached at addresses that are local for IPVS only, not even while its last
// connections drain.
func (n *namespace) staysClosed() {
	own, err := net.Listen("tcp4", ":22222")
	n.check(err)
	defer own.Close()
	dial := func(address string) error {
		conn, err := net.DialTimeout("tcp", address+":22222", eventually.Patience())
		if err == nil {
			conn.Close()
		}
		return err
	}
	n.check(dial("127.0.0.1"))
	for _, stage := range []struct {
		name string
		do   func()
	}{
		{"serves", func() { n.sync(example) }},
		{"drains", func() { n.startDraining(1) }},
		{"serves again", func() { n.sync(example) }},
	} {
		stage.do()
		if err := dial("203.0.113.1"); !errors.Is(err, unix.ECONNREFUSED) {
			n.Errorf("while IPVS %s, another port of a Service's address: %v", stage.name, err)
		}
	}
}

func (n *namespace) servesAgain() {
	n.sync(example)
	want := n.servers()
	n.startDraining(1)
	if n.servers() == want {
		n.Error("nothing has changed")
	}
	n.sync(example)
	n.equal(n.servers(), want)
	n.equal(strings.Join(n.audit(example), "\n"), "")
}

func (n *namespace) cleans() {
	before := n.kernel()
	n.check(ipvs.Driver(ipvs.Options{}).Remove(context.Background(), dataplane.Config{}))
	n.sync(example)
	n.check(ipvs.Driver(ipvs.Options{}).Remove(context.Background(), dataplane.Config{}))
	n.equal(n.kernel(), before)
}

func (n *namespace) owns() {
	n.sync(example)
	owns, err := ipvs.Owns()
	n.check(err)
	for _, c := range []struct {
		at       string
		protocol uint8
		want     bool
	}{
		{"10.96.0.10:80", unix.IPPROTO_TCP, true},
		{"10.96.0.10:80", unix.IPPROTO_UDP, false},
		{"10.96.0.10:81", unix.IPPROTO_TCP, false},
		{"[fd00::10]:80", unix.IPPROTO_TCP, true},
	} {
		if got := owns(netip.MustParseAddrPort(c.at), c.protocol); got != c.want {
			n.Errorf("%s, protocol %d: %t", c.at, c.protocol, got)
		}
	}
}
