package report

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/lab/study"
)

// golden compares with a file in testdata; with the flag -update it writes the file.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if flag.Lookup("update").Value.(flag.Getter).Get().(bool) {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, got) {
		t.Errorf("%s differs; go test -run '^%s$' ./lab/study/report -update writes it anew. Got:\n%s", path, t.Name(), got)
	}
}

func TestMain(m *testing.M) {
	flag.Bool("update", false, "write testdata anew")
	flag.Parse()
	os.Exit(m.Run())
}

func written(t *testing.T, write func(io.Writer, *study.Result) error, r *study.Result) []byte {
	t.Helper()
	var text bytes.Buffer
	if err := write(&text, r); err != nil {
		t.Fatal(err)
	}
	return text.Bytes()
}

func TestText(t *testing.T) {
	t.Parallel()
	golden(t, "made.txt", written(t, Text, made()))
}

func TestMarkdown(t *testing.T) {
	t.Parallel()
	golden(t, "made.md", written(t, Markdown, made()))
}
