package ebpf_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// directRows are those of a node with two addresses, which both nodes have but for these.
func directRows(node, node6 string) string {
	return `
backend default/web:http cluster 10.244.2.13:8080
backend default/web:http cluster6 [fd00::af4:20d]:8080
backend default/web:dns cluster 10.244.2.13:5353
backend default/web:near cluster 10.244.1.11:8080
frontend ` + node + `:30080/tcp any forward default/web:http cluster snat offcluster
frontend [` + node6 + `]:30080/tcp any forward default/web:http cluster6 snat offcluster
frontend ` + node + `:30053/udp any forward default/web:dns cluster snat offcluster
frontend ` + node + `:30081/tcp any forward default/web:near cluster snat offcluster
frontend 203.0.113.1:80/tcp any forward default/web:http cluster snat offcluster
pods 10.244.0.0/16
pods fd00::af4:0/112
`
}

// openOn makes a plane on a node, with pins and a cgroup for it alone.
func (c cluster) openOn(node testbed.Place, o ebpf.Options) dataplane.Dataplane {
	c.t.Helper()
	o.Serve, o.Cgroup, o.Pins = ebpf.TC, filepath.Join(c.Cgroup(), string(node)), c.pins+"-"+string(node)
	check(c.t, os.Mkdir(o.Cgroup, 0o700))
	c.t.Cleanup(func() { check(c.t, os.Remove(o.Cgroup)) })
	var p dataplane.Dataplane
	check(c.t, c.Do(node, func() (err error) {
		p, err = ebpf.New(o)(dataplane.Config{})
		return err
	}))
	c.t.Cleanup(func() { check(c.t, p.Close()) })
	return p
}

// The node of a backend answers a client who has asked another node. The pod sees who it is, and nothing of the answer
// passes the node that was asked: that one drops all that comes from there.
func TestDirectAnswers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	direct := ebpf.Options{Forwarding: ebpf.ForwardingDSR}
	a, b := c.openOn(testbed.Node, direct), c.openOn(testbed.NodeB, direct)
	rows := parse(t, directRows("192.0.2.1", "fd00::c000:201"))
	check(t, a.Sync(t.Context(), rows))
	check(t, b.Sync(t.Context(), parse(t, directRows("192.0.2.2", "fd00::c000:202"))))
	c.audited(a, rows)
	out, err := c.Command(t.Context(), testbed.Node, "nft", `
		add table inet test
		add chain inet test arrive { type filter hook prerouting priority -300; }
		add rule inet test arrive ip saddr 10.244.2.13 drop
		add rule inet test arrive ip6 saddr fd00::af4:20d drop
		add rule inet test arrive ip saddr 192.0.2.1 drop`).CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	c.expect("pod-c source 192.0.2.9", testbed.Outside, model.TCP, "192.0.2.1:30080")
	c.expect("pod-c source fd00::c000:209", testbed.Outside, model.TCP, "[fd00::c000:201]:30080")
	c.expect("pod-c source 192.0.2.9", testbed.Outside, model.UDP, "192.0.2.1:30053")
	c.expect("pod-c source 192.0.2.9", testbed.Outside, model.TCP, "203.0.113.1:80")
	c.expect("pod-a source 192.0.2.9", testbed.Outside, model.TCP, "192.0.2.1:30081")
	check(t, a.Remove(context.Background()))
	check(t, b.Remove(context.Background()))
}

// NodePorts are not where clients are hidden behind, but at an address of another network: the backend's node knows what
// was asked all the same.
func TestDirectAnswers_elsewhere(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const both = "ip addr add 198.51.100.%[1]d/24 dev eth0; ip addr add fd51::%[1]d/64 dev eth0 nodad"
	for i, node := range []testbed.Place{testbed.Node, testbed.NodeB} {
		c.shell(node, fmt.Sprintf(both, i+1))
	}
	c.shell(testbed.Outside, "ip route replace 198.51.100.1 via 192.0.2.1; ip route replace fd51::1 via fd00::c000:201")
	direct := ebpf.Options{Forwarding: ebpf.ForwardingDSR}
	a, b := c.openOn(testbed.Node, direct), c.openOn(testbed.NodeB, direct)
	check(t, a.Sync(t.Context(), parse(t, directRows("198.51.100.1", "fd51::1"))))
	check(t, b.Sync(t.Context(), parse(t, directRows("198.51.100.2", "fd51::2"))))
	c.expect("pod-c source 192.0.2.9", testbed.Outside, model.TCP, "198.51.100.1:30080")
	c.expect("pod-c source fd00::c000:209", testbed.Outside, model.TCP, "[fd51::1]:30080")
	check(t, a.Remove(context.Background()))
	check(t, b.Remove(context.Background()))
}

func (c cluster) shell(at testbed.Place, commands string) {
	c.t.Helper()
	if out, err := c.Command(c.t.Context(), at, "sh", "-ec", commands).CombinedOutput(); err != nil {
		c.t.Fatalf("%s: %v: %s", commands, err, out)
	}
}
