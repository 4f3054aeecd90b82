package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// With -o json all commands print values alike, as docs/operations.md says: one, or in the course of time an object a
// line. Keys are in camelCase and in docs/stable.txt, and there is nothing else on the standard output.
func TestOutput_json(t *testing.T) {
	w := newWorld(t)
	w.start("--proxy-mode", "nftables")
	w.reaches("pod-a")
	stable, err := os.ReadFile("../../docs/stable.txt")
	if err != nil {
		t.Fatal(err)
	}
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
			listed(t, stable, args, v)
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

// listed checks that the list of stable names has each path of a value that a command prints.
func listed(t *testing.T, stable []byte, args string, v any) {
	t.Helper()
	command := "json fairlead " + strings.Fields(args)[0]
	if strings.HasSuffix(args, " --counters") {
		command += " --counters"
	}
	var walk func(path string, v any)
	walk = func(path string, v any) {
		if !bytes.Contains(stable, []byte("\n"+command+" "+path)) {
			t.Errorf("%s -o json has %s, and docs/stable.txt has not", args, path)
		}
		switch v := v.(type) {
		case []any:
			for _, one := range v {
				walk(path+"[]", one)
			}
		case map[string]any:
			for key, one := range v {
				walk(strings.TrimPrefix(path+"."+key, "."), one)
			}
		case bool, float64, string:
			kind := map[string]string{"bool": "boolean", "float64": "number", "string": "string"}[fmt.Sprintf("%T", v)]
			if line := "\n" + command + " " + path + " " + kind + "\n"; !bytes.Contains(stable, []byte(line)) {
				t.Errorf("%s -o json has a %s as %s, and docs/stable.txt has not", args, kind, path)
			}
		}
	}
	walk("", v)
}
