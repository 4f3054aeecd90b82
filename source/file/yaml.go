package file

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v2"
)

// YAML becomes JSON with the parser and the rules of sigs.k8s.io/yaml, but without the two trees of maps that it makes
// in between, and within bounds: it writes an aliased text each time it occurs, however long that is.
//
//	text ─► the parser's tree ─► one value at a time ─► JSON
//	                                  └─► too deep, or too much: an error
const (
	// maxNesting is several times the depth of the objects that are of use here.
	maxNesting = 100
	// The JSON may be so many times as long as the YAML, and so many bytes longer. Without aliases it hardly grows.
	growth      = 4
	growthAtAll = 4 << 10
)

var (
	errNested = fmt.Errorf("has more than %d lists and maps in each other", maxNesting)
	errKey    = errors.New("has a key that is a list, a map or null")
)

// convertYAML converts one document.
func convertYAML(text []byte) (*jsonWriter, error) {
	var root node
	if err := yaml.Unmarshal(text, &root); err != nil {
		return nil, err
	}
	w := &jsonWriter{most: growth*len(text) + growthAtAll}
	w.scalars = json.NewEncoder(&w.Buffer)
	w.scalars.SetEscapeHTML(false)
	return w, w.value(root, maxNesting)
}

// node is a value in the parser's tree. The zero node is null.
type node struct{ decode func(any) error }

// UnmarshalYAML implements yaml.Unmarshaler. It decodes nothing yet, so that an alias costs nothing.
func (n *node) UnmarshalYAML(decode func(any) error) error {
	n.decode = decode
	return nil
}

// mapKey is a key of a map. The zero mapKey is null.
type mapKey struct {
	text  string
	some  bool
	truth bool // it is a word such as on, and becomes true or false
}

// UnmarshalYAML implements yaml.Unmarshaler. It writes numbers as sigs.k8s.io/yaml does.
func (k *mapKey) UnmarshalYAML(decode func(any) error) error {
	if err := decode(&k.text); err != nil { // a scalar can be had as its text
		return errKey
	}
	if isText(k.text) {
		k.some = true
		return nil
	}
	var value any
	if err := decode(&value); err != nil {
		return err
	}
	k.some = true
	switch v := value.(type) {
	case string:
		k.text = v
	case bool:
		k.truth = isTruthWord(k.text)
		k.text = strconv.FormatBool(v)
	case float64:
		k.text = strconv.FormatFloat(v, 'g', -1, 32)
	default:
		k.text = fmt.Sprint(v)
	}
	return nil
}

// jsonWriter writes nodes to its Buffer.
type jsonWriter struct {
	bytes.Buffer
	scalars *json.Encoder // to the Buffer
	most    int           // bytes
	truths  bool          // a key is a truth value
}

// value writes a node as JSON. It replaces aliases, so the length is checked at each value: a few lines of YAML can
// stand for any amount. Whether a node is a scalar only shows when it is decoded as one.
func (w *jsonWriter) value(n node, depth int) error {
	if w.Len() > w.most {
		return fmt.Errorf("has more than %d bytes when aliases are replaced by what they stand for; "+
			"write it with fewer aliases", w.most)
	}
	if depth == 0 {
		return errNested
	}
	if n.decode == nil {
		w.WriteString("null")
		return nil
	}
	var text string
	err := n.decode(&text)
	switch {
	case err == nil && isText(text):
		return w.encode(text)
	case err == nil:
		return w.scalar(n)
	case !isTypeError(err):
		return err
	}
	return w.collection(n, depth)
}

// isText reports whether a scalar is surely no number, no truth value and not null. It saves decoding it again.
func isText(scalar string) bool {
	const longest = len("false")
	return len(scalar) > longest && ('a' <= scalar[0] && scalar[0] <= 'z' || 'A' <= scalar[0] && scalar[0] <= 'Z')
}

// isTypeError reports whether a node is of another kind than what it was to be decoded to.
func isTypeError(err error) bool {
	_, is := errors.AsType[*yaml.TypeError](err)
	return is
}

func (w *jsonWriter) scalar(n node) error {
	var value any
	if err := n.decode(&value); err != nil {
		return err
	}
	return w.encode(value)
}

func (w *jsonWriter) encode(scalar any) error {
	if err := w.scalars.Encode(scalar); err != nil {
		return err
	}
	w.Truncate(w.Len() - 1) // the line feed
	return nil
}

func (w *jsonWriter) collection(n node, depth int) error {
	var entries map[mapKey]node
	err := n.decode(&entries)
	if err == nil {
		return w.object(entries, depth)
	}
	if !isTypeError(err) {
		return err
	}
	var elements []node
	if err := n.decode(&elements); err != nil {
		return err
	}
	return w.array(elements, depth)
}

func (w *jsonWriter) array(elements []node, depth int) error {
	w.WriteByte('[')
	for i, e := range elements {
		if i > 0 {
			w.WriteByte(',')
		}
		if err := w.value(e, depth-1); err != nil {
			return err
		}
	}
	w.WriteByte(']')
	return nil
}

func (w *jsonWriter) object(entries map[mapKey]node, depth int) error {
	w.WriteByte('{')
	keys := slices.SortedFunc(maps.Keys(entries), func(a, b mapKey) int { return cmp.Compare(a.text, b.text) })
	for i, k := range keys {
		if !k.some {
			return errKey
		}
		w.truths = w.truths || k.truth
		if i > 0 {
			w.WriteByte(',')
		}
		if err := w.encode(k.text); err != nil {
			return err
		}
		w.WriteByte(':')
		if err := w.value(entries[k], depth-1); err != nil {
			return err
		}
	}
	w.WriteByte('}')
	return nil
}
