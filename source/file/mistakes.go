package file

import (
	"bytes"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"sigs.k8s.io/json"

	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

// mistaken says what is wrong with the kind of an object that is left out; no Field: nothing. Other groups may well
// have a kind of the same name.
func mistaken(h header) (p service.Problem) {
	group, _, grouped := strings.Cut(h.APIVersion, "/")
	var names []string
	p.Cause = service.Warning
	for right := range kinds {
		names = append(names, right.Kind)
		ours, _, _ := strings.Cut(right.APIVersion, "/")
		if h.Kind == right.Kind && (!grouped || group == ours) {
			p.Field = "apiVersion"
			p.Reason = fmt.Sprintf("%.40q is not %s; the object is left out", h.APIVersion, right.APIVersion)
		}
	}
	slices.Sort(names)
	if meant := said.Meant(h.Kind, names); meant != "" && !slices.Contains(names, h.Kind) {
		p.Field, p.Reason = "kind", fmt.Sprintf("%.40q is left out%s", h.Kind, meant)
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
	switch of.Kind() {
	case reflect.Pointer:
		return fields(of.Elem(), path)
	case reflect.Slice, reflect.Map:
		if len(path) > 0 {
			return fields(of.Elem(), path[1:])
		}
	case reflect.Struct:
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
		p.Field, _ = pathAt(stdjson.NewDecoder(bytes.NewReader(text)), wrong.Offset)
		p.Reason = fmt.Sprintf("is a %s, not a value of type %s", wrong.Value, wrong.Type)
	}
	return p
}

// pathAt is the path of the value that ends at an offset of JSON, or behind it.
func pathAt(tokens *stdjson.Decoder, offset int64) (path string, found bool) {
	token, err := tokens.Token()
	if err != nil || tokens.InputOffset() >= offset {
		return "", true
	}
	_, inside := token.(stdjson.Delim)
	for i := 0; inside && tokens.More(); i++ {
		step := fmt.Sprintf("[%d]", i)
		if token == stdjson.Delim('{') {
			key, _ := tokens.Token()
			step = join("", key.(string))
		}
		if rest, found := pathAt(tokens, offset); found {
			if rest != "" && rest[0] != '[' {
				rest = "." + rest
			}
			return step + rest, true
		}
	}
	if inside {
		_, _ = tokens.Token() // its end
	}
	return "", false
}

// join adds a step to a path.
func join(path, step string) string {
	switch {
	case strings.ContainsAny(step, ".[/"):
		return path + "[" + step + "]"
	case path == "":
		return step
	}
	return path + "." + step
}

func isTruthWord(text string) bool {
	return slices.Contains([]string{"y", "yes", "on", "n", "no", "off"}, strings.ToLower(text))
}
