package file

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/service"
)

const (
	web = `apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
`
	webSlice = `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.244.1.2]}]
ports: [{port: 8080}]
`
	webEndpoints = `apiVersion: v1
kind: Endpoints
metadata: {name: web}
subsets: [{addresses: [{ip: 10.244.1.9}], ports: [{port: 8080}]}]
`
	db = `apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: 10.96.0.11, ports: [{port: 5432}]}
`
)

// bench is a directory of manifests and a Source that reads it.
type bench struct {
	*testing.T
	dir string
	*Source
}

func newBench(t *testing.T, files map[string]string) *bench {
	t.Helper()
	b := &bench{T: t, dir: t.TempDir()}
	for name, text := range files {
		b.write(name, text)
	}
	return b
}

func (b *bench) path(name string) string { return filepath.Join(b.dir, name) }

func (b *bench) write(name, text string) {
	b.Helper()
	b.must(os.MkdirAll(filepath.Dir(b.path(name)), 0o755))
	b.must(os.WriteFile(b.path(name), []byte(text), 0o644))
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// start reads the paths, which are relative to the directory; none means the directory itself.
func (b *bench) start(paths ...string) *bench {
	b.Helper()
	if paths == nil {
		paths = []string{""}
	}
	for i, p := range paths {
		paths[i] = b.path(p)
	}
	var err error
	b.Source, err = New(Options{Paths: paths, Node: "node"})
	b.must(err)
	b.Cleanup(func() { b.Close() })
	return b
}

// expect compares the next batch, one row for each object and problem.
func (b *bench) expect(want ...string) {
	b.Helper()
	ctx, cancel := eventually.Context(b.Context())
	defer cancel()
	batch, err := b.Next(ctx)
	b.must(err)
	slices.Sort(want)
	if got := b.rows(batch); !slices.Equal(got, want) {
		b.Fatalf("got\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// expectNothing checks that no batch comes from what has happened so far.
func (b *bench) expectNothing() {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), 4*quiet)
	defer cancel()
	if batch, err := b.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		b.Fatalf("got %q, %v; want nothing", b.rows(batch), err)
	}
}

func (b *bench) rows(batch service.Batch) []string {
	rows := []string{}
	for n, s := range batch.Services.All() {
		if s == nil {
			rows = append(rows, "gone service "+n.String())
			continue
		}
		rows = append(rows, fmt.Sprintf("service %s %v", n, s.ClusterIPs))
	}
	for n, s := range batch.Slices.All() {
		if s == nil {
			rows = append(rows, "gone slice "+n.Namespace)
			continue
		}
		var addrs []netip.Addr
		for _, e := range s.Endpoints {
			addrs = append(addrs, e.Addr)
		}
		rows = append(rows, fmt.Sprintf("slice %s/%s %v", n.Namespace, s.Service, addrs))
	}
	if n := batch.Node; n != nil {
		rows = append(rows, fmt.Sprintf("node %s %q %v", n.Name, n.Zone, n.Eligible))
	}
	if batch.ServiceCIDRs != nil {
		rows = append(rows, fmt.Sprintf("cidrs %v", batch.ServiceCIDRs))
	}
	for _, p := range batch.Problems {
		if p.Cause == service.Warning { // TestFile_warnings has them
			continue
		}
		rows = append(rows, "problem "+strings.ReplaceAll(p.Error(), b.dir+string(filepath.Separator), ""))
	}
	for _, object := range batch.Resolved {
		rows = append(rows, "resolved "+strings.ReplaceAll(object, b.dir+string(filepath.Separator), ""))
	}
	slices.Sort(rows)
	return rows
}

const (
	webRow   = "service default/web [10.96.0.10]"
	sliceRow = "slice default/web [10.244.1.2]"
	dbRow    = "service shop/db [10.96.0.11]"
)

func TestFile_forms(t *testing.T) {
	for name, c := range map[string]struct {
		file, text string
		want       []string
	}{
		"documents":    {"a.yaml", "# shop\n---\n" + web + "---\n" + webSlice + "...\n---\n\n--- # end\n" + db, []string{webRow, sliceRow, dbRow}},
		"crlf":         {"a.yml", strings.ReplaceAll(web+"---\n"+db, "\n", "\r\n"), []string{webRow, dbRow}},
		"mark":         {"a.yaml", "\ufeff%YAML 1.1\n---\n" + web, []string{webRow}},
		"behind":       {"a.yaml", "--- " + `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.10"}}`, []string{webRow}},
		"list":         {"a.yaml", list(0, web, webSlice, db), []string{webRow, sliceRow, dbRow}},
		"indented":     {"a.yaml", list(4, web, webSlice, db), []string{webRow, sliceRow, dbRow}},
		"flow list":    {"a.yaml", "kind: List\napiVersion: v1\nitems: [{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.10}}]\n", []string{webRow}},
		"typed list":   {"a.yaml", "apiVersion: v1\nitems:\n- metadata: {name: web}\n  spec: {clusterIP: 10.96.0.10}\nkind: ServiceList\n", []string{webRow}},
		"list in list": {"a.yaml", list(0, web, list(2, db)), []string{webRow, dbRow}},
		"anchors": {"a.yaml", "kind: List\napiVersion: v1\nitems:\n- &a\n  apiVersion: v1\n  kind: Service\n  metadata: {name: web}\n  spec: {clusterIP: 10.96.0.10}\n- <<: *a\n  metadata: {name: db, namespace: shop}\n",
			[]string{webRow, "service shop/db [10.96.0.10]"}},
		"json": {"a.json", `{"apiVersion":"v1","items":[{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.10"}}` + "\n" + `],"kind":"List"}`, []string{webRow}},
		"json twice": {"a.json", `{"kind":"ServiceList","apiVersion":"v1","items":[{"metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.10"}}]}` +
			`{"kind":"Service","apiVersion":"v1","metadata":{"name":"db","namespace":"shop"},"spec":{"clusterIP":"10.96.0.11"}}`, []string{webRow, dbRow}},
		"flow style": {"a.yaml", "{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.10}}", []string{webRow}},
		"empty":      {"a.yaml", "# nothing yet\n---\n", nil},
		"no items":   {"a.yaml", "apiVersion: v1\nitems: []\nkind: List\n", nil},
		"hidden":     {".a.yaml", web, nil},
		"other":      {"a.txt", web, nil},
		"deeper":     {"a/a.yaml", web, nil},
		"block text": {"a.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata:\n  x: |\n    items:\n    - a\n     ---\n---\n" + web, []string{webRow}},
		"endpoints":  {"a.yaml", webEndpoints + "---\n" + web, []string{webRow, "slice default/web [10.244.1.9]"}},
		"both":       {"a.yaml", webEndpoints + "---\n" + webSlice, []string{sliceRow}},
		"nodes": {"a.yaml", list(0, "apiVersion: v1\nkind: Node\nmetadata: {name: other}\n", "apiVersion: v1\nkind: Node\nmetadata: {name: node, labels: {topology.kubernetes.io/zone: a}}\n"),
			[]string{`node node "a" true`}},
		"cidr": {"a.yaml", "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\nspec: {cidrs: [10.96.0.0/16]}\n", []string{"cidrs [10.96.0.0/16]"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newBench(t, map[string]string{c.file: c.text}).start().expect(c.want...)
		})
	}
}

// list is what kubectl makes of several objects.
func list(indent int, objects ...string) string {
	text := "apiVersion: v1\nitems:\n"
	pad := strings.Repeat(" ", indent)
	for _, o := range objects {
		o = strings.ReplaceAll(strings.TrimSuffix(o, "\n"), "\n", "\n"+pad+"  ")
		text += pad + "- " + o + "\n"
	}
	return text + "kind: List\nmetadata:\n  resourceVersion: \"\"\n"
}

func TestFile_otherKindsAreCounted(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": "apiVersion: apps/v1\nkind: Deployment\n---\n" + web +
		"---\napiVersion: v1\nkind: ConfigMapList\nitems:\n- metadata: {name: a}\n- metadata: {name: b}\n"}).start()
	b.expect(webRow)
	if got := fmt.Sprint(b.said.skipped); got != "map[ConfigMap:2 Deployment:1]" {
		t.Fatal(got)
	}
}

