package sidebyside

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// A testCase shows one difference. Its file begins with words for readers; then come the sections:
//
//	nodePortAddresses  of the proxies' configuration, one a line; may be missing
//	objects.yaml       what the API server has
//	probes.MODE        FROM PROTOCOL TO -> what becomes of it by kube-proxy; by Fairlead
//	                   FROM PROTOCOL TO -> what becomes of it by both
//	health.MODE        ADDRESS:PORT -> how many endpoints kube-proxy says the node has; Fairlead
//	                   ADDRESS:PORT -> how many both say
type testCase struct {
	name    string
	setup   setup
	objects objects
	probes  map[string][]expectation // by mode
	health  map[string][]healthExpectation
}

type expectation struct {
	probe
	theirs, ours string
}

type healthExpectation struct {
	to           netip.AddrPort
	theirs, ours int
}

// TestDifferences shows that every difference is still one, and that nothing else is.
func TestDifferences(t *testing.T) {
	cases := readCases(t)
	for _, d := range differences {
		if !slices.ContainsFunc(cases, func(c testCase) bool { return c.name == d.name }) {
			t.Errorf("there is no case testdata/%s.txtar", d.name)
		}
	}
	s := newStage(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if err := s.configure(t.Context(), c.setup); err != nil {
				t.Fatal(err)
			}
			if err := s.api.apply(t.Context(), newObjects()); err != nil { // a ClusterIP cannot be changed
				t.Fatal(err)
			}
			if err := s.bring(t.Context(), c.objects); err != nil {
				t.Fatal(err)
			}
			for _, p := range s.pairs {
				for _, e := range c.probes[p.mode] {
					c.check(t, p, e)
				}
				for _, e := range c.health[p.mode] {
					c.checkHealth(t, p, e)
				}
			}
		})
	}
}

func (c *testCase) check(t *testing.T, p *pair, want expectation) {
	t.Helper()
	var got contrast
	for try := 0; try < 3 && (got.theirs.String() != want.theirs || got.ours.String() != want.ours); try++ {
		var err error // the machine is busy: silence may have been impatience
		if got, err = p.contrast(t.Context(), want.probe, c.objects); err != nil {
			t.Fatal(err)
		}
	}
	if got.theirs.String() != want.theirs || got.ours.String() != want.ours {
		t.Errorf("%s\nbut the case says\n\tkube-proxy: %s\n\tfairlead:   %s", got, want.theirs, want.ours)
		return
	}
	if d := explain(got); want.theirs != want.ours && (d == nil || d.name != c.name) {
		t.Errorf("%s\nis explained by %+v", got, d)
	}
}

func (c *testCase) checkHealth(t *testing.T, p *pair, want healthExpectation) {
	t.Helper()
	got := healthContrast{pair: p, objects: c.objects, to: want.to}
	for _, s := range c.objects.services {
		if s.Spec.HealthCheckNodePort == int32(want.to.Port()) {
			got.service = s
		}
	}
	if got.service == nil {
		t.Fatalf("%s is no Service's health check", want.to)
	}
	theirs, ours := told(got.service, want.theirs), told(got.service, want.ours)
	got.await(t.Context(), func(c healthContrast) bool { return c.theirs == theirs && c.ours == ours })
	if got.theirs != theirs || got.ours != ours {
		t.Errorf("%s\nbut the case says\n\tkube-proxy: %s\n\tfairlead:   %s", got, theirs, ours)
		return
	}
	if d := explainHealth(got); theirs != ours && (d == nil || d.name != c.name) {
		t.Errorf("%s\nis explained by %+v", got, d)
	}
}

func readCases(t *testing.T) (cases []testCase) {
	t.Helper()
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		c, err := readCase(name)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		cases = append(cases, c)
	}
	return cases
}

