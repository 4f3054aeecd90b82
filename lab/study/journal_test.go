package study

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A journal is resumed, unless its lines have another form.
func TestJournal_resume(t *testing.T) {
	dir, row := t.TempDir(), Row{Experiment: "lookup", Kernel: This, Contender: "ipvs", Round: 1}
	j := openTestJournal(t, dir)
	if err := j.append(row); err != nil {
		t.Fatal(err)
	}
	if err := j.file.Close(); err != nil {
		t.Fatal(err)
	}
	if j = openTestJournal(t, dir); j.of(row.turns()).turns != 1 {
		t.Error("the row is lost")
	}
	if err := j.file.Close(); err != nil {
		t.Fatal(err)
	}
	old := `{"format":1,"version":"v1"}` + "\n" + `{"experiment":"lookup","kernel":"this kernel"}` + "\n"
	if err := os.WriteFile(filepath.Join(dir, journalFile), []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := openJournal(dir, nil, Result{Format: Format, Version: "v1"})
	if err == nil || !strings.Contains(err.Error(), "a run with another form of journal") {
		t.Error(err)
	}
}

func openTestJournal(t *testing.T, dir string) *journal {
	t.Helper()
	j, err := openJournal(dir, nil, Result{Format: Format, Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	return j
}