func TestFile_edit(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": list(0, web, webSlice), "b.yaml": db}).start()
	b.expect(webRow, sliceRow, dbRow)
	b.write("a.yaml", list(0, web, strings.Replace(webSlice, "1.2", "1.3", 1)))
	b.expect("slice default/web [10.244.1.3]")
	b.write("a.yaml", "# comment\n"+list(2, web, strings.Replace(webSlice, "1.2", "1.3", 1))) // the same
	b.expectNothing()
	b.write("c.yaml", strings.ReplaceAll(db, "db", "db2"))
	b.expect("service shop/db2 [10.96.0.11]")
	b.must(os.Remove(b.path("b.yaml")))
	b.expect("gone service shop/db")
	b.must(os.Rename(b.path("c.yaml"), b.path("d.yaml"))) // says the same under another name
	b.expectNothing()
	b.write("new", web)
	b.must(os.Rename(b.path("new"), b.path("a.yaml"))) // as editors do
	b.expect("gone slice default")
}

// TestFile_manyOfOneTenant: while many files of a tenant are to be read, new or changed, another tenant's changes are
// found one after the other.
func TestFile_manyOfOneTenant(t *testing.T) {
	const many = 3000
	b := newBench(t, map[string]string{"victim.yaml": web}).start()
	b.expect(webRow)
	changes := 0
	change := func() { // in turn of a file that there is, and by a new one
		changes++
		name := "victim.yaml"
		if changes%2 == 0 {
			name = fmt.Sprintf("victim-%d.yaml", changes)
		}
		text := strings.Replace(web, "10.96.0.10", fmt.Sprint("10.96.1.", changes), 1)
		b.write(name, strings.Replace(text, "web", strings.TrimSuffix(name, ".yaml"), 1))
	}
	for _, port := range []string{"1", "2"} { // at first the files are new
		for i := range many {
			text := strings.NewReplacer("db", fmt.Sprint("db-", i), "5432", port).Replace(db)
			b.write(fmt.Sprintf("many-%d.yaml", i), text)
		}
		change()
		found := 0
		for left := many; left > 0; {
			ctx, cancel := eventually.Context(t.Context())
			batch, err := b.Next(ctx)
			cancel()
			b.must(err)
			for name, is := range batch.Services.All() {
				switch {
				case name.Namespace == "shop":
					left--
				case is != nil:
					found++
					change()
				}
			}
		}
		if found < 3 {
			t.Errorf("with port %s, %d changes were found before all files of another tenant were read; want 3 and more", port, found)
		}
	}
}

