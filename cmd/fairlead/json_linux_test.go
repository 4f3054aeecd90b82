package main

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// With -o json all commands print values alike, as docs/operations.md says: one, or in the course of time an object a
// line. Keys are in camelCase, and there is nothing else on the standard output.
func TestOutput_json(t *testing.T) {
	w := newWorld(t)
	w.start("--proxy-mode", "nftables")
	w.reaches("pod-a")
	for _, args := range []string{
		"status", "audit", "services", "services web", "services nothing", "probe", "why web", "why nothing", "dump",
		"dump --counters", "explain node 10.96.0.10:80", "explain node 10.96.0.10:81", "trace node svc/default/web",
		"switch nftables", "switch nothing",
	} {
		c := w.command(append(strings.Fields(args), "-o", "json", "--control-socket", w.socket)...)
		text, err := c.Output()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		values := json.NewDecoder(strings.NewReader(string(text)))
		n := 0
		for ; ; n++ {
			var v any
			if err := values.Decode(&v); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s -o json: %v in %s", args, err, text)
			}
			camel(t, args, v)
		}
		if failed := strings.HasSuffix(args, " nothing") && !strings.HasPrefix(args, "why"); n != 1 && !failed || n > 1 {
			t.Errorf("%s -o json prints %d values:\n%s", args, n, text)
		}
	}
}

// camel checks the keys in a value.
func camel(t *testing.T, args string, v any) {
	t.Helper()
	switch v := v.(type) {
	case []any:
		for _, one := range v {
			camel(t, args, one)
		}
	case map[string]any:
		for key, one := range v {
			if !regexp.MustCompile(`^[a-z][A-Za-z]*$`).MatchString(key) {
				t.Errorf("%s -o json has the key %q", args, key)
			}
			camel(t, args, one)
		}
	}
}
