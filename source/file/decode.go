package file

import (
	"bytes"
	"cmp"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"go.yaml.in/yaml/v3"
	"sigs.k8s.io/json"

	"fairlead.dev/fairlead/service"
)

// object is one Kubernetes object, reduced to what the Table needs.
type object struct {
	kind string
	name service.Name
	// value is a *service.Service, a *service.Slice, the []*service.Slice of an Endpoints, a
	// *service.Node, the []netip.Prefix of a ServiceCIDR, the *workload of what makes pods; nil for all other kinds,
	// which are only counted.
	value any
	wrong string // what its problems call it; empty: it has none
	wants *wants // of a Service that a proxy serves
	path  string // where it is in its part of the file; empty: the part is the object
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
	if err := json.UnmarshalCaseSensitivePreserveInts(h.Items, &items); err != nil {
		return nil, fmt.Errorf("items: %w", err)
	}
	return items, nil
}

func decodeHeader(text []byte, otherwise typeMeta) (header, error) {
	var h header
	if text[0] != '{' {
		return h, errors.New("is not a Kubernetes object")
	}
	if err := json.UnmarshalCaseSensitivePreserveInts(text, &h); err != nil {
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

// toJSON is the JSON form of a part.
func (d *decoder) toJSON(text []byte) ([]byte, error) {
	d.text = text
	if t := bytes.TrimSpace(text); len(t) > 0 && t[0] == '{' && stdjson.Valid(t) {
		return t, nil // the YAML parser is slower and has limits that JSON does not have
	}
	w, err := convertYAML(text)
	if err != nil {
		return nil, err
	}
	d.truths = w.truths
	return w.Bytes(), nil
}

// maxDepth limits Lists in Lists.
const maxDepth = 8

// decoder turns a part of a file into objects.
type decoder struct {
	node     string // name of the own Node
	previous func(object) (object, bool)
	objects  []object
	problems []located

	text   []byte     // of the part
	parsed *yaml.Node // the same; nil: nothing was asked about it
	path   string     // of the object at hand
	truths bool       // a key in the part is read as a truth value
}

// located is a problem, and the line in its part of the file, counted from 1.
type located struct {
	service.Problem
	line int
}

// root is the part's tree.
func (d *decoder) root() *yaml.Node {
	if d.parsed == nil {
		d.parsed = tree(d.text)
	}
	return d.parsed
}

// truthWords finds those of the object at hand.
func (d *decoder) truthWords(found func(field, word string, key bool)) {
	if n, _, whole := find(d.root(), steps(d.path)); whole {
		truthWords(n, "", found)
	}
}

// document decodes what stands alone.
func (d *decoder) document(text []byte) error {
	converted, err := d.toJSON(text)
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
	converted, err := d.toJSON(text)
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
	converted, err := d.toJSON(text)
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
	of := d.path
	for i, item := range items {
		d.path = fmt.Sprintf("%s.items[%d]", of, i)
		if err := d.json(item, list, depth-1); err != nil {
			return fmt.Errorf("items[%d]: %w", i, err)
		}
	}
	d.path = of
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
	problems, err := d.convert(&o, h, text)
	if err != nil {
		var p service.Problem
		o, p = d.keep(o, err)
		problems = append(problems, p)
	}
	if d.truths {
		problems = append(problems, d.truthKeys(o)...)
	}
	o.path, o.wrong = d.path, ""
	for _, p := range problems {
		p.Object = cmp.Or(p.Object, o.String())
		_, line, _ := find(d.root(), steps(d.path+"."+p.Field))
		d.problems = append(d.problems, located{p, line})
		o.wrong = p.Object
	}
	d.objects = append(d.objects, o)
}

// errMisread is a problem because of which an object cannot be decoded.
type errMisread struct{ service.Problem }

// keep is the object as it was before it could not be decoded; if it was not, an object of no use.
func (d *decoder) keep(o object, err error) (object, service.Problem) {
	fate := "it is left out"
	if old, ok := d.previous(o); ok {
		o, fate = old, "its last good version stays in force"
	}
	p := service.Problem{Reason: err.Error()}
	if misread, ok := errors.AsType[errMisread](err); ok {
		p = misread.Problem
	}
	p.Object, p.Reason = o.String(), p.Reason+"; "+fate
	return o, p
}

// conversion makes of an object what the Table needs.
type conversion func(d *decoder, o *object, text []byte) ([]service.Problem, error)

// kinds are those of use.
var kinds = map[typeMeta]conversion{
	{"v1", "Service"}:                        decodeService,
	{"v1", "Endpoints"}:                      decodeTo(service.FromEndpoints),
	{"v1", "Node"}:                           decodeTo(service.FromNode),
	{"discovery.k8s.io/v1", "EndpointSlice"}: decodeTo(service.FromSlice),
	{"networking.k8s.io/v1", "ServiceCIDR"}:  decodeTo(serviceCIDRs),
}

func serviceCIDRs(c *networkingv1.ServiceCIDR) ([]netip.Prefix, []service.Problem) {
	return service.FromServiceCIDRs([]*networkingv1.ServiceCIDR{c})
}

func decodeService(d *decoder, o *object, text []byte) ([]service.Problem, error) {
	return decodeTo(func(from *corev1.Service) (*service.Service, []service.Problem) {
		s, problems := service.FromService(from)
		o.wants = wantsOf(from, s)
		return s, problems
	})(d, o, text)
}

// convert makes of an object what the Table needs; nil if it needs nothing.
func (d *decoder) convert(o *object, h header, text []byte) (problems []service.Problem, err error) {
	if convert := kinds[typeMeta{h.APIVersion, h.Kind}]; convert != nil {
		return convert(d, o, text)
	}
	if w := workloadOf(text); w != nil {
		o.value = w
	}
	if p := mistaken(h); p.Field != "" {
		problems = append(problems, p)
	}
	return problems, nil
}

func decodeTo[K, V any](from func(*K) (V, []service.Problem)) conversion {
	return func(d *decoder, to *object, text []byte) ([]service.Problem, error) {
		var o K
		unknown, err := json.UnmarshalStrict(text, &o, json.DisallowUnknownFields)
		if err != nil {
			return nil, errMisread{d.misread(err, text, new(K))}
		}
		value, problems := from(&o)
		to.value = value
		return append(problems, unknownFields(unknown, reflect.TypeFor[K]())...), nil
	}
}