// TestFile_renameWritten: the old name is due before the new one, to which a program still writes.
func TestFile_renameWritten(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": db}).start()
	b.expect(dbRow)
	b.must(os.Rename(b.path("a.yaml"), b.path("b.yaml")))
	var writer sync.WaitGroup
	defer writer.Wait()
	writer.Go(func() {
		for begun := time.Now(); time.Since(begun) < 3*quiet; {
			_ = os.Chtimes(b.path("b.yaml"), begun, begun)
		}
	})
	b.expectNothing()
}

// TestFile_removedWhileOthersWrite: a file goes although another one, which is written all the time, has its inode.
// The test only says when the other one is due: a busy machine holds up a real writer for longer than quiet.
func TestFile_removedWhileOthersWrite(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": db}).start()
	b.expect(dbRow)
	b.watcher.at(b.path("b.yaml"), time.Now().Add(time.Hour))
	b.must(os.Link(b.path("a.yaml"), b.path("b.yaml")))
	b.must(os.Remove(b.path("a.yaml")))
	b.expect("gone service shop/db")
	b.watcher.at(b.path("b.yaml"), time.Now())
	b.expect(dbRow)
}

func TestFile_nodeAndCIDRsGo(t *testing.T) {
	b := newBench(t, map[string]string{
		"a.yaml": "apiVersion: v1\nkind: Node\nmetadata: {name: node, labels: {topology.kubernetes.io/zone: a}}\n",
		"b.yaml": "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\nspec: {cidrs: [10.96.0.0/16]}\n",
	}).start()
	b.expect(`node node "a" true`, "cidrs [10.96.0.0/16]")
	b.must(os.Remove(b.path("a.yaml")))
	b.expect(`node  "" true`)
	b.must(os.Remove(b.path("b.yaml")))
	b.expect("cidrs []")
}

