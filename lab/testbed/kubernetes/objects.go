package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/pager"
)

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

// EncodeJSON writes an object as manifests have it.
func EncodeJSON(o runtime.Object) ([]byte, error) {
	o = o.DeepCopyObject()
	if err := setKind(o); err != nil {
		return nil, err
	}
	return json.Marshal(o)
}