func readCase(name string) (testCase, error) {
	c := testCase{name: strings.TrimSuffix(filepath.Base(name), ".txtar"), setup: setup{detectLocalMode: clusterCIDR}}
	text, err := os.ReadFile(name)
	if err != nil {
		return c, err
	}
	c.probes, c.health = map[string][]expectation{}, map[string][]healthExpectation{}
	for _, section := range txtar.Parse(text).Files {
		lines := strings.Split(strings.TrimSpace(string(section.Data)), "\n")
		switch section.Name {
		case "nodePortAddresses":
			c.setup.nodePortAddresses = lines
		case "objects.yaml":
			c.objects, err = readObjects(section.Data)
		case "probes." + nftables, "probes." + iptables:
			c.probes[strings.TrimPrefix(section.Name, "probes.")], err = readProbes(lines)
		case "health." + nftables, "health." + iptables:
			c.health[strings.TrimPrefix(section.Name, "health.")], err = readHealth(lines)
		default:
			err = fmt.Errorf("unknown section %s", section.Name)
		}
		if err != nil {
			return c, err
		}
	}
	return c, nil
}

func readProbes(lines []string) (all []expectation, err error) {
	for _, line := range lines {
		var e expectation
		question, answers, _ := strings.Cut(line, " -> ")
		theirs, ours, two := strings.Cut(answers, "; ")
		if !two {
			ours = theirs
		}
		words := strings.Fields(question)
		if theirs == "" || len(words) != 3 {
			return nil, fmt.Errorf("%q is not FROM PROTOCOL TO -> ANSWER; ANSWER", line)
		}
		e.theirs, e.ours, e.from = theirs, ours, testbed.Place(words[0])
		if e.protocol, err = model.ParseProtocol(words[1]); err != nil {
			return nil, err
		}
		if e.to, err = netip.ParseAddrPort(words[2]); err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

func readHealth(lines []string) (all []healthExpectation, err error) {
	for _, line := range lines {
		var e healthExpectation
		to, answers, _ := strings.Cut(line, " -> ")
		theirs, ours, two := strings.Cut(answers, "; ")
		if !two {
			ours = theirs
		}
		if e.to, err = netip.ParseAddrPort(to); err != nil {
			return nil, err
		}
		if e.theirs, err = strconv.Atoi(theirs); err != nil {
			return nil, err
		}
		if e.ours, err = strconv.Atoi(ours); err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

// readObjects reads Services and EndpointSlices, and fills in what the API server would.
func readObjects(text []byte) (objects, error) {
	o := newObjects()
	for document := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal(document, &meta); err != nil {
			return o, err
		}
		switch meta.Kind {
		case "Service":
			s := &corev1.Service{}
			if err := yaml.UnmarshalStrict(document, s); err != nil {
				return o, err
			}
			s.Namespace = metav1.NamespaceDefault
			for i := range s.Spec.Ports {
				if s.Spec.Ports[i].Protocol == "" {
					s.Spec.Ports[i].Protocol = corev1.ProtocolTCP
				}
			}
			if s.Spec.ClusterIPs == nil {
				s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
			}
			o.services[s.Name] = s
		case "EndpointSlice":
			s := &discoveryv1.EndpointSlice{}
			if err := yaml.UnmarshalStrict(document, s); err != nil {
				return o, err
			}
			s.Namespace = metav1.NamespaceDefault
			for i := range s.Ports {
				if s.Ports[i].Protocol == nil {
					s.Ports[i].Protocol = new(corev1.ProtocolTCP)
				}
			}
			o.slices[s.Name] = s
		default:
			return o, fmt.Errorf("kind %q", meta.Kind)
		}
	}
	return o, nil
}

// TestDocs keeps docs/differences.md complete: every difference stands there.
func TestDocs(t *testing.T) {
	text, err := os.ReadFile("../../../docs/differences.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range differences {
		if !strings.Contains(string(text), "\n| `"+d.name+"` |") {
			t.Errorf("docs/differences.md has no row for %s", d.name)
		}
	}
	for _, c := range readCases(t) {
		if !slices.ContainsFunc(differences, func(d difference) bool { return d.name == c.name }) {
			t.Errorf("testdata/%s.txtar is the case of no difference", c.name)
		}
	}
}
