// Schemagen writes the JSON schema of a run's result, from the Go types and their comments.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/invopop/jsonschema"

	"fairlead.dev/fairlead/lab/study"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: schemagen PACKAGE-DIRECTORY FILE")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "schemagen:", err)
		os.Exit(1)
	}
}

func write(source, file string) error {
	r := jsonschema.Reflector{ExpandedStruct: true}
	if err := r.AddGoComments("fairlead.dev/fairlead/lab/study", source); err != nil {
		return err
	}
	s := r.Reflect(&study.Result{})
	s.ID, s.Title = "https://fairlead.dev/schema/bench-result.json", "result of fairlead bench"
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