func TestFile_sameObjectTwice(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": web, "b.yaml": strings.Replace(web, "0.10", "0.99", 1)}).start()
	b.expect("service default/web [10.96.0.99]",
		"problem Service default/web: is defined more than once, in a.yaml and b.yaml; the last one is used")
	b.must(os.Remove(b.path("b.yaml")))
	b.expect(webRow, "resolved Service default/web")
}

func TestFile_brokenAtFirst(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": web + "---\na: b: c\n---\n" + db}).start()
	b.expect(webRow, dbRow,
		"problem a.yaml:6: document 2: mapping values are not allowed in this context; the rest of the file is used")
	b.write("b.yaml", "# another look says it no second time")
	b.expectNothing()
	b.write("a.yaml", web+"---\na: b: c\n---\n"+strings.Replace(db, "0.11", "0.12", 1))
	b.expect("service shop/db [10.96.0.12]")
}

func TestFile_brokenLater(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": web + "---\n" + db}).start()
	b.expect(webRow, dbRow)
	b.write("a.yaml", db+"---\nkind: Service\nspec:\n  - x\n y: [\n")
	b.expect("problem a.yaml:9: document 2: did not find expected key; its previous content stays in force")
	b.write("a.yaml", db)
	b.expect("gone service default/web", "resolved a.yaml:9")
	b.write("a.yaml", db+"---\n[")
	b.expect("problem a.yaml:7: document 2: did not find expected node content; its previous content stays in force")
	b.write("b.yaml", "# another file")
	b.must(os.Remove(b.path("a.yaml")))
	b.expect("gone service shop/db", "resolved a.yaml:7")
}

func TestFile_brokenItem(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": list(0, web, webSlice)}).start()
	b.expect(webRow, sliceRow)
	b.write("a.yaml", list(0, web, "apiVersion: v1\nkind: Service\nspec: {a: b\n", webSlice))
	b.expect("problem a.yaml:10: document 1: did not find expected ',' or '}'; its previous content stays in force")
}

func TestFile_truncated(t *testing.T) {
	for name, text := range map[string]string{
		"list": list(0, web, webSlice, db),
		"json": `{"apiVersion":"v1","items":[{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"}}],"kind":"List"}`,
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, map[string]string{"a.yaml": text}).start()
			ctx := t.Context()
			_, err := b.Next(ctx)
			b.must(err)
			b.write("a.yaml", text[:len(text)*2/3])
			batch, err := b.Next(ctx)
			if b.must(err); len(batch.Services)+len(batch.Slices) > 0 || len(batch.Problems) != 1 {
				t.Fatal(b.rows(batch))
			}
		})
	}
}

