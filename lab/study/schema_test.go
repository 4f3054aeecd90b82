package study

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// The schema is that of a real result, and no other file passes for one.
func TestSchema(t *testing.T) {
	t.Parallel()
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("result.json", document); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("result.json")
	if err != nil {
		t.Fatal(err)
	}
	real, err := os.ReadFile("../../docs/benchmark/2026-11-22/result.json")
	if err != nil {
		t.Fatal(err)
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(real))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Validate(value); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(map[string]any){
		"no rows":           func(o map[string]any) { delete(o, "rows") },
		"a field too many":  func(o map[string]any) { o["row"] = 1 },
		"a text for a time": func(o map[string]any) { o["depth"] = 1 },
	} {
		var o map[string]any
		if err := json.Unmarshal(real, &o); err != nil {
			t.Fatal(err)
		}
		if change(o); s.Validate(o) == nil {
			t.Errorf("%s: it passes", name)
		}
	}
}
