package testbed

import (
	"os"
	"path/filepath"
	"testing"
)

// A file that cannot be replaced leaves nothing beside it.
func TestReplaceFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "taken"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := ReplaceFile(filepath.Join(dir, "taken"), []byte("new"), 0o600); err == nil {
		t.Error("a directory was replaced")
	}
	if err := ReplaceFile(filepath.Join(dir, "file"), []byte("new"), 0o640); err != nil {
		t.Error(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Errorf("there are %v, %v", files, err)
	}
	if info, err := os.Stat(filepath.Join(dir, "file")); err != nil || info.Mode() != 0o640 {
		t.Errorf("the file is %v, %v", info, err)
	}
}
