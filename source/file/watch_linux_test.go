package file

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"
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

// A file that is written without pause is read now and then. Others do not wait for that.
func TestFile_writtenWithoutPause(t *testing.T) {
	t.Parallel()
	const rounds = 8
	b := newBench(t, map[string]string{"web.yaml": web, "db.yaml": db}).start()
	b.expect(webRow, dbRow)
	ctx, stop := context.WithCancel(b.Context())
	var writing sync.WaitGroup
	defer writing.Wait()
	defer stop()
	writing.Go(func() {
		pace := time.NewTicker(quiet / 10)
		defer pace.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			text := strings.Replace(web, "10.96.0.10", fmt.Sprint("10.96.1.", i%250), 1)
			if err := os.WriteFile(b.path("web.yaml"), []byte(text), 0o644); err != nil {
				t.Error(err)
			}
			<-pace.C
		}
	})
	alone := 0
	for i := range rounds {
		address := fmt.Sprint("10.96.2.", i)
		b.write("db.yaml", strings.Replace(db, "10.96.0.11", address, 1))
		rows := b.until("service shop/db [" + address + "]")
		if len(rows) == 1 {
			alone++
		}
	}
	if alone < rounds/2 {
		t.Errorf("%d of %d changes came alone, want most: they waited for another file", alone, rounds)
	}
	if rows := b.until(""); !strings.Contains(rows[0], "web") { // or that it is empty at that moment
		t.Errorf("%q, want the file that is written without pause", rows)
	}
}

// until is the first batch that has a row; empty: the next one.
func (b *bench) until(row string) (rows []string) {
	b.Helper()
	ctx, cancel := eventually.Context(b.Context())
	defer cancel()
	for {
		batch, err := b.Next(ctx)
		b.must(err)
		if rows = b.rows(batch); row == "" || slices.Contains(rows, row) {
			return rows
		}
	}
}
