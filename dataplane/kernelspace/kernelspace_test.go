package kernelspace_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/kernelspace"
	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/hnssim"
	"fairlead.dev/fairlead/model"
)

// newest is a version of HNS that can do everything.
var newest = hns.Version{Major: 15, Minor: 5}

// node is a Windows node with a network plugin: pods 10.244.1.11 and 12 are on it, and the gateway cbr0.
type node struct {
	t       *testing.T
	sim     *hnssim.Service
	options kernelspace.Options
	made    int // endpoints of strangers
}

func newNode(t *testing.T, v hns.Version, kind string) *node {
	t.Helper()
	n := &node{t: t, sim: hnssim.New(v), options: kernelspace.Options{
		Network: "cni", RootEndpoint: "cbr0", Everywhere: true, Records: t.TempDir(),
	}}
	n.options.HNS = hnssim.Client{Service: n.sim}
	if kind == hns.Overlay {
		n.options.SourceVIP = netip.MustParseAddr("10.244.1.2")
		n.options.Host = func(_, _ netip.Addr) (netip.Addr, net.HardwareAddr, error) {
			return netip.MustParseAddr("192.0.2.1"), net.HardwareAddr{0, 0x15, 0x5d, 0, 0, 1}, nil
		}
	}
	n.plugin(kind)
	return n
}

// plugin does what the container network plugin does at its start.
func (n *node) plugin(kind string) {
	n.t.Helper()
	network := hns.Network{Name: "cni", Type: kind, SchemaVersion: hns.Schema()}
	if kind == hns.Overlay {
		network.Policies = []hns.Policy{route("10.244.2.0/24", "192.0.2.22")}
	}
	id := n.do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Networks, Document: document(network)}).ID
	for _, e := range []hns.Endpoint{
		{Name: "cbr0", IPConfigurations: []hns.IPConfig{{Address: "10.244.1.1"}}},
		{IPConfigurations: []hns.IPConfig{{Address: "10.244.1.11"}, {Address: "fd00::af4:10b"}}},
		{IPConfigurations: []hns.IPConfig{{Address: "10.244.1.12"}, {Address: "fd00::af4:10c"}}},
	} {
		n.do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Endpoints, ID: id, Document: document(e)})
	}
	n.sim.Calls()
}

func route(prefix, provider string) hns.Policy {
	return hns.Policy{Type: hns.RemoteSubnetRoute, Settings: document(hns.Route{
		DestinationPrefix: prefix, IsolationID: 4096, ProviderAddress: provider,
	})}
}

func document(o any) json.RawMessage {
	d, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return d
}

// do is a call of another program.
func (n *node) do(c hnssim.Call) (o struct{ ID string }) {
	n.t.Helper()
	answer, err := n.sim.Do(c)
	if err == nil && len(answer) > 0 {
		err = json.Unmarshal(answer, &o)
	}
	if err != nil {
		n.t.Fatalf("%s: %v", c, err)
	}
	return o
}

// stranger makes a load balancer of another program.
func (n *node) stranger(vip string, port uint16) string {
	n.t.Helper()
	n.made++
	endpoint := n.do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.Endpoints, ID: n.network(), Document: document(hns.Endpoint{
		Flags: hns.Remote, IPConfigurations: []hns.IPConfig{{Address: fmt.Sprintf("172.16.%d.%d", n.made>>8, n.made&255)}},
	})}).ID
	return n.do(hnssim.Call{Verb: hnssim.Create, Kind: hnssim.LoadBalancers, Document: document(hns.LoadBalancer{
		Endpoints: []string{endpoint}, FrontendVIPs: []string{vip}, SchemaVersion: hns.Schema(),
		PortMappings: []hns.PortMapping{{Protocol: 6, InternalPort: 80, ExternalPort: port}},
	})}).ID
}

func (n *node) network() string {
	n.t.Helper()
	network, err := n.options.HNS.Network(context.Background(), "cni")
	if err != nil {
		n.t.Fatal(err)
	}
	return network.ID
}

func (n *node) open() dataplane.Dataplane {
	n.t.Helper()
	p, err := kernelspace.Driver(n.options).Open(dataplane.Config{Log: testLog(n.t)})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { p.Close() })
	return p
}

// sync opens a plane and has it program rows.
func (n *node) sync(rows string) (dataplane.Dataplane, *model.State) {
	n.t.Helper()
	p, s := n.open(), state(n.t, rows)
	if err := p.Sync(n.t.Context(), s); err != nil {
		n.t.Fatal(err)
	}
	return p, s
}

