package file

import (
	"bytes"
	"log/slog"
	"os"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/testbed/nstest"
)

// On a busy node others may have all instances of inotify. The limit is a user namespace's, so that
// one of the test's own does not concern the machine.
func TestFile_withoutInotify(t *testing.T) {
	t.Parallel()
	if !nstest.Root(t) {
		return
	}
	limit := func(n string) {
		t.Helper()
		if err := os.WriteFile("/proc/sys/user/max_inotify_instances", []byte(n), 0); err != nil {
			t.Fatal(err)
		}
	}
	limit("0")
	b := newBench(t, map[string]string{"web.yaml": web})
	var said bytes.Buffer
	var err error
	b.Source, err = New(Options{Paths: []string{b.dir}, Node: "node", Log: slog.New(slog.NewTextHandler(&said, nil))})
	b.must(err)
	defer func() { _ = b.Close() }()
	b.expect(webRow)
	b.write("db.yaml", db)
	b.expect(dbRow) // by looking
	if text := said.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, "fs.inotify.max_user_instances") {
		t.Errorf("the log:\n%s", text)
	}
	limit("8")
	b.must(os.Remove(b.path("db.yaml")))
	b.expect("gone service shop/db")
	if text := said.String(); !strings.HasSuffix(text, "noticed at once again\"\n") {
		t.Errorf("the log:\n%s", text)
	}
	b.write("db.yaml", db)
	b.expect(dbRow)
}
