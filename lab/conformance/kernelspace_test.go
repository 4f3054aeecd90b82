package conformance

import (
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/kernelspace"
	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/lab/hnssim"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

var writeKernelspace = flag.Bool("write-kernelspace", false, "write what mode kernelspace can do of each case anew")

// limits are what HNS cannot do. Those with a field are reported as a Problem of the Service there.
func limits() map[string]string {
	return map[string]string{
		"refuse":                   "spec.ports",
		"drop":                     "", // packets pass on, and find no address
		"source ranges":            "spec.loadBalancerSourceRanges",
		"weights":                  "metadata.annotations[fairlead.dev/weights]",
		"affinity timeout":         "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
		"several target ports":     "spec.ports",
		"pods of the host network": "endpoints",
		"clients of this node":     "spec.externalTrafficPolicy",
		"NodePort on a loopback":   "",
		"masquerade some clients":  "",
		"guard":                    "",
	}
}

// TestKernelspace runs the table on a simulator of Windows' HNS. Each case passes, or testdata/kernelspace.txt says what
// HNS cannot do of it; docs/windows.md has the table of that.
func TestKernelspace(t *testing.T) {
	t.Parallel()
	cases, err := load()
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	passed := 0
	for _, c := range cases {
		n, err := newHNSNode(t, c)
		if err != nil {
			t.Fatal(err)
		}
		cannot := n.run(t)
		line := fmt.Sprintf("%s %s: ", c.name, c.family)
		if len(cannot) == 0 {
			passed++
			line += "passes"
		} else {
			line += "cannot " + strings.Join(cannot, ", ")
		}
		have = append(have, line)
	}
	slices.Sort(have)
	t.Logf("of %d cases %d pass; of the others HNS cannot do a part", len(cases), passed)
	file := filepath.Join("testdata", "kernelspace.txt")
	text := strings.Join(have, "\n") + "\n"
	if *writeKernelspace {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(file); err != nil || string(want) != text {
		t.Errorf("%v; %s differs:\n%s", err, file, difference(string(want), text))
	}
}

// hnsNode is a node with the simulator, and two worlds of the same objects: what HNS is told, and what should be.
type hnsNode struct {
	*testCase
	sim   *hnssim.Service
	plane dataplane.Dataplane
	ours  *world
	right *world
	said  map[string]bool // fields of Problems that say what HNS cannot do
}

func newHNSNode(t *testing.T, c *testCase) (*hnsNode, error) {
	n := &hnsNode{testCase: c, sim: hnssim.New(hns.Version{Major: 15, Minor: 5}), said: map[string]bool{}}
	create := func(kind hnssim.Kind, network string, o any) string {
		document, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := n.sim.Do(hnssim.Call{Verb: hnssim.Create, Kind: kind, ID: network, Document: document})
		if err != nil {
			t.Fatal(err)
		}
		var made struct{ ID string }
		if err := json.Unmarshal(answer, &made); err != nil {
			t.Fatal(err)
		}
		return made.ID
	}
	network := create(hnssim.Networks, "", hns.Network{Name: "cni", Type: "L2Bridge"})
	for _, m := range Cast() {
		if v4 := netip.MustParseAddr(m.Addr); m.Node == testbed.Node && !m.HostNetwork {
			create(hnssim.Endpoints, network, hns.Endpoint{IPConfigurations: []hns.IPConfig{
				{Address: v4.String()}, {Address: embedAddr(v4).String()},
			}})
		}
	}
	var err error
	n.plane, err = kernelspace.Driver(kernelspace.Options{Network: "cni", HNS: hnssim.Client{Service: n.sim}}).
		Open(dataplane.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { n.plane.Close() })
	if n.right, _, err = newWorld(c); err != nil {
		return nil, err
	}
	n.ours, _, err = worldOf(c, func(o *service.Options) { o.HNS = &service.HNS{} })
	return n, err
}

// run returns what HNS cannot do of the case, and fails the test where it does something else.
func (n *hnsNode) run(t *testing.T) []string {
	cannot := map[string]bool{}
	for _, s := range n.steps {
		right, ours := s.rows, s.rows
		if right == nil {
			right, _ = n.right.change(s.objects, s.deleted...)
			ours, _ = n.ours.change(s.objects, s.deleted...)
			for _, p := range n.ours.problem {
				if p.Cause == service.Unsupported {
					n.said[p.Field] = true
				}
			}
		}
		if err := n.plane.Sync(t.Context(), ours); err != nil {
			t.Errorf("%s %s: %v", n.name, n.family, err)
		}
		for _, p := range s.probes {
			if p.again {
				continue
			}
			for _, to := range p.to {
				limit, err := n.probe(p, to, right)
				if err != nil {
					t.Errorf("%s %s: %s: %v", n.name, n.family, p.line, err)
				}
				if limit == "" {
					continue
				}
				cannot[limit] = true
				if field, known := limits()[limit]; !known || field != "" && !n.said[field] && s.rows == nil {
					t.Errorf("%s %s: %s: no Problem says of %q that HNS cannot %s", n.name, n.family, p.line, field, limit)
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(cannot))
}

// probe compares what the simulator does with a packet with what should become of it. The limit is why it differs.
func (n *hnsNode) probe(p probe, to netip.AddrPort, s *model.State) (limit string, err error) {
	source, iface := n.arrival(p.from, to.Addr())
	d := s.Lookup(model.Packet{Protocol: p.protocol, Source: source, Destination: to, Interface: iface})
	var node []netip.Addr
	for _, a := range nodeAddrs() {
		v4 := netip.MustParseAddr(a)
		node = append(node, v4, embedAddr(v4))
	}
	got := n.sim.Reach(to, p.protocol, node)
	pool := s.Pools[d.Pool]
	var want []netip.AddrPort
	for _, b := range pool.Serving() {
		want = append(want, b.AddrPort())
	}
	others := slices.DeleteFunc(slices.Clone(want), func(b netip.AddrPort) bool { return slices.Contains(node, b.Addr()) })
	switch passes := len(got.Backends) == 0; {
	case d.Verdict == model.Pass && passes:
		return "", nil
	case d.NotAllowed:
		return "source ranges", nil
	case d.Guard.IsValid() && passes:
		return "guard", nil
	case d.Verdict == model.Reject && passes:
		return "refuse", nil
	case d.Verdict == model.Drop && passes:
		return "drop", nil
	case to.Addr().IsLoopback() && passes:
		return "NodePort on a loopback", nil
	case len(others) < len(want) && slices.Equal(got.Backends, others):
		return "pods of the host network", nil
	case d.Key.Scope == model.Internal && !slices.Equal(got.Backends, want):
		return "clients of this node", nil
	case d.Verdict != model.Forward || passes:
		return "", fmt.Errorf("%s, but the simulator's backends are %v", d.Verdict, got.Backends)
	}
	return n.shares(p, d, pool, want, got)
}

// shares compares backends, and which of them a client gets.
func (n *hnsNode) shares(p probe, d model.Decision, pool model.Pool, want []netip.AddrPort, got hnssim.Answer) (string, error) {
	ports, weights := map[uint16]bool{}, map[uint16]bool{}
	masquerade := map[bool]bool{}
	for _, b := range pool.Serving() {
		ports[b.Port], weights[b.Weight] = true, true
		masquerade[d.Masquerade(b)] = true
	}
	switch {
	case len(ports) > 1:
		return "several target ports", nil
	case !slices.Equal(got.Backends, want):
		return "", fmt.Errorf("backends are %v, not %v", got.Backends, want)
	case p.forgets != 0:
		return "affinity timeout", nil
	case len(weights) > 1 || p.share != 0:
		return "weights", nil
	case (pool.Affinity > 0) != got.Sticky:
		return "", fmt.Errorf("sticky: %v", got.Sticky)
	case masquerade[got.Source]:
		return "masquerade some clients", nil
	}
	return "", nil
}
