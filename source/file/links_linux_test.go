package file

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// Wine, in which the tests for Windows run, has no symbolic links, and keeps a directory that is watched.

func TestFile_emptyAndUnreadableKeep(t *testing.T) {
	b := newBench(t, map[string]string{"a.yaml": web}).start()
	b.expect(webRow)
	b.write("a.yaml", "")
	b.expect("problem a.yaml: is empty; its previous content stays in force")
	b.write("a.yaml", strings.Replace(web, "0.10", "0.99", 1))
	b.expect("service default/web [10.96.0.99]", "resolved a.yaml")
	b.must(os.Remove(b.path("a.yaml")))
	b.must(os.Symlink("a.yaml", b.path("a.yaml")))
	batch, err := b.Next(t.Context())
	if b.must(err); len(batch.Services) > 0 || len(batch.Problems) != 1 {
		t.Fatal(b.rows(batch))
	}
	b.write("b.yaml", "# only a comment")
	b.must(os.Remove(b.path("a.yaml")))
	b.expect("gone service default/web", "resolved a.yaml")
}

func TestFile_rootDisappears(t *testing.T) {
	b := newBench(t, map[string]string{"m/a.yaml": web}).start("m")
	b.expect(webRow)
	b.must(os.RemoveAll(b.path("m")))
	batch, err := b.Next(t.Context())
	if b.must(err); len(batch.Services) > 0 || len(batch.Problems) != 1 {
		t.Fatal(b.rows(batch))
	}
	b.must(os.Mkdir(b.path("m"), 0o755))
	b.expect("resolved m", "problem m: is another directory now, and empty; its previous content stays in force")
	b.write("m/b.yaml", db)
	b.expect("gone service default/web", dbRow, "resolved m")
	b.must(os.Remove(b.path("m/b.yaml"))) // the same directory: meant so
	b.expect("gone service shop/db")
}

// A ConfigMap is mounted as links to links; all its files change at once.
func TestFile_configMapMount(t *testing.T) {
	for _, path := range []string{"m", "m/a.yaml"} {
		b := newBench(t, map[string]string{"m/..1/a.yaml": web})
		b.must(os.Symlink("..1", b.path("m/..data")))
		b.must(os.Symlink("..data/a.yaml", b.path("m/a.yaml")))
		b.start(path).expect(webRow)
		for i := range 3 {
			generation := fmt.Sprintf("..%d", i+2)
			b.write("m/"+generation+"/a.yaml", strings.Replace(web, "0.10", fmt.Sprintf("1.%d", i), 1))
			b.must(os.Symlink(generation, b.path("m/..data_tmp")))
			b.must(os.Rename(b.path("m/..data_tmp"), b.path("m/..data")))
			b.must(os.RemoveAll(b.path(fmt.Sprintf("m/..%d", i+1))))
			b.expect(fmt.Sprintf("service default/web [10.96.1.%d]", i))
		}
	}
}

func TestFile_linkedDirectoryAndTarget(t *testing.T) {
	b := newBench(t, map[string]string{"one/a.yaml": web, "two/a.yaml": db, "far/real": "x: 1"})
	b.must(os.Symlink("one", b.path("current")))
	b.start("current").expect(webRow)
	b.must(os.Symlink("two", b.path("next")))
	b.must(os.Rename(b.path("next"), b.path("current")))
	b.expect("gone service default/web", dbRow)
	b.write("two/a.yaml", web)
	b.expect("gone service shop/db", webRow)
	b.must(os.Symlink("../far/real", b.path("two/b.yaml")))
	b.expect("problem current/b.yaml:1: document 1: has no kind; the rest of the file is used")
	b.write("far/real", db)
	b.expect(dbRow, "resolved current/b.yaml:1")
}
