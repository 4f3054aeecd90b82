package docs

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// example is a command of bin/fairlead in a document, and what the document says that it prints.
type example struct{ command, output string }

// Each block marked "console" holds commands that need neither root nor a running proxy. They print what stands there.
func TestExamples(t *testing.T) {
	program := filepath.Join(t.TempDir(), "fairlead")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", program, "../cmd/fairlead").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ran := 0
	for file, text := range documents(t) {
		for _, e := range examples(text) {
			words := strings.Fields(e.command)
			if words[0] != "bin/fairlead" {
				continue
			}
			ran++
			var out bytes.Buffer
			command := exec.Command(program, words[1:]...)
			command.Dir, command.Stdout, command.Stderr = root, &out, &out
			_ = command.Run() // explain exits with status 1 where a packet reaches no backend
			if got := out.String(); got != e.output {
				t.Errorf("%s: %s prints\n%s\nthe document has\n%s", file, e.command, got, e.output)
			}
		}
	}
	if ran == 0 {
		t.Error("no document has an example that can be run")
	}
}

// examples are the commands of a document's console blocks. A command begins with "$ " and may go on after a backslash.
func examples(text string) []example {
	var all []example
	for _, block := range regexp.MustCompile("(?ms)^ *```console\n(.*?)^ *```").FindAllStringSubmatch(text, -1) {
		lines := slices.Collect(strings.Lines(strings.ReplaceAll(block[1], "\\\n", "")))
		for _, line := range lines {
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				all = append(all, example{command: strings.TrimSpace(command)})
			} else if len(all) > 0 {
				all[len(all)-1].output += line
			}
		}
	}
	return all
}
