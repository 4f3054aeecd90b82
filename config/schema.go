package config

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

//go:generate go run ../lab/configgen schema ../docs/configuration.md

//go:embed schema/*.json
var schemas embed.FS

// Schema is the JSON schema of a kind, or nil if there is no such kind.
func Schema(kind string) []byte {
	text, _ := schemas.ReadFile("schema/" + kind + ".json")
	return text
}

// violation is what a document has against its schema.
type violation struct {
	at      []string // keys and indices
	unknown bool     // there is no such field
	mistype bool     // the value is of another type, and cannot be read at all
	off     bool     // YAML has made a boolean of the word off
	*field.Error
}

// violations compares a document, as encoding/json decodes it with UseNumber, with the schema of a kind.
func violations(of string, document any) ([]violation, error) {
	text := Schema(of)
	schema, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource(of, schema); err != nil {
		return nil, err
	}
	compiled, err := c.Compile(of)
	if err != nil {
		return nil, err
	}
	var found *jsonschema.ValidationError
	if err := compiled.Validate(document); !errors.As(err, &found) {
		return nil, err
	}
	r := reader{schema: schema, document: document}
	r.read(found)
	return r.violations, nil
}

// reader puts what the validator found into the words of this package.
type reader struct {
	schema, document any
	violations       []violation
}

// read walks the tree of causes. Only the leaves name a field, so only these become violations. In a required field
// with a constant value, such as kind, the violation tells the value.
func (r *reader) read(e *jsonschema.ValidationError) {
	for _, cause := range e.Causes {
		r.read(cause)
	}
	if len(e.Causes) > 0 {
		return
	}
	path, value := walk(r.document, e.InstanceLocation)
	v := violation{at: e.InstanceLocation}
	switch k := e.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		for _, name := range k.Properties {
			at := append(slices.Clone(e.InstanceLocation), name)
			r.violations = append(r.violations,
				violation{at: at, unknown: true, Error: field.Forbidden(path.Child(name), "there is no such field")})
		}
		return
	case *kind.Required:
		for _, name := range k.Missing {
			want := r.lookup(e.SchemaURL, "properties", name, "const")
			r.violations = append(r.violations, violation{at: append(slices.Clone(e.InstanceLocation), name),
				mistype: true, Error: field.Required(path.Child(name), fmt.Sprintf("must be %q", want))})
		}
		return
	case *kind.Type:
		want := strings.Join(slices.DeleteFunc(k.Want, func(t string) bool { return t == "null" }), " or ")
		words, _ := r.lookup(e.SchemaURL, "enum").([]any)
		v.off = value == false && slices.Contains(words, any("off"))
		v.mistype, v.Error = true, field.Invalid(path, value, "must be of type "+want)
	case *kind.Enum:
		v.Error = field.NotSupported(path, value, stringsOf(k.Want))
	case *kind.Const:
		v.mistype, v.Error = true, field.Invalid(path, value, fmt.Sprintf("must be %q", k.Want))
	case *kind.Minimum, *kind.Maximum:
		v.Error = field.Invalid(path, value, fmt.Sprintf("must be within %v and %v",
			r.lookup(e.SchemaURL, "minimum"), r.lookup(e.SchemaURL, "maximum")))
	case *kind.Pattern:
		v.Error = field.Invalid(path, value, fmt.Sprint(r.lookup(e.SchemaURL, patternMessage)))
	default:
		v.Error = field.Invalid(path, value, e.Error())
	}
	r.violations = append(r.violations, v)
}

// patternMessage is the keyword by which the schema says in words what a pattern demands. Editors know
// it too.
const patternMessage = "patternErrorMessage"

// lookup finds a keyword of the part of the schema that a URL points to.
func (r *reader) lookup(url string, keys ...string) any {
	_, pointer, _ := strings.Cut(url, "#")
	unescape := strings.NewReplacer("~1", "/", "~0", "~")
	var at []string
	for part := range strings.SplitSeq(strings.TrimPrefix(pointer, "/"), "/") {
		if part != "" {
			at = append(at, unescape.Replace(part))
		}
	}
	_, value := walk(r.schema, append(at, keys...))
	return value
}

// walk follows keys and indices into a document. The path to the whole document is nil.
func walk(document any, at []string) (*field.Path, any) {
	var path *field.Path
	for _, key := range at {
		switch container := document.(type) {
		case []any:
			i, err := strconv.Atoi(key)
			if err != nil || i < 0 || i >= len(container) {
				return path, nil
			}
			path, document = path.Index(i), container[i]
		case map[string]any:
			path, document = path.Child(key), container[key]
		default:
			return path, nil
		}
	}
	if n, ok := document.(json.Number); ok {
		document = number64(n)
	}
	return path, document
}

// number64 lets errors print a number without quotation marks.
func number64(n json.Number) any {
	if i, err := n.Int64(); err == nil {
		return i
	}
	f, _ := n.Float64()
	return f
}

func stringsOf(values []any) (texts []string) {
	for _, v := range values {
		if text, ok := v.(string); ok {
			texts = append(texts, text)
		}
	}
	return texts
}
