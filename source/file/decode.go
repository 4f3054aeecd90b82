package file

import (
	"bytes"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	"k8s.io/apimachinery/pkg/util/json"

	"fairlead.dev/fairlead/service"
)

// object is one Kubernetes object, reduced to what the Table needs.
type object struct {
	kind string
	name service.Name
	// value is a *service.Service, a *service.Slice, the []*service.Slice of an Endpoints, a
	// *service.Node, the []netip.Prefix of a ServiceCIDR; nil for all other kinds, which are only
	// counted.
	value any
	wrong string // what its problems call it; empty: it has none
}

func (o object) String() string {
	if o.name.Namespace == "" {
		return o.kind + " " + o.name.Name
	}
	return o.kind + " " + o.name.String()
}

// typeMeta says what a JSON object is. A List says it for those of its items that do not.
type typeMeta struct{ APIVersion, Kind string }

// header is what all kinds have in common, Lists included.
type header struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Items stdjson.RawMessage `json:"items"`
}

// list reports whether the object is a List, and what its items are.
func (h header) list() (typeMeta, bool) {
	kind, ok := strings.CutSuffix(h.Kind, "List")
	return typeMeta{h.APIVersion, kind}, ok
}

func (h header) items() (items []stdjson.RawMessage, err error) {
	if h.Items == nil {
		return nil, nil
	}
	if err := json.Unmarshal(h.Items, &items); err != nil {
		return nil, fmt.Errorf("items: %w", err)
	}
	return items, nil
}

func decodeHeader(text []byte, otherwise typeMeta) (header, error) {
	var h header
	if text[0] != '{' {
		return h, errors.New("is not a Kubernetes object")
	}
	if err := json.Unmarshal(text, &h); err != nil {
		return h, err
	}
	if h.Kind == "" {
		h.APIVersion, h.Kind = otherwise.APIVersion, otherwise.Kind
	}
	if h.Kind == "" {
		return h, errors.New("has no kind")
	}
	return h, nil
}

// toJSON is the JSON form of a YAML or JSON text.
func toJSON(text []byte) ([]byte, error) {
	if t := bytes.TrimSpace(text); len(t) > 0 && t[0] == '{' && stdjson.Valid(t) {
		return t, nil // the YAML parser is slower and has limits that JSON does not have
	}
	return yamlToJSON(text)
}

// maxDepth limits Lists in Lists.
const maxDepth = 8

// decoder turns a part of a file into objects.
type decoder struct {
	node     string // name of the own Node
	previous func(object) (object, bool)
	objects  []object
	problems []service.Problem
}

// document decodes what stands alone.
func (d *decoder) document(text []byte) error {
	converted, err := toJSON(text)
	if err != nil {
		return err
	}
	return d.json(converted, typeMeta{}, maxDepth)
}

// errItems says that splitting did not find all items.
var errItems = errors.New("has items in more than one place")

// head decodes a document without its items, and returns what those are. If the document is no List
// it is an object of its own, and ok is false.
func (d *decoder) head(text []byte) (list typeMeta, ok bool, err error) {
	converted, err := toJSON(text)
	if err != nil {
		return typeMeta{}, false, err
	}
	h, err := decodeHeader(converted, typeMeta{})
	if err != nil {
		return typeMeta{}, false, err
	}
	if list, ok = h.list(); !ok {
		d.object(h, converted)
		return list, false, nil
	}
	if items, err := h.items(); err != nil || len(items) > 0 {
		return list, true, errItems
	}
	return list, true, nil
}

// item decodes an item of a List: in YAML still a sequence of one.
func (d *decoder) item(text []byte, list typeMeta) error {
	converted, err := toJSON(text)
	if err != nil {
		return err
	}
	if inner, ok := bytes.CutPrefix(converted, []byte("[")); ok {
		converted = bytes.TrimSuffix(inner, []byte("]"))
	}
	return d.json(converted, list, maxDepth-1)
}

// json decodes an object, or all items of a List. Items without a kind of their own have that of the List, which is
// otherwise. Lists may be nested up to depth.
func (d *decoder) json(text []byte, otherwise typeMeta, depth int) error {
	if string(text) == "null" {
		return nil
	}
	h, err := decodeHeader(text, otherwise)
	if err != nil {
		return err
	}
	list, ok := h.list()
	if !ok {
		d.object(h, text)
		return nil
	}
	if depth == 0 {
		return fmt.Errorf("has more than %d Lists in each other", maxDepth)
	}
	items, err := h.items()
	if err != nil {
		return err
	}
	for i, item := range items {
		if err := d.json(item, list, depth-1); err != nil {
			return fmt.Errorf("items[%d]: %w", i, err)
		}
	}
	return nil
}

// object decodes one object that is no List. A field of the wrong type costs that object only.
func (d *decoder) object(h header, text []byte) {
	o := object{kind: h.Kind, name: service.Name{Namespace: h.Metadata.Namespace, Name: h.Metadata.Name}}
	if h.Kind == "Node" && o.name.Name != d.node {
		return
	}
	if o.name.Namespace == "" && h.Kind != "Node" && h.Kind != "ServiceCIDR" {
		o.name.Namespace = "default"
	}
	value, problems, err := convert(h, text)
	if err != nil {
		var p service.Problem
		o, p = d.keep(o, err)
		problems = append(problems, p)
	} else {
		o.value = value
	}
	if o.wrong = ""; len(problems) > 0 {
		o.wrong = problems[0].Object
	}
	d.problems = append(d.problems, problems...)
	d.objects = append(d.objects, o)
}

// keep is the object as it was before it could not be decoded; if it was not, an object of no use.
func (d *decoder) keep(o object, err error) (object, service.Problem) {
	fate := "it is left out"
	if old, ok := d.previous(o); ok {
		o, fate = old, "its last good version stays in force"
	}
	reason := strings.TrimPrefix(err.Error(), "json: ") + "; " + fate
	return o, service.Problem{Object: o.String(), Reason: reason}
}

// convert makes of an object what the Table needs; nil if it needs nothing.
func convert(h header, text []byte) (any, []service.Problem, error) {
	switch h.APIVersion + " " + h.Kind {
	case "v1 Service":
		return decodeTo(text, service.FromService)
	case "v1 Endpoints":
		return decodeTo(text, service.FromEndpoints)
	case "v1 Node":
		return decodeTo(text, service.FromNode)
	case "discovery.k8s.io/v1 EndpointSlice":
		return decodeTo(text, service.FromSlice)
	case "networking.k8s.io/v1 ServiceCIDR":
		return decodeTo(text, func(c *networkingv1.ServiceCIDR) ([]netip.Prefix, []service.Problem) {
			return service.FromServiceCIDRs([]*networkingv1.ServiceCIDR{c})
		})
	}
	return nil, nil, nil
}

func decodeTo[K, V any](text []byte, from func(*K) (V, []service.Problem)) (any, []service.Problem, error) {
	var o K
	if err := json.Unmarshal(text, &o); err != nil {
		return nil, nil, err
	}
	value, problems := from(&o)
	return value, problems, nil
}
