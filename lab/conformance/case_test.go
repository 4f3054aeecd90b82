package conformance

import (
	"cmp"
	"embed"
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/tools/txtar"

	"fairlead.dev/fairlead/model"
)

//go:embed testdata/*.txtar
var testdata embed.FS

// family is the one of a case's addresses.
type family string

const (
	ipv4 family = "ipv4"
	ipv6 family = "ipv6"
	dual family = "dual" // the case has addresses of both
)

// testCase is one file of testdata, in one family.
type testCase struct {
	name    string
	family  family
	options map[string]string
	steps   []step
}

// step is one change of the cluster, and what must hold after it.
type step struct {
	rows     *model.State // in place of objects
	objects  []object     // which are new or replace others
	deleted  []string     // "Kind namespace/name"
	state    string
	problems []string // each begins the text of one problem
	probes   []probe
}

// load reads all cases in the families for which they are written or can be derived.
func load() ([]*testCase, error) {
	files, err := testdata.ReadDir("testdata")
	if err != nil {
		return nil, err
	}
	var cases []*testCase
	for _, file := range files {
		text, err := testdata.ReadFile(path.Join("testdata", file.Name()))
		if err != nil {
			return nil, err
		}
		both, err := parseFile(strings.TrimSuffix(file.Name(), ".txtar"), string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file.Name(), err)
		}
		cases = append(cases, both...)
	}
	return cases, nil
}

func parseFile(name, text string) ([]*testCase, error) {
	c, err := parseCase(name, text)
	if err != nil {
		return nil, err
	}
	switch word, _, _ := strings.Cut(c.options["family"], " "); family(word) {
	case "":
		c.family = ipv4
		twin, err := parseCase(name, EmbedText(text))
		if err != nil {
			return nil, fmt.Errorf("in IPv6: %w", err)
		}
		twin.family = ipv6
		return []*testCase{c, twin}, nil
	case ipv4, dual:
		c.family = family(word)
		return []*testCase{c}, nil
	}
	return nil, fmt.Errorf("family %q is neither ipv4 nor dual", c.options["family"])
}

// parseCase reads the sections of a file: those of the first step have no number, the others -2, -3
// and so on.
func parseCase(name, text string) (*testCase, error) {
	c := &testCase{name: name, options: map[string]string{}}
	for _, section := range txtar.Parse([]byte(text)).Files {
		kind, n, err := sectionName(section.Name)
		if err == nil && n > len(c.steps) {
			c.steps = append(c.steps, step{})
		}
		if err == nil && n > len(c.steps) {
			err = fmt.Errorf("there is no step %d", n-1)
		}
		if err == nil {
			err = c.section(kind, n, string(section.Data))
		}
		if err != nil {
			return nil, fmt.Errorf("section %s: %w", section.Name, err)
		}
	}
	if len(c.steps) == 0 {
		return nil, fmt.Errorf("no step")
	}
	return c, nil
}

func sectionName(name string) (kind string, step int, err error) {
	kind, number, ok := strings.Cut(strings.TrimSuffix(name, ".yaml"), "-")
	switch {
	case kind == "options":
		return kind, 0, nil
	case !ok:
		return kind, 1, nil
	}
	step, err = strconv.Atoi(number)
	return kind, step, err
}

func (c *testCase) section(kind string, n int, text string) (err error) {
	if kind == "options" {
		for _, line := range lines(text) {
			key, value, _ := strings.Cut(line, ":")
			c.options[key] = strings.TrimSpace(value)
		}
		return nil
	}
	s := &c.steps[n-1]
	switch kind {
	case "rows":
		s.rows, err = model.ParseState(text)
	case "objects":
		s.objects, err = parseObjects(text)
	case "delete":
		s.deleted = lines(text)
	case "state":
		s.state, err = canonical(text)
	case "problems":
		s.problems = slices.Sorted(slices.Values(lines(text)))
	case "probes":
		s.probes, err = parseProbes(text)
	default:
		err = fmt.Errorf("unknown")
	}
	return err
}

func lines(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == '\n' })
}

// canonical parses rows and prints them again: sorted, as the model sorts them.
func canonical(text string) (string, error) {
	s, err := model.ParseState(text)
	if err != nil {
		return "", err
	}
	return s.String(), nil
}

// skip is why a plane deviates from a case, in all ways to play it or in this one; empty if it does not.
func (c *testCase) skip(plane string, w way) string {
	kind, _, _ := strings.Cut(plane, "-") // "ipvs-route" has the deviations of "ipvs", too
	for _, name := range []string{plane, kind} {
		key := "skip " + name
		if reason := cmp.Or(c.options[key], c.options[key+" "+string(c.family)], c.options[key+" "+w.name]); reason != "" {
			return reason
		}
	}
	return ""
}

// ofSockets is the case with probes from TCP and UDP sockets on the node only. Expectations about sources stay as long
// as sockets keep theirs.
func (c *testCase) ofSockets() *testCase {
	out := *c
	out.steps = slices.Clone(c.steps)
	opened := map[string]bool{}
	for i := range out.steps {
		var kept []probe
		for _, p := range c.steps[i].probes {
			if !p.again {
				opened[p.flow] = p.ofSocket()
			}
			if opened[p.flow] {
				kept = append(kept, p.keepsSource())
			}
		}
		out.steps[i].probes = kept
	}
	return &out
}

// hiding is the case of a plane whose backends see the node's address only: expectations about sources are left out.
func (c *testCase) hiding() *testCase {
	out := *c
	out.steps = slices.Clone(c.steps)
	for i := range out.steps {
		out.steps[i].probes = slices.Clone(c.steps[i].probes)
		for j := range out.steps[i].probes {
			p := &out.steps[i].probes[j]
			p.sources = maps.Clone(p.sources)
			for backend := range p.sources {
				p.sources[backend] = anyPlace
			}
		}
	}
	return &out
}

// ofDrivers reports whether the case has something for programs in drivers to do.
func (c *testCase) ofDrivers() bool {
	return slices.ContainsFunc(c.steps, func(s step) bool {
		return slices.ContainsFunc(s.probes, func(q probe) bool { return q.ofDriver() })
	})
}

// needs reports whether a probe of the case uses a protocol.
func (c *testCase) needs(p model.Protocol) bool {
	return slices.ContainsFunc(c.steps, func(s step) bool {
		return slices.ContainsFunc(s.probes, func(q probe) bool { return q.protocol == p })
	})
}

// inFamily keeps the addresses of the case's family.
func (c *testCase) inFamily(addrs ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range addrs {
		a := netip.MustParseAddr(s)
		if c.family != ipv6 {
			out = append(out, a)
		}
		if c.family != ipv4 {
			out = append(out, embedAddr(a))
		}
	}
	return out
}

// difference lists the lines that only one of two texts has.
func difference(want, have string) string {
	var out strings.Builder
	for _, line := range lines(want) {
		if !slices.Contains(lines(have), line) {
			fmt.Fprintln(&out, "missing:", line)
		}
	}
	for _, line := range lines(have) {
		if !slices.Contains(lines(want), line) {
			fmt.Fprintln(&out, "surplus:", line)
		}
	}
	return out.String()
}
