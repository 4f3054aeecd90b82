// Configgen writes the files that derive from the configuration. Its JSON schemas have the structure of the Go types,
// the texts of the help and the limits of a table in this package. The other files are the tables of the document about
// it.
//
//	v1alpha1.KubeProxyConfiguration ─┐
//	config.FairleadConfiguration ────┼─► configgen ─► schema/KIND.json
//	limits ──────────────────────────┤         └────► docs/configuration.md
//	config.Fields ───────────────────┘
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/invopop/jsonschema"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/internal/renamed"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: configgen DIRECTORY DOCUMENT")
		os.Exit(2)
	}
	if err := errors.Join(writeSchemas(os.Args[1]), writeTables(os.Args[2])); err != nil {
		fmt.Fprintln(os.Stderr, "configgen:", err)
		os.Exit(1)
	}
}

func writeSchemas(dir string) error {
	kinds := []struct {
		kind, apiVersion string
		of               any
		limits           map[string]limit
	}{
		{config.KubeProxyKind, kubeproxy.SchemeGroupVersion.String(), &kubeproxy.KubeProxyConfiguration{}, kubeProxyLimits()},
		{config.FairleadKind, config.FairleadAPIVersion, &config.FairleadConfiguration{}, fairleadLimits()},
	}
	for _, k := range kinds {
		s := reflector().Reflect(k.of)
		s.ID = jsonschema.ID("https://fairlead.dev/schema/" + k.kind + ".json")
		s.Title = k.kind
		p := painter{described: descriptions(k.kind), limits: k.limits}
		fix(s, "kind", k.kind)
		fix(s, "apiVersion", k.apiVersion)
		p.object(s, "")
		if left := slices.Sorted(maps.Keys(p.limits)); len(left) > 0 || len(p.bare) > 0 {
			return fmt.Errorf("%s has no fields %v, and nothing describes %v", k.kind, left, p.bare)
		}
		s.Required = []string{"kind", "apiVersion"}
		if k.kind == config.FairleadKind {
			addOldNames(s)
		}
		text, err := json.MarshalIndent(s, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, k.kind+".json"), append(text, '\n'), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// addOldNames lets a file have fields under the names of the release before.
func addOldNames(s *jsonschema.Schema) {
	for _, n := range renamed.Of(renamed.Field) {
		at := strings.Split(n.New, ".")
		parent := s
		for _, name := range at[:len(at)-1] {
			parent, _ = parent.Properties.Get(name)
		}
		last := at[len(at)-1]
		field, _ := parent.Properties.Get(last)
		old := *field
		old.Description, old.Deprecated = "deprecated: use "+last, true
		parent.Properties.Set(n.Old[strings.LastIndex(n.Old, ".")+1:], &old)
	}
}

func fix(s *jsonschema.Schema, field, value string) {
	property, _ := s.Properties.Get(field)
	*property = jsonschema.Schema{Type: "string", Const: value}
}

func descriptions(kind string) map[string]string {
	texts := map[string]string{}
	for _, f := range config.Fields() {
		if f.Kind == kind {
			texts[f.Path] = f.Meaning
		}
	}
	return texts
}

func reflector() *jsonschema.Reflector {
	return &jsonschema.Reflector{
		Anonymous: true, DoNotReference: true, ExpandedStruct: true, RequiredFromJSONSchemaTags: true,
		Mapper: func(t reflect.Type) *jsonschema.Schema {
			switch t {
			case reflect.TypeFor[metav1.Duration]():
				return &jsonschema.Schema{Type: "string", Pattern: duration,
					Extras: map[string]any{"patternErrorMessage": durationMeaning}}
			case reflect.TypeFor[logsapi.TimeOrMetaDuration]():
				return oneOf("string", "integer")
			case reflect.TypeFor[resource.QuantityValue]():
				return oneOf("string", "number")
			}
			return nil
		},
	}
}

func oneOf(types ...string) *jsonschema.Schema {
	return &jsonschema.Schema{Extras: map[string]any{"type": types}}
}

// painter adds to the structure what Go types do not say. It strikes out the limits that it has used.
type painter struct {
	described map[string]string
	limits    map[string]limit
	bare      []string // what has no description
}

func (p *painter) object(s *jsonschema.Schema, path string) {
	if s.Properties == nil {
		return
	}
	for pair := s.Properties.Oldest(); pair != nil; pair = pair.Next() {
		if pair.Value.Const != nil {
			continue
		}
		at := pair.Key
		if path != "" {
			at = path + "." + pair.Key
		}
		p.property(pair.Value, at)
	}
}

func (p *painter) property(s *jsonschema.Schema, path string) {
	if s.Description = p.described[path]; s.Description == "" && s.Properties == nil {
		p.bare = append(p.bare, path)
	}
	l := p.limits[path]
	l.apply(s)
	delete(p.limits, path)
	p.object(s, path)
	if s.Items != nil {
		p.object(s.Items, path+"[]")
	}
	if l.nullable || s.Pattern != duration {
		nullable(s)
	}
}

// nullable lets the property be null, which means that it is not set. Kubeadm writes that.
func nullable(s *jsonschema.Schema) {
	types, _ := s.Extras["type"].([]string)
	if s.Type != "" {
		types = []string{s.Type}
		s.Type = ""
	}
	if s.Extras == nil {
		s.Extras = map[string]any{}
	}
	s.Extras["type"] = append(types, "null")
	if s.Enum != nil {
		s.Enum = append(s.Enum, nil)
	}
}
