package file

import (
	"bytes"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/json"

	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

// apiVersions are of what is read.
func apiVersions() map[string]string {
	return map[string]string{
		"Service": "v1", "Endpoints": "v1", "Node": "v1", "EndpointSlice": "discovery.k8s.io/v1",
		"ServiceCIDR": "networking.k8s.io/v1",
	}
}

// mistaken says what is wrong with the kind of an object that is left out; no Field: nothing. Other groups may well
// have a kind of the same name.
func mistaken(h header) (p service.Problem) {
	versions := apiVersions()
	right, known := versions[h.Kind]
	group, _, grouped := strings.Cut(h.APIVersion, "/")
	ours, _, _ := strings.Cut(right, "/")
	p.Cause = service.Warning
	switch names := []string{"Service", "Endpoints", "Node", "EndpointSlice", "ServiceCIDR"}; {
	case known && h.APIVersion != right && (!grouped || group == ours):
		p.Field, p.Reason = "apiVersion", fmt.Sprintf("%.40q is not %s; the object is left out", h.APIVersion, right)
	case known:
	case said.Meant(h.Kind, names) != "":
		p.Field, p.Reason = "kind", fmt.Sprintf("%.40q is left out%s", h.Kind, said.Meant(h.Kind, names))
	}
	return p
}

// maxUnknown is how many unknown fields of an object are named.
const maxUnknown = 10

// unknownFields are problems from what the strict decoding of a type has found.
func unknownFields(errs []error, of reflect.Type) (all []service.Problem) {
	for _, err := range errs[:min(len(errs), maxUnknown)] {
		unknown, ok := errors.AsType[json.FieldError](err)
		if !ok {
			continue
		}
		path := steps(unknown.FieldPath())
		name := path[len(path)-1]
		all = append(all, service.Problem{Field: unknown.FieldPath(), Cause: service.Warning,
			Reason: fmt.Sprintf("there is no such field; it is ignored%s", said.Meant(name, fields(of, path[:len(path)-1])))})
	}
	return all
}

// fields are the names of the fields at a path in a type.
func fields(of reflect.Type, path []string) (names []string) {
	for of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	switch of.Kind() {
	case reflect.Slice, reflect.Map:
		if len(path) == 0 {
			return nil
		}
		return fields(of.Elem(), path[1:])
	case reflect.Struct:
	default:
		return nil
	}
	for f := range of.Fields() {
		switch name, _, _ := strings.Cut(f.Tag.Get("json"), ","); {
		case name == "" && f.Anonymous:
			names = append(names, fields(f.Type, path)...)
		case len(path) == 0:
			names = append(names, name)
		case name == path[0]:
			return fields(f.Type, path[1:])
		}
	}
	return names
}

// truthKeys are problems of keys that are words such as on.
func (d *decoder) truthKeys(o object) (all []service.Problem) {
	d.truthWords(func(field, word string, key bool) {
		if key && len(all) < maxUnknown {
			all = append(all, service.Problem{Object: o.String(), Field: field, Cause: service.Warning,
				Reason: fmt.Sprintf("the key %s is read as a truth value; write %q with its quotes", word, word)})
		}
	})
	return all
}

// misread says which field of an object keeps it from being decoded into a type, and why.
func (d *decoder) misread(err error, text []byte, into any) service.Problem {
	p := service.Problem{Reason: strings.TrimPrefix(err.Error(), "json: ")}
	wrong, ok := errors.AsType[*stdjson.UnmarshalTypeError](stdjson.Unmarshal(text, into))
	if !ok {
		return p
	}
	if wrong.Value == "bool" {
		d.truthWords(func(field, word string, key bool) {
			if !key && p.Field == "" {
				p.Field = field
				p.Reason = fmt.Sprintf("%s is read as a truth value, not as text; write %q with its quotes", word, word)
			}
		})
	}
	if p.Field == "" && wrong.Field != "" {
		p.Field = pathAt(text, wrong.Offset)
		p.Reason = fmt.Sprintf("is a %s, not a value of type %s", wrong.Value, wrong.Type)
	}
	return p
}

// pathAt is the path of the value that ends at an offset of JSON, or behind it.
func pathAt(text []byte, offset int64) (path string) {
	type level struct {
		key   string
		list  bool
		n     int
		value bool // the next token is one
	}
	var levels []level
	tokens := stdjson.NewDecoder(bytes.NewReader(text))
	for {
		token, err := tokens.Token()
		if err != nil {
			return ""
		}
		last := len(levels) - 1
		delim, _ := token.(stdjson.Delim)
		switch {
		case delim == '}' || delim == ']':
			levels = levels[:last]
			continue
		case last >= 0 && !levels[last].list && !levels[last].value:
			levels[last].key, levels[last].value = token.(string), true
			continue
		case last >= 0:
			levels[last].n, levels[last].value = levels[last].n+1, false
		}
		if tokens.InputOffset() >= offset {
			break
		}
		if delim != 0 {
			levels = append(levels, level{list: delim == '['})
		}
	}
	for _, l := range levels {
		path = join(path, l.key)
		if l.list {
			path = strings.TrimSuffix(path, ".") + "[" + strconv.Itoa(l.n-1) + "]"
		}
	}
	return path
}

// join adds a step to a path.
func join(path, step string) string {
	switch {
	case strings.ContainsAny(step, ".[/"):
		return path + "[" + step + "]"
	case path == "" || step == "":
		return path + step
	}
	return path + "." + step
}

func isTruthWord(text string) bool {
	return slices.Contains([]string{"y", "yes", "on", "n", "no", "off"}, strings.ToLower(text))
}
