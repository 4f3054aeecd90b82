package config

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/internal/renamed"
)

// document is a file that has been parsed.
type document struct {
	content  map[string]any
	problems field.ErrorList // that a careful reader objects to, and a lenient one overlooks
}

// parse reads JSON or YAML. Of YAML with several documents it takes the first one, as kube-proxy does.
func parse(data []byte) (*document, error) {
	d := &document{}
	if !json.Valid(data) {
		converted, err := yaml.YAMLToJSON(data)
		if err != nil {
			return nil, err
		}
		if _, err := yaml.YAMLToJSONStrict(data); err != nil {
			d.problems = append(d.problems, field.Forbidden(nil, oneLine(err)))
		}
		if more(data) {
			d.problems = append(d.problems, field.Forbidden(nil, "only the first of several YAML documents counts"))
		}
		data = converted
	}
	var anything any
	repeated, err := kjson.UnmarshalStrict(data, &anything)
	if err != nil {
		return nil, err
	}
	for _, r := range repeated {
		d.problems = append(d.problems, field.Forbidden(nil, r.Error()))
	}
	content, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	var ok bool
	if d.content, ok = content.(map[string]any); !ok {
		return nil, errors.New("this is not a mapping that begins with apiVersion and kind")
	}
	return d, nil
}

// oneLine is what a YAML decoder complains about, without its heading.
func oneLine(err error) string {
	text := strings.TrimPrefix(err.Error(), "yaml: unmarshal errors:\n")
	return strings.Join(strings.Fields(text), " ")
}

// more reports whether YAML has more than one document with something in it.
func more(data []byte) bool {
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
	for n := 0; ; {
		text, err := documents.Read()
		if err != nil { // io.EOF, or what the parser will tell
			return false
		}
		if len(bytes.Trim(text, "- \t\r\n")) > 0 {
			n++
		}
		if n > 1 {
			return true
		}
	}
}

// into holds the document against the schema of its kind and decodes what is right of it. Invalid parts are left out,
// so that all of them are reported together with the breaches of rules in the rest.
func (d *document) into(kind string, to any) (unknown []string, errs field.ErrorList, err error) {
	found, err := violations(kind, d.content)
	if err != nil {
		return nil, nil, err
	}
	mode, _ := d.content["mode"].(string)
	for _, v := range found {
		_, value := walk(d.content, v.at)
		switch {
		case v.off:
			_, parent := walk(d.content, v.at[:len(v.at)-1])
			parent.(map[string]any)[v.at[len(v.at)-1]] = "off"
			continue
		case v.unknown:
			unknown = append(unknown, v.Field)
		case v.mistype || judged(kubeproxy.ProxyMode(mode), v.Field) || !readable(value):
			errs = append(errs, v.Error)
		}
		remove(d.content, v.at)
	}
	slices.Sort(unknown)
	data, err := json.Marshal(d.content)
	if err != nil {
		return nil, nil, err
	}
	return unknown, errs, kjson.UnmarshalCaseSensitivePreserveInts(data, to)
}

// readable reports whether kube-proxy could decode a value that has the right type: what it could not
// is wrong even where nothing uses it.
func readable(value any) bool {
	switch v := value.(type) {
	case string:
		_, err := time.ParseDuration(v)
		return err == nil
	case int64:
		return v >= math.MinInt32 && v <= math.MaxInt32
	}
	return false
}

// remove takes a value out of a document, and with an item the list.
func remove(document any, at []string) {
	for i := range at {
		_, parent := walk(document, at[:i])
		_, value := walk(document, at[:i+1])
		object, ok := parent.(map[string]any)
		_, list := value.([]any)
		if ok && (list || i == len(at)-1) {
			delete(object, at[i])
			return
		}
	}
}

// rename gives fields that have an old name their new one, and returns them. A field that is there under both names
// keeps the value of the new one.
func (d *document) rename() (found []renamed.Name) {
	for _, n := range renamed.Of(renamed.Field) {
		from, to := strings.Split(n.Old, "."), strings.Split(n.New, ".")
		_, parent := walk(d.content, from[:len(from)-1])
		object, _ := parent.(map[string]any)
		last := from[len(from)-1]
		value, ok := object[last]
		if !ok {
			continue
		}
		found = append(found, n)
		delete(object, last)
		if _, ok := object[to[len(to)-1]]; !ok {
			object[to[len(to)-1]] = value
		}
	}
	return found
}

// wrongKind says what is at fault with a document that is of another kind, or says nothing.
func (d *document) wrongKind(kind, apiVersion string) error {
	var errs []error
	for _, must := range [][2]string{{"apiVersion", apiVersion}, {"kind", kind}} {
		got, ok := d.content[must[0]]
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("%s is missing, it must be %s", must[0], must[1]))
		case got != must[1]:
			errs = append(errs, fmt.Errorf("%s is %v, it must be %s", must[0], got, must[1]))
		}
	}
	return errors.Join(errs...)
}