func TestFile_wrongTypeCostsOneObject(t *testing.T) {
	bad := strings.Replace(web, "port: 80", "port: http", 1)
	b := newBench(t, map[string]string{"a.yaml": bad + "---\n" + db}).start()
	b.expect(dbRow, "problem a.yaml:4: Service default/web: "+
		"spec.ports[0].port: is a string, not a value of type int32; it is left out")
	b.write("a.yaml", web+"---\n"+db)
	b.expect(webRow, "resolved Service default/web")
	b.write("a.yaml", bad+"---\n"+strings.Replace(db, "0.11", "0.12", 1))
	b.expect("service shop/db [10.96.0.12]", "problem a.yaml:4: Service default/web: "+
		"spec.ports[0].port: is a string, not a value of type int32; its last good version stays in force")
	b.write("a.yaml", web+"---\n"+strings.Replace(db, "0.11", "0.12", 1)) // as it was before
	b.expect("resolved Service default/web")
}

func TestFile_badContent(t *testing.T) {
	for name, c := range map[string]struct{ text, reason string }{
		"binary":   {"\x7fELF\x00\x00", "a.yaml: has a zero byte, so it is neither YAML nor JSON in UTF-8"},
		"text":     {"hello", "a.yaml:1: document 1: is not a Kubernetes object"},
		"sequence": {"- 1\n- 2\n", "a.yaml:1: document 1: is not a Kubernetes object"},
		"no kind":  {"\n\na: 1\n", "a.yaml:1: document 1: has no kind"},
		"huge":     {"kind: X\ndata: " + strings.Repeat("x", maxPart), "a.yaml:1: document 1: is larger than 4 MiB in one piece"},
		"deep":     {strings.Repeat("kind: List\nitems: [{", 1) + strings.Repeat("kind: List, items: [{", 20) + strings.Repeat("}]", 21), "a.yaml:1: document 1: items[0]"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, map[string]string{"a.yaml": c.text, "b.yaml": web}).start()
			batch, err := b.Next(t.Context())
			b.must(err)
			if rows := b.rows(batch); len(rows) != 2 || !strings.HasPrefix(rows[0], "problem "+c.reason) || rows[1] != webRow {
				t.Fatalf("%q", rows)
			}
		})
	}
}

func TestFile_manyDocuments(t *testing.T) {
	var text strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&text, "---\n%s", strings.Replace(web, "web", fmt.Sprintf("web-%d", i), 1))
	}
	b := newBench(t, map[string]string{"a.yaml": text.String()}).start()
	batch, err := b.Next(t.Context())
	if b.must(err); len(batch.Services) != 10_000 {
		t.Fatal(len(batch.Services))
	}
}

func TestFile_singleFileDisappears(t *testing.T) {
	b := newBench(t, map[string]string{"m.yaml": web}).start("m.yaml")
	b.expect(webRow)
	b.must(os.Remove(b.path("m.yaml")))
	batch, err := b.Next(t.Context())
	if b.must(err); len(batch.Services) > 0 || len(batch.Problems) != 1 {
		t.Fatal(b.rows(batch))
	}
	b.write("m.yaml", db)
	b.expect("gone service default/web", dbRow, "resolved m.yaml")
}

func TestFile_deadlineLosesNothing(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": web + "---\n" + strings.Replace(db, "5432", "99999", 1)}).start()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 3 {
		if _, err := b.Next(ended); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	batch, err := b.Next(t.Context())
	if b.must(err); len(batch.Services) != 2 || len(batch.Problems) == 0 {
		t.Fatal(b.rows(batch))
	}
	b.write("b.yaml", strings.ReplaceAll(db, "db", "db2"))
	for {
		ctx, cancel := context.WithTimeout(t.Context(), quiet/3)
		batch, err := b.Next(ctx)
		cancel()
		if err == nil {
			if len(batch.Services) != 1 {
				t.Fatal(b.rows(batch))
			}
			return
		}
	}
}

func TestNew_usage(t *testing.T) {
	if _, err := New(Options{Paths: []string{"/nonexistent/m.yaml"}}); err == nil || !strings.Contains(err.Error(), "/nonexistent/m.yaml") {
		t.Fatal(err)
	}
	if _, err := New(Options{Paths: []string{os.DevNull}}); err == nil || !strings.Contains(err.Error(), os.DevNull) {
		t.Fatal(err)
	}
}
