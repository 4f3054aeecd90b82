package main

import (
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
)

// agent is the list of the code as it is.
var agent = sync.OnceValues(collect)

// The committed file has each text as the code has it, so that a change of a text is reviewed.
func TestFile(t *testing.T) {
	l, err := agent()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../docs/messages.txt")
	if err != nil {
		t.Fatal(err)
	}
	was, is := strings.Split(string(text), "\n"), strings.Split(l.String(), "\n")
	for _, line := range missing(was, is) {
		t.Errorf("- %s", line)
	}
	for _, line := range missing(is, was) {
		t.Errorf("+ %s", line)
	}
	if string(text) != l.String() {
		t.Error("docs/messages.txt is not what the code says: run go generate ./docs")
	}
}

// missing are the lines of one text that another one does not have.
func missing(from, in []string) (all []string) {
	for _, line := range from {
		if !slices.Contains(in, line) {
			all = append(all, line)
		}
	}
	return all
}

// The table has each key that the code gives the log, and no other; the document has the table.
func TestKeys(t *testing.T) {
	l, err := agent()
	if err != nil {
		t.Fatal(err)
	}
	for key := range l.keys {
		if keys[key] == "" {
			t.Errorf("the log has the key %q: take one of those in keys.go, or add what it means", key)
		}
	}
	for key := range keys {
		if !l.keys[key] {
			t.Errorf("the log does not have the key %q: delete it in keys.go", key)
		}
	}
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), tableBegin+keyTable()+tableEnd) {
		t.Error("docs/operations.md does not have the table of keys: run go generate ./docs")
	}
}
