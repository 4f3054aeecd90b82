package service_test

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

var update = flag.Bool("update", false, "write the sections of testdata that the tests compare")

// TestTable_state compiles the objects of each file in testdata and compares the State, the problems
// and the explanations with what the file says.
func TestTable_state(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no cases in testdata: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c := readCase(t, archive)
			table := newTable(t, c.options)
			state, change, problems := table.Update(c.batch)
			if err := state.Validate(); err != nil {
				t.Error(err)
			}
			replayed := model.NewState()
			replayed.Pods = newState(t, c.options).Pods
			replayed.Apply(change)
			if got, want := replayed.String(), state.String(); got != want {
				t.Errorf("the Change leads to\n%s\nnot to\n%s", got, want)
			}
			c.compare(t, "state", state.String())
			c.compare(t, "problems", problemLines(problems))
			c.compare(t, "explain", c.explain(t, table))
			c.compare(t, "services", summaries(table))
			if *update {
				if err := os.WriteFile(file, txtar.Format(archive), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// testCase is one file of testdata.
type testCase struct {
	archive *txtar.Archive
	options service.Options
	batch   service.Batch
}

// caseConfig is the section "config" of a case: what differs from the cluster that all cases share.
type caseConfig struct {
	NodePortAddresses []string `json:"nodePortAddresses"`
	MasqueradeAll     bool     `json:"masqueradeAll"`
	Mode              string   // empty: one in which other proxies translate before
	NoExternalIPs     bool     `json:"noExternalIPs"`
	NodeIPs           []netip.Addr
	DetectLocal       *service.DetectLocal
	Addrs             []netip.Addr   // of the node's interfaces
	ServiceCIDRs      []netip.Prefix // none if not given
}

func readCase(t *testing.T, archive *txtar.Archive) *testCase {
	t.Helper()
	c := &testCase{archive: archive, options: defaultOptions()}
	c.batch = readObjects(t, section(archive, "objects.yaml"))
	config := caseConfig{Addrs: []netip.Addr{
		addr("127.0.0.1"), addr("192.0.2.1"), addr("10.244.1.1"),
		addr("::1"), addr("fd00::c000:201"), addr("fe80::1"),
	}}
	if err := yaml.UnmarshalStrict(section(archive, "config"), &config); err != nil {
		t.Fatal(err)
	}
	c.options.NodePortAddresses = config.NodePortAddresses
	c.options.MasqueradeAll = config.MasqueradeAll
	c.options.ExternalIPs = !config.NoExternalIPs
	c.options.NodeIPs = config.NodeIPs
	c.options.Mode = func() string { return config.Mode }
	if config.DetectLocal != nil {
		c.options.DetectLocal = *config.DetectLocal
	}
	c.batch.Addrs = config.Addrs
	if config.ServiceCIDRs != nil {
		c.batch.ServiceCIDRs = config.ServiceCIDRs
	}
	if c.batch.Node == nil {
		c.batch.Node = testNode()
	}
	return c
}

// explain explains each line of the section "packets": source, interface (- for this node), and
// destination as address:port/protocol.
func (c *testCase) explain(t *testing.T, table *service.Table) string {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(string(section(c.archive, "packets"))) {
		words := strings.Fields(line)
		destination, protocol, _ := strings.Cut(words[2], "/")
		proto, err := model.ParseProtocol(protocol)
		if err != nil {
			t.Fatal(err)
		}
		b.WriteString(table.Explain(model.Packet{
			Protocol:    proto,
			Source:      addr(words[0]),
			Interface:   strings.TrimPrefix(words[1], "-"),
			Destination: netip.MustParseAddrPort(destination),
		}).String())
	}
	return b.String()
}

// summaries has a line for each Service, port, address and endpoint.
func summaries(table *service.Table) string {
	var b strings.Builder
	for _, name := range table.ServiceNames("") {
		s, _ := table.Summarise(name, true)
		line := fmt.Sprintf("%s %d slices %s %s", s.Service, s.Slices, s.Affinity, s.Ignored)
		b.WriteString(strings.Join(strings.Fields(line), " ") + "\n")
		for _, p := range s.Ports {
			fmt.Fprintf(&b, "  %s %s: %d ready, %d draining, %d excluded\n", p.Name, p.Port, p.Ready, p.Draining, p.Excluded)
			if p.Unserved != "" {
				fmt.Fprintf(&b, "    %s\n", p.Unserved)
			}
			for _, a := range p.Addresses {
				fmt.Fprintf(&b, "    %s %s %s", a.Kind, a.At, a.Verdict)
				if a.Sources > 0 {
					fmt.Fprintf(&b, " from %d ranges", a.Sources)
				}
				if a.Owner != "" {
					fmt.Fprintf(&b, " of %s", a.Owner)
				}
				b.WriteString("\n")
			}
			for _, e := range p.Endpoints {
				line := fmt.Sprintf("endpoint %s %s %s", e.At, e.State, e.Rule)
				if e.Outside != "" {
					line += " outside " + e.Outside
				}
				b.WriteString("    " + strings.TrimSpace(line) + "\n")
			}
		}
	}
	return b.String()
}

// compare compares one section of the case, or writes it.
func (c *testCase) compare(t *testing.T, name, got string) {
	t.Helper()
	if want := string(section(c.archive, name)); !*update && got != want {
		t.Errorf("%s is\n%s\nshould be\n%s\n(to accept it: go test -run %s -update)", name, got, want, t.Name())
	}
	c.archive.Files = slices.DeleteFunc(c.archive.Files, func(f txtar.File) bool { return f.Name == name })
	if got != "" {
		c.archive.Files = append(c.archive.Files, txtar.File{Name: name, Data: []byte(got)})
	}
}

func section(archive *txtar.Archive, name string) []byte {
	for _, f := range archive.Files {
		if f.Name == name {
			return f.Data
		}
	}
	return nil
}

func defaultOptions() service.Options {
	return service.Options{
		NodeName:    "node",
		ExternalIPs: true,
		DetectLocal: service.DetectLocal{Mode: service.LocalClusterCIDR, ClusterCIDRs: []netip.Prefix{
			netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00::af4:0/112"),
		}},
	}
}

func testNode() *service.Node {
	return &service.Node{Name: "node", Zone: "zone-a", Eligible: true,
		IPs: []netip.Addr{addr("192.0.2.1"), addr("fd00::c000:201")}}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func newTable(t testing.TB, o service.Options) *service.Table {
	t.Helper()
	table, err := service.NewTable(o)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// newState is the State of a Table without objects.
func newState(t testing.TB, o service.Options) *model.State {
	s, _, _ := newTable(t, o).Update(service.Batch{})
	return s.Clone()
}

func problemLines(problems []service.Problem) string {
	var b strings.Builder
	for _, p := range problems {
		b.WriteString(p.Error() + "\n")
	}
	return b.String()
}

// readObjects makes a Batch of YAML documents.
func readObjects(t testing.TB, text []byte) service.Batch {
	t.Helper()
	b := service.Batch{}
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		var kind struct{ Kind string }
		if err := yaml.Unmarshal(doc, &kind); err != nil {
			t.Fatal(err)
		}
		switch kind.Kind {
		case "Service":
			s, problems := service.FromService(decode[corev1.Service](t, doc))
			b.Services.Set(s.Name, s)
			b.Problems = append(b.Problems, problems...)
		case "EndpointSlice":
			s, problems := service.FromSlice(decode[discoveryv1.EndpointSlice](t, doc))
			if s != nil {
				b.Slices.Set(s.Name, s)
			}
			b.Problems = append(b.Problems, problems...)
		case "Endpoints":
			all, problems := service.FromEndpoints(decode[corev1.Endpoints](t, doc))
			for _, s := range all {
				b.Slices.Set(s.Name, s)
			}
			b.Problems = append(b.Problems, problems...)
		case "Node":
			n, problems := service.FromNode(decode[corev1.Node](t, doc))
			b.Node = n
			b.Problems = append(b.Problems, problems...)
		case "ServiceCIDR":
			o := decode[networkingv1.ServiceCIDR](t, doc)
			cidrs, problems := service.FromServiceCIDRs([]*networkingv1.ServiceCIDR{o})
			b.ServiceCIDRs = cidrs
			b.Problems = append(b.Problems, problems...)
		default:
			t.Fatalf("unknown kind %q", kind.Kind)
		}
	}
	return b
}

func decode[T any](t testing.TB, doc []byte) *T {
	t.Helper()
	o := new(T)
	if err := yaml.UnmarshalStrict(doc, o); err != nil {
		t.Fatalf("%v in\n%s", err, doc)
	}
	return o
}
