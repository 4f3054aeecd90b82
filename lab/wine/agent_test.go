package wine

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/hnssim"
	"fairlead.dev/fairlead/lab/wine/fakehns"
)

// node is a Windows node with HNS and the agent's program.
type node struct {
	*windows
	t       *testing.T
	sim     *hnssim.Service
	server  *fakehns.Server
	program string
	objects string   // the file with manifests
	flags   []string // of the agent
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{windows: newWindows(t), t: t, sim: hnssim.New(hns.Version{Major: 15, Minor: 5})}
	n.program = filepath.Join(t.TempDir(), "fairlead.exe")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", n.program, "fairlead.dev/fairlead/cmd/fairlead")
	build.Env = append(os.Environ(), "GOOS=windows", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	n.plugin()
	n.serve("127.0.0.1:0")
	n.env = append(n.env, fakehns.Variable+"="+n.server.Address(), "KUBE_NETWORK=cni")
	n.objects = filepath.Join(t.TempDir(), "objects.yaml")
	n.flags = []string{
		"--manifests", path(n.objects), "--hostname-override", "node-a", "--node-ip", "192.0.2.1",
		"--healthz-bind-address", free(t), "--metrics-bind-address", free(t),
	}
	return n
}

// free is an address at which nothing listens: Wine has the machine's ports.
func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// serve starts the server of HNS.
func (n *node) serve(address string) {
	n.t.Helper()
	server, err := fakehns.StartAt(n.sim, address)
	if err != nil {
		n.t.Fatal(err)
	}
	n.server = server
	n.t.Cleanup(func() { server.Close() })
}

// plugin does what the container network plugin does: a network, and the endpoints of pods.
func (n *node) plugin() {
	network := n.make(hnssim.Networks, "", hns.Network{Name: "cni", Type: "L2Bridge"})
	for _, ip := range []string{"10.244.1.11", "10.244.1.12"} {
		n.make(hnssim.Endpoints, network, hns.Endpoint{IPConfigurations: []hns.IPConfig{{Address: ip}}})
	}
}

// stranger makes a load balancer of another program.
func (n *node) stranger() {
	networks, err := n.sim.Do(hnssim.Call{Verb: hnssim.Enumerate, Kind: hnssim.Networks})
	var ids []string
	if err == nil {
		err = json.Unmarshal(networks, &ids)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	endpoint := n.make(hnssim.Endpoints, ids[0], hns.Endpoint{
		IPConfigurations: []hns.IPConfig{{Address: "172.16.0.1"}}, Flags: hns.Remote,
	})
	n.make(hnssim.LoadBalancers, "", hns.LoadBalancer{
		Endpoints: []string{endpoint}, FrontendVIPs: []string{"172.16.0.9"},
		PortMappings: []hns.PortMapping{{Protocol: 6, InternalPort: 1, ExternalPort: 1}},
	})
}

const ofStranger = "balancer 172.16.0.9 port 1/6 to 1 flags 0.0 distribution 0 source none endpoints 172.16.0.1"

func (n *node) make(k hnssim.Kind, within string, o any) (id string) {
	n.t.Helper()
	document, err := json.Marshal(o)
	var answer json.RawMessage
	if err == nil {
		answer, err = n.sim.Do(hnssim.Call{Verb: hnssim.Create, Kind: k, ID: within, Document: document})
	}
	var made struct{ ID string }
	if err == nil {
		err = json.Unmarshal(answer, &made)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return made.ID
}

// manifests are those of a Service with endpoints.
func (n *node) manifests(endpoints ...string) {
	n.t.Helper()
	text := `{kind: Service, apiVersion: v1, metadata: {name: web, namespace: default},
spec: {type: NodePort, clusterIP: 10.96.0.1, ports: [{port: 80, nodePort: 30080}]}}
---
{kind: EndpointSlice, apiVersion: discovery.k8s.io/v1, addressType: IPv4, ports: [{port: 8080}],
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}, endpoints: [`
	for _, ip := range endpoints {
		where := "node-b"
		if strings.HasPrefix(ip, "10.244.1.") {
			where = "node-a"
		}
		text += fmt.Sprintf("{addresses: [%s], nodeName: %s}, ", ip, where)
	}
	next := n.objects + ".new"
	if err := os.WriteFile(next, []byte(text+"]}\n"), 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Rename(next, n.objects); err != nil {
		n.t.Fatal(err)
	}
}

// balancers are lines of load balancers.
func (n *node) balancers() []string {
	return slices.DeleteFunc(n.sim.Lines(), func(l string) bool { return !strings.HasPrefix(l, "balancer ") })
}

// serves waits until the Service's load balancers have these endpoints, beside others.
func (n *node) serves(what, endpoints string, others ...string) {
	n.t.Helper()
	want := append([]string{
		"balancer 10.96.0.1 port 80/6 to 8080 flags 0.0 distribution 0 source none endpoints " + endpoints,
		"balancer node port 30080/6 to 8080 flags 0.18 distribution 0 source none endpoints " + endpoints,
	}, others...)
	slices.Sort(want)
	n.has(what, want...)
}

func (n *node) has(what string, want ...string) {
	n.t.Helper()
	eventually.Equal(n.t, what, strings.Join(want, "\n"), func() string { return strings.Join(n.balancers(), "\n") })
}

// start starts the agent, and waits until its rules are in force. The test shows what it has said if it fails.
func (n *node) start() *exec.Cmd {
	n.t.Helper()
	c, output := n.command(n.t, n.program, append([]string{"run"}, n.flags...)...)
	if err := c.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()
		if n.t.Failed() {
			n.t.Logf("%s has said\n%s", filepath.Base(n.program), output())
		}
	})
	eventually.True(n.t, "the agent's rules are in force", func() bool { return strings.Contains(output(), "msg=programmed ") })
	return c
}

// kill ends the agent as a crash does.
func (n *node) kill(agent *exec.Cmd) {
	n.t.Helper()
	if err := agent.Process.Kill(); err != nil {
		n.t.Fatal(err)
	}
	_ = agent.Wait() // killed
}

// changes are the calls that changed something since the last time.
func (n *node) changes() (all []string) {
	for _, c := range n.sim.Calls() {
		if c.Verb != hnssim.Enumerate && c.Verb != hnssim.Query {
			all = append(all, c.String())
		}
	}
	return all
}

// The agent serves, follows changes, is killed, goes on with what is there, outlives a restart of HNS, and cleans up.
// Objects of other programs stay.
func TestAgent(t *testing.T) {
	n := newNode(t)
	n.stranger()
	n.manifests("10.244.1.11", "10.244.2.13")
	agent := n.start()
	n.serves("the Service", "10.244.1.11,10.244.2.13", ofStranger)
	n.manifests("10.244.1.12", "10.244.2.13", "10.244.3.14")
	n.serves("a change", "10.244.1.12,10.244.2.13,10.244.3.14", ofStranger)

	n.kill(agent)
	n.serves("after the kill", "10.244.1.12,10.244.2.13,10.244.3.14", ofStranger)
	n.changes()
	agent = n.start()
	if calls := n.changes(); len(calls) > 0 {
		t.Errorf("after a restart there is nothing to change, and the agent calls %q", calls)
	}
	n.manifests("10.244.3.14")
	n.serves("a change after the restart", "10.244.3.14", ofStranger)

	address := n.server.Address()
	if err := n.server.Close(); err != nil {
		t.Fatal(err)
	}
	n.sim.Restart()
	n.plugin()
	n.serve(address)
	n.serves("after HNS has started anew", "10.244.3.14")
	n.stranger()
	n.answers("status")
	if text := n.answers("explain", "10.244.1.11", "10.96.0.1:80"); !strings.Contains(text, "10.244.3.14") {
		t.Errorf("explain does not name the endpoint:\n%s", text)
	}
	n.kill(agent)
	if text, err := n.run(t, n.program, "clean"); err != nil {
		t.Errorf("clean: %v\n%s", err, text)
	}
	n.has("after clean", ofStranger)
	if lines := n.sim.Lines(); len(lines) != 4 {
		t.Errorf("beside a load balancer and three endpoints of others clean leaves some: %q", lines)
	}
}

// answers asks the agent until it answers.
func (n *node) answers(args ...string) (text string) {
	n.t.Helper()
	eventually.Nil(n.t, strings.Join(args, " "), func() (err error) {
		text, err = n.run(n.t, n.program, args...)
		return err
	})
	return text
}
