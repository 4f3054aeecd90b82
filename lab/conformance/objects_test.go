package conformance

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/service"
)

// object is one manifest, as the Table takes it.
type object struct {
	id    string // "Kind namespace/name"
	batch service.Batch
}

// kind is the first word of the id.
func (o object) kind() string {
	kind, _, _ := strings.Cut(o.id, " ")
	return kind
}

func parseObjects(text string) ([]object, error) {
	var objects []object
	for document := range strings.SplitSeq(text, "\n---\n") {
		o, err := parseObject([]byte(document))
		if err != nil {
			return nil, fmt.Errorf("%w in:\n%s", err, document)
		}
		objects = append(objects, o)
	}
	return objects, nil
}

func parseObject(document []byte) (object, error) {
	var meta metav1.PartialObjectMetadata
	if err := yaml.Unmarshal(document, &meta); err != nil {
		return object{}, err
	}
	o := object{id: meta.Kind + " " + meta.Namespace + "/" + meta.Name}
	var err error
	switch meta.Kind {
	case "Service":
		o.batch, err = decode(document, serviceBatch)
	case "EndpointSlice":
		o.batch, err = decode(document, sliceBatch)
	case "Endpoints":
		o.batch, err = decode(document, endpointsBatch)
	case "Node":
		o.batch, err = decode(document, nodeBatch)
	default:
		err = fmt.Errorf("kind %q", meta.Kind)
	}
	return o, err
}

func decode[K any](document []byte, batch func(*K) service.Batch) (service.Batch, error) {
	var o K
	if err := yaml.UnmarshalStrict(document, &o); err != nil {
		return service.Batch{}, err
	}
	return batch(&o), nil
}

func serviceBatch(o *corev1.Service) service.Batch {
	s, problems := service.FromService(o)
	return service.Batch{Services: service.One(s.Name, s), Problems: problems}
}

func sliceBatch(o *discoveryv1.EndpointSlice) service.Batch {
	s, problems := service.FromSlice(o)
	if s == nil {
		return service.Batch{Problems: problems}
	}
	return service.Batch{Slices: service.One(s.Name, s), Problems: problems}
}

func endpointsBatch(o *corev1.Endpoints) service.Batch {
	slices, problems := service.FromEndpoints(o)
	b := service.Batch{Problems: problems}
	for _, s := range slices {
		b.Slices.Set(s.Name, s)
	}
	return b
}

func nodeBatch(o *corev1.Node) service.Batch {
	n, problems := service.FromNode(o)
	return service.Batch{Node: n, Problems: problems}
}

// add puts o's parts into b.
func add(b *service.Batch, o service.Batch) {
	b.Services = append(b.Services, o.Services...)
	b.Slices = append(b.Slices, o.Slices...)
	if o.Node != nil {
		b.Node = o.Node
	}
	b.Problems = append(b.Problems, o.Problems...)
}

// remove says of o's parts that they are gone.
func remove(b *service.Batch, o service.Batch) {
	for name := range o.Services.All() {
		b.Services.Set(name, nil)
	}
	for name := range o.Slices.All() {
		b.Slices.Set(name, nil)
	}
}
