package file

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/allocs"
)

const sliceHead = `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
`

// endpoints are so many bytes of what kubectl prints.
func endpoints(size int) string {
	one := fmt.Sprintf(endpointItem, 1, 2, 3, 4, 5, 6, 7, 8)
	return sliceHead + strings.Repeat(one, size/len(one))
}

// keys are so many different keys of a map in flow style.
func keys(n int) string {
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, "%x,", i)
	}
	return text.String()
}

// The ingredients of small manifests of an attacker.
var (
	longText    = strings.Repeat("x", 54<<10)
	manyAliases = strings.Repeat("*a,", 18<<10)
	deepText    = strings.Repeat("[", 9000) + strings.Repeat("]", 9000)
)

// Reading a file uses the memory that memory.go states, whatever the file has. The test is not parallel.
func TestFile_memory(t *testing.T) {
	const fixed = 8 << 20
	for name, text := range map[string]string{
		"slice of 1,000 endpoints": endpoints(330 << 10),
		"slice of 1 MB":            endpoints(1 << 20),
		"slice of 4 MB":            endpoints(4<<20 - 1000),
		"one text":                 "kind: X\na: " + strings.Repeat("x", 3<<20),
		"keys":                     "kind: X\na: {" + keys(50_000) + "b}",
		"many keys":                "kind: X\na: {" + keys(400_000) + "b}",
		"maps in maps":             "kind: X\na: " + strings.Repeat("? ", 20_000),
		"aliases of a long text":   "kind: X\na: &a " + longText + "\nb: [" + manyAliases + "]",
		"aliases of aliases":       laughs(20),
		"aliases as keys":          "kind: X\na: &a " + longText + "\n? [" + manyAliases + "]\n: b\n",
		"an alias of itself":       "kind: X\na: &a [" + strings.Repeat("*a,", 100) + "]",
		"a deep one":               "kind: X\na: " + deepText,
		"JSON": `{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"ports":[` +
			strings.Repeat("{},", 40_000) + "{}]}}",
	} {
		t.Run(name, func(t *testing.T) {
			allocs.Live(t, fixed+int(min(maxMemory, memory([]byte(text)))), func() { readBytes(t, []byte(text)) })
		})
	}
}

// 4 MB of whatever consists of many parts take no more than 64 MiB.
func TestFile_memoryOfParts(t *testing.T) {
	const size = 4 << 20
	for name, text := range map[string]string{
		"empty items":      "kind: List\nitems:\n" + strings.Repeat("-\n", maxItems),
		"more empty items": "kind: List\nitems:\n" + strings.Repeat("-\n", size/2),
		"documents":        strings.Repeat("a\n---\n", maxDocuments),
		"more documents":   strings.Repeat("a\n---\n", size/6),
		"JSON":             strings.Repeat("{}", maxDocuments),
		"more JSON":        strings.Repeat("{}", size/2),
		"Services": "kind: List\nitems:\n" +
			strings.Repeat("- "+strings.ReplaceAll(web, "\n", "\n  ")+"\n", size/len(web)),
	} {
		t.Run(name, func(t *testing.T) {
			allocs.Live(t, 64<<20, func() { readBytes(t, []byte(text)) })
		})
	}
}

// laughs has lists of which each names the one before ten times.
func laughs(lines int) string {
	text := "kind: X\na0: &a0 ha\n"
	for i := range lines {
		text += fmt.Sprintf("a%d: &a%d [%s]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d,", i), 10))
	}
	return text
}

// A document that is too large in some way is refused by name; the others of the file, and other files, are used.
func TestFile_refused(t *testing.T) {
	for name, c := range map[string]struct{ text, reason string }{
		"values":  {"kind: X\na: {" + keys(400_000) + "b}\n", "has about 800006 values in "},
		"aliases": {laughs(20), "has more than 8744 bytes when aliases are replaced by what they stand for"},
		"text": {"kind: X\na: &a " + longText + "\nb: [" + manyAliases + "]\n",
			"has more than 446552 bytes when aliases are replaced by what they stand for"},
		"itself": {"kind: X\na: &a [*a]\n", "has more than 100 lists and maps in each other"},
		"deep":   {"kind: X\na: " + deepText + "\n", "has more than 100 lists and maps in each other"},
		"key":    {"kind: X\na: &a x\n? [*a, *a]\n: b\n", "has a key that is a list, a map or null"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, map[string]string{"a.yaml": web + "---\n" + c.text + "---\n" + webSlice, "b.yaml": db}).start()
			batch, err := b.Next(t.Context())
			b.must(err)
			rows := b.rows(batch)
			if len(rows) != 4 || rows[1] != webRow || rows[2] != dbRow && rows[3] != sliceRow {
				t.Errorf("%q", rows)
			}
			if want := "problem a.yaml:5: document 2: " + c.reason; !strings.HasPrefix(rows[0], want) {
				t.Errorf("%q, want %q", rows[0], want)
			}
		})
	}
}

// The messages about a file are bounded, whatever its errors are.
func TestFile_manyFailures(t *testing.T) {
	b := newBench(t, map[string]string{
		"a.yaml": strings.Repeat("a\n---\n", 1000),
		"b.yaml": web,
		"c.yaml": strings.Repeat("a\n---\n", maxDocuments+1),
		"d.yaml": "kind: List\nitems:\n" + strings.Repeat("-\n", maxItems+1),
	}).start()
	batch, err := b.Next(t.Context())
	b.must(err)
	rows := strings.Join(b.rows(batch), "\n")
	if n := len(batch.Problems); n != maxFailures+4 { // web has no endpoints
		t.Errorf("%d problems", n)
	}
	for _, want := range []string{
		webRow, "a.yaml:38: document 20: is not a Kubernetes object; ", "a.yaml: 980 more documents; ",
		"c.yaml: has more than 100000 documents; make it several files; ",
		"d.yaml: has more than 500000 items in one List; make it several files; ",
	} {
		if !strings.Contains(rows, want) {
			t.Errorf("%q is not in\n%s", want, rows)
		}
	}
}

// Manifests mean what kubectl, which uses sigs.k8s.io/yaml, takes them for.
func TestYAMLToJSON(t *testing.T) {
	for _, text := range []string{
		"", "~", "a", "1", "{}", "[]", "a: yes\nb: no\nc: on\nd: ~\ne: null\nf:\n",
		"0x10: 010\n1e3: 1_000\ntrue: 2026-01-02\n1.5: 12:30:45\n",
		"a: &a [1, 2]\nb: *a\nc: &c {x: 1, y: 2}\nd: {<<: *c, y: 3}\ne: {<<: [*c, {z: 1}]}\n",
		"a: |\n  x\n  y\nb: >\n  x\n  y\n",
		"a: \"<&>\\u2028\\0\"\nb: 'it''s'\n",
		"- 18446744073709551615\n- -5\n- 1e30\n- 0.1\n- !!str 1\n- !!binary aGk=\n- !!float 1\n",
		"a: 1\na: 2\n", "? a\n: - b\n  - c: [d, {e: f}]\n", web, webSlice, "a: .inf", "a: [", "{a: b: c}", "*a", "!!int x",
	} {
		want, wantErr := yaml.YAMLToJSON([]byte(text))
		got, err := convertYAML([]byte(text))
		if (err == nil) != (wantErr == nil) || err == nil && compact(t, got.Bytes()) != compact(t, want) {
			t.Errorf("%q: %s, %v; want %s, %v", text, got, err, want, wantErr)
		}
	}
}

// compact writes JSON in one way.
func compact(t *testing.T, text []byte) string {
	t.Helper()
	var value any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&value); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return fmt.Sprint(value)
}
