// Command valuesgen puts the schemas of the configuration files into the schema of the chart's values, so
// that helm refuses what the daemon would.
//
//	config/schema/*.json ─► chart/values.schema.json: properties config and fairleadConfig
//
// The rest of that file is written by hand.
package main

//go:generate go run . ../../config/schema ../../deploy/chart/values.schema.json

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: valuesgen DIRECTORY VALUES-SCHEMA")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "valuesgen:", err)
		os.Exit(1)
	}
}

// schema is a JSON schema.
type schema = map[string]any

func run(dir, name string) error {
	values, err := read(name)
	if err != nil {
		return err
	}
	properties, ok := values["properties"].(schema)
	if !ok {
		return fmt.Errorf("%s has no properties", name)
	}
	for property, kind := range map[string]string{
		"config": "KubeProxyConfiguration", "fairleadConfig": "FairleadConfiguration",
	} {
		if properties[property], err = fields(filepath.Join(dir, kind+".json")); err != nil {
			return err
		}
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(values); err != nil {
		return err
	}
	return os.WriteFile(name, out.Bytes(), 0o644)
}

// fields is the schema of a configuration file for its fields: the chart writes apiVersion and kind, and
// any other field may be left out.
func fields(name string) (schema, error) {
	s, err := read(name)
	if err != nil {
		return nil, err
	}
	properties, ok := s["properties"].(schema)
	if !ok {
		return nil, fmt.Errorf("%s has no properties", name)
	}
	delete(properties, "apiVersion")
	delete(properties, "kind")
	for _, key := range []string{"$schema", "$id", "required"} {
		delete(s, key)
	}
	return s, nil
}

func read(name string) (s schema, err error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}