// apply programs what leads from one State to rows.
func (n *node) apply(p dataplane.Dataplane, from *model.State, rows string) *model.State {
	n.t.Helper()
	s := state(n.t, rows)
	if err := p.Apply(n.t.Context(), s, model.Diff(from, s)); err != nil {
		n.t.Fatal(err)
	}
	return s
}

// wrote are the calls since the last time that changed something.
func (n *node) wrote() string {
	var calls []string
	for _, c := range n.sim.Calls() {
		if c.Verb != hnssim.Enumerate && c.Verb != hnssim.Query {
			calls = append(calls, c.String())
		}
	}
	return strings.Join(calls, "\n")
}

// lines are the objects of HNS but for the network plugin's own.
func (n *node) lines() string {
	return strings.Join(slices.DeleteFunc(n.sim.Lines(), func(l string) bool {
		return strings.HasPrefix(l, "endpoint") && strings.Contains(l, " local ") && !strings.Contains(l, "10.244.1.2 ")
	}), "\n")
}

// state reads rows. The kind of an address follows from its prefix.
func state(t *testing.T, rows string) *model.State {
	t.Helper()
	s, err := model.ParseState(rows)
	if err != nil {
		t.Fatal(err)
	}
	for k, f := range s.Frontends {
		switch {
		case k.Port >= 30000:
			f.Kind = model.NodePort
		case strings.HasPrefix(k.Addr.String(), "198.51.100."):
			f.Kind = model.ExternalIP
		case strings.HasPrefix(k.Addr.String(), "203.0.113."):
			f.Kind = model.LoadBalancerIP
			f.Kept = k.Addr.As4()[3] > 100
			if k.Port == 10256 {
				f.Kind = model.HealthCheckNodePort
			}
		}
		s.Frontends[k] = f
	}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	web = `
frontend 10.96.0.10:80/TCP any forward shop/web cluster snat never
pool shop/web cluster
backend shop/web cluster 10.244.1.11:8080 local
`
	webMore = web + "backend shop/web cluster 10.244.2.13:8080\n"
)

func want(t *testing.T, what, have, want string) {
	t.Helper()
	if have, want = strings.TrimSpace(have), strings.TrimSpace(want); have != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, have, want)
	}
}

func TestSync_documents(t *testing.T) {
	t.Parallel()
	rows := webMore + `
frontend 10.96.0.11:53/UDP any forward dns/dns:dns cluster snat always
pool dns/dns:dns cluster affinity 3h0m0s
backend dns/dns:dns cluster 10.244.1.12:5353 local
frontend 192.0.2.1:30080/TCP any forward shop/web cluster snat always
frontend 192.0.2.101:30080/TCP any forward shop/web cluster snat always
frontend 198.51.100.1:80/TCP any forward shop/web cluster snat always
frontend 203.0.113.1:80/TCP any forward shop/lb local snat never
frontend 203.0.113.101:80/TCP any forward shop/lb local snat never
pool shop/lb local
backend shop/lb local 10.244.1.12:8080 local
frontend 203.0.113.1:10256/TCP any forward shop/lb:healthCheckNodePort local snat always
pool shop/lb:healthCheckNodePort local
backend shop/lb:healthCheckNodePort local 192.0.2.1:10256 local
frontend 10.96.0.12:80/TCP any reject shop/empty
guard 10.96.0.0/16 reject
`
	n := newNode(t, newest, "L2Bridge")
	n.sync(rows)
	want(t, "L2Bridge", n.lines(), `
balancer 10.96.0.10 port 80/6 to 8080 flags 1.0 distribution 0 source none endpoints 10.244.1.11,fd00::af4:10b,10.244.2.13
balancer 10.96.0.11 port 53/17 to 5353 flags 0.0 distribution 2 source none endpoints 10.244.1.12,fd00::af4:10c
balancer 198.51.100.1 port 80/6 to 8080 flags 0.16 distribution 0 source none endpoints 10.244.1.11,fd00::af4:10b,10.244.2.13
balancer 203.0.113.1 port 10256/6 to 10256 flags 0.0 distribution 0 source none endpoints 10.244.1.1
balancer 203.0.113.1 port 80/6 to 8080 flags 1.16 distribution 0 source none endpoints 10.244.1.12,fd00::af4:10c
balancer 203.0.113.101 port 80/6 to 8080 flags 1.28 distribution 0 source none endpoints 10.244.1.12,fd00::af4:10c
balancer node port 30080/6 to 8080 flags 0.18 distribution 0 source none endpoints 10.244.1.11,fd00::af4:10b,10.244.2.13
endpoint 10.244.2.13 remote mac 02-11-0a-f4-02-0d
`)
}
