package kubernetes_test

import (
	"net/http/httptest"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/testbed/kubernetes"
)

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: name} }

// TestCatalog: whoever lists and then watches misses nothing, whenever the watch begins.
func TestCatalog(t *testing.T) {
	t.Parallel()
	catalog, err := kubernetes.NewCatalog(&corev1.Service{ObjectMeta: named("a")}, &corev1.Node{ObjectMeta: named("n")})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(catalog)
	t.Cleanup(server.Close)
	client, err := clientset.NewForConfig(&rest.Config{
		Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeProtobuf},
	})
	if err != nil {
		t.Fatal(err)
	}
	node, err := client.CoreV1().Nodes().Get(t.Context(), "n", metav1.GetOptions{})
	if err != nil || node.Name != "n" {
		t.Errorf("the node is %q, %v", node.Name, err)
	}
	list, err := client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].Name != "a" {
		t.Fatalf("listed are %v, %v", list.Items, err)
	}
	if err := catalog.Add(&corev1.Service{ObjectMeta: named("between")}); err != nil {
		t.Fatal(err)
	}
	watch, err := client.CoreV1().Services("").Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watch.Stop)
	if err := catalog.Add(&corev1.Service{ObjectMeta: named("later")}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"between", "later"} {
		e, open := <-watch.ResultChan()
		if s, ok := e.Object.(*corev1.Service); !ok || s.Name != want {
			t.Fatalf("the watch says %v (open: %t) instead of %s", e, open, want)
		}
	}
	if err := catalog.Add(&corev1.Pod{}); err == nil {
		t.Error("a Pod is none of its objects")
	}
}
