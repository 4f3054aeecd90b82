package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/pager"
)

// ReadManifests returns the objects of a text that a Catalog can have, one of each name: YAML or JSON, with any
// number of documents, and Lists. What does not parse does not stop the rest; it is one of the errors.
func ReadManifests(name string, text []byte) (objects []runtime.Object, problems []error) {
	documents := yamlutil.NewYAMLOrJSONDecoder(bytes.NewReader(text), 64<<10)
	for {
		var raw json.RawMessage
		err := documents.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return objects, problems
		}
		if err != nil { // where the next document begins is not known
			return objects, append(problems, fmt.Errorf("%s: %w", name, err))
		}
		some, wrong := decodeObjects(raw)
		objects = append(objects, some...)
		for _, err := range wrong {
			problems = append(problems, fmt.Errorf("%s: %w", name, err))
		}
	}
}

// decodeObjects decodes an object, or a List with all its items.
func decodeObjects(raw []byte) (objects []runtime.Object, problems []error) {
	if text := bytes.TrimSpace(raw); len(text) == 0 || string(text) == "null" {
		return nil, nil
	}
	o, _, err := scheme.Codecs.UniversalDeserializer().Decode(raw, nil, nil)
	switch {
	case runtime.IsNotRegisteredError(err):
		return nil, nil // of a kind that no proxy asks for
	case err != nil:
		return nil, []error{err}
	case !meta.IsListType(o):
		if _, err := resourceOf(o); err != nil {
			return nil, nil
		}
		return []runtime.Object{o}, nil
	}
	items, err := meta.ExtractList(o)
	if err != nil {
		return nil, []error{err}
	}
	for _, item := range items {
		if unknown, ok := item.(*runtime.Unknown); ok {
			some, wrong := decodeObjects(unknown.Raw)
			objects, problems = append(objects, some...), append(problems, wrong...)
		} else if _, err := resourceOf(item); err == nil {
			objects = append(objects, item)
		}
	}
	return objects, problems
}

// ReadServer returns the Services and EndpointSlices of an API server, and what it says of its ranges. It changes
// nothing there.
func ReadServer(ctx context.Context, kubeconfig string) (objects []runtime.Object, err error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", kubeconfig, err)
	}
	config.ContentType, config.UserAgent = runtime.ContentTypeProtobuf, "fairlead-bench"
	client, err := clientset.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", kubeconfig, err)
	}
	keep := func(o runtime.Object) error {
		objects = append(objects, o)
		return nil
	}
	for _, list := range []func(context.Context, metav1.ListOptions) (runtime.Object, error){
		func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return client.CoreV1().Services("").List(ctx, o)
		},
		func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return client.DiscoveryV1().EndpointSlices("").List(ctx, o)
		},
	} {
		if err := pager.New(list).EachListItem(ctx, metav1.ListOptions{}, keep); err != nil {
			return nil, fmt.Errorf("the API server of %s: %w", kubeconfig, err)
		}
	}
	return objects, nil
}

// EncodeJSON writes an object for ReadManifests.
func EncodeJSON(o runtime.Object) ([]byte, error) {
	o = o.DeepCopyObject()
	if err := setKind(o); err != nil {
		return nil, err
	}
	return json.Marshal(o)
}
