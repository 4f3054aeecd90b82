package file

import (
	"bytes"
	"hash/maphash"
	"os"
	"reflect"
	"testing"

	"fairlead.dev/fairlead/lab/allocs"
)

// FuzzFile reads arbitrary bytes. Reading ends with objects, with a failure, or with neither if there is nothing but
// white space. Memory is bounded. Cutting a document into items gives the same objects as decoding it whole.
func FuzzFile(f *testing.F) {
	for _, text := range []string{
		web + "---\n" + webSlice, list(0, web, db), list(2, web, list(2, webEndpoints)), "a: b: c", "---\n...\n%YAML 1.1\n---",
		`{"kind":"List","items":[{"kind":"Service","apiVersion":"v1"}],"items":[]}{}`, "items:\n- a\n b", "\ufeff{kind: List}",
		"kind: List\nitems:\n- &a {kind: Service}\n- *a\n", "items:\n  - kind: X\n#c\n  - kind: \"Y\nitems:\"\nkind: List",
	} {
		f.Add([]byte(text))
	}
	seed := maphash.MakeSeed()
	f.Fuzz(func(t *testing.T, text []byte) {
		docs, err := split(bytes.NewReader(text), int64(len(text)), seed)
		var r *reading
		allocs.Bound(t, len(text), func() { r = readBytes(t, text) })
		if (err != nil || len(docs) > 0) && len(r.contents)+len(r.failures) == 0 {
			t.Fatalf("neither objects nor a failure from %q", text)
		}
		for _, d := range docs {
			whole := text[d.start:d.end]
			if d.items == nil || bytes.Count(whole, []byte("items")) > 1 { // a key may not come twice
				continue
			}
			cut := newReading(r.file, &file{}, newSource(Options{}))
			if cut.list(t.Context(), d) == nil {
				if d := (&reading{}).decoder(); d.document(whole) == nil {
					sameObjects(t, cut, d)
				}
			}
		}
	})
}

func readBytes(t *testing.T, text []byte) *reading {
	f, err := os.Create(t.TempDir() + "/a.yaml")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(text); err != nil {
		t.Fatal(err)
	}
	r := newReading(f, &file{path: f.Name()}, newSource(Options{}))
	if err := r.run(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	return r
}

func sameObjects(t *testing.T, cut *reading, whole *decoder) {
	var objects []object
	for _, c := range cut.contents {
		objects = append(objects, c.objects...)
	}
	for i := range whole.objects {
		whole.objects[i].path = "" // in the whole
	}
	if !reflect.DeepEqual(objects, whole.objects) {
		t.Fatalf("by items: %v\nwhole:    %v", objects, whole.objects)
	}
}
