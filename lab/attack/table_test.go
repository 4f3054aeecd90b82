package attack

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
)

var update = flag.Bool("update", false, "write the table of docs/security.md anew")

// TestTable holds the document's table against the list of attacks.
func TestTable(t *testing.T) {
	const page, begin, end = "../../docs/security.md", "<!-- attacks -->\n", "<!-- end of attacks -->\n"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := strings.Cut(string(text), begin)
	has, after, ok := strings.Cut(rest, end)
	switch {
	case !ok:
		t.Fatalf("%s has no lines %q and %q", page, begin, end)
	case *update:
		if err := os.WriteFile(page, []byte(before+begin+rows()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	case has != rows():
		t.Errorf("%s is not up to date: go test ./lab/attack -run TestTable -update", page)
	}
}

// rows are those of the table. It is dense, for the document is short.
func rows() string {
	var text strings.Builder
	text.WriteString("|attack|actor|what stops it|")
	for _, p := range planes {
		fmt.Fprintf(&text, "%s|", p)
	}
	text.WriteString("\n|---|---|---|" + strings.Repeat(":-:|", len(planes)) + "\n")
	for _, a := range attacks {
		fmt.Fprintf(&text, "|`%s`: %s|%s|%s|", a.name, a.does, a.who, a.stops)
		for _, p := range planes {
			fmt.Fprintf(&text, "%s|", a.result(p))
		}
		text.WriteString("\n")
	}
	return text.String()
}

// result is what the suite expects.
func (a attack) result(p plane) string {
	switch _, known := a.known[p]; {
	case !a.appliesTo(p):
		return "–"
	case known:
		return "no"
	}
	return "✓"
}

var figuresFile = flag.String("figures", "", "write what was measured to a file")

// figures are what was measured, by attack and plane. The test kernel tells them as lines.
type figures struct {
	mu   sync.Mutex
	text map[string]string
}

var measured = &figures{text: map[string]string{}}

func (f *figures) parse(lines string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	line := regexp.MustCompile(`figures: (\S+) on (\S+): change (\d+) ms \(control (\d+) ms\), memory (\S+) MiB`)
	for _, m := range line.FindAllStringSubmatch(lines, -1) {
		f.text[m[1]+" "+m[2]] = fmt.Sprintf("%s (%s), %s", m[3], m[4], m[5])
	}
}

// write writes a table, if that is wanted.
func (f *figures) write(t *testing.T) {
	if *figuresFile == "" {
		return
	}
	var text strings.Builder
	text.WriteString("# What attacks cost the others\n\n" +
		"Made by `go test ./lab/attack -run TestAttacks -figures FILE`, see [security.md](security.md). Each cell: the victim's " +
		"slowest change, in milliseconds; in brackets the slowest one of a node that is not attacked, on the same machine at the " +
		"same time; and the mebibytes that the process takes more than before. There were two processors, which floods take from " +
		"both nodes. Mode ipvs ran in the test kernel, which is emulated.\n\n| attack |")
	for _, p := range planes {
		fmt.Fprintf(&text, " %s |", p)
	}
	text.WriteString("\n|---|" + strings.Repeat("---|", len(planes)) + "\n")
	for _, a := range attacks {
		fmt.Fprintf(&text, "| %s |", a.name)
		for _, p := range planes {
			fmt.Fprintf(&text, " %s |", cmp.Or(f.text[a.name+" "+string(p)], "–"))
		}
		text.WriteString("\n")
	}
	if err := os.WriteFile(*figuresFile, []byte(text.String()), 0o644); err != nil {
		t.Error(err)
	}
}
