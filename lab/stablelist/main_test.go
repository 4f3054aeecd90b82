package main

import (
	"slices"
	"testing"
)

// The committed file has each stable name of the code, and the code has each name of the file.
func TestFile(t *testing.T) {
	now, err := collect("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	promised, err := read("../../docs/stable.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range promised {
		if !slices.Contains(now, line) {
			t.Errorf("promised, and gone: %s\n\tkeep the name, also beside a new one (internal/renamed); "+
				"or delete the line in docs/stable.txt and tell of it in CHANGELOG.md", line)
		}
	}
	for _, line := range now {
		if !slices.Contains(promised, line) {
			t.Errorf("not in docs/stable.txt, run go generate ./docs: %s", line)
		}
	}
	if !slices.Equal(promised, sorted(slices.Clone(promised))) {
		t.Error("docs/stable.txt is not sorted: run go generate ./docs")
	}
}
