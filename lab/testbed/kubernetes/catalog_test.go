package kubernetes_test

import (
	"errors"
	"fmt"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: name} }

// clientOf asks a catalog.
func clientOf(t *testing.T, catalog *kubernetes.Catalog) *clientset.Clientset {
	t.Helper()
	server := httptest.NewServer(catalog)
	t.Cleanup(server.Close)
	client, err := clientset.NewForConfig(&rest.Config{
		Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeProtobuf},
	})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// TestCatalog: a client that lists and then watches misses nothing, whenever the watch begins.
func TestCatalog(t *testing.T) {
	t.Parallel()
	catalog, err := kubernetes.NewCatalog(&corev1.Service{ObjectMeta: named("a")}, &corev1.Node{ObjectMeta: named("n")})
	if err != nil {
		t.Fatal(err)
	}
	client := clientOf(t, catalog)
	node, err := client.CoreV1().Nodes().Get(t.Context(), "n", metav1.GetOptions{})
	if err != nil || node.Name != "n" {
		t.Errorf("the node is %q, %v", node.Name, err)
	}
	names, first := listed(t, client)
	if names != "a" {
		t.Fatalf("listed are %s", names)
	}
	if err := catalog.Add(&corev1.Service{ObjectMeta: named("between")}); err != nil {
		t.Fatal(err)
	}
	watch, err := client.CoreV1().Services("").Watch(t.Context(), metav1.ListOptions{ResourceVersion: first})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watch.Stop)
	if err := catalog.Add(&corev1.Service{ObjectMeta: named("later")}); err != nil {
		t.Fatal(err)
	}
	changed := &corev1.Service{ObjectMeta: named("a")}
	changed.Spec.ClusterIP = "10.96.0.1"
	if err := errors.Join(catalog.Update(changed), catalog.Delete(&corev1.Service{ObjectMeta: named("between")})); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ADDED between ", "ADDED later ", "MODIFIED a 10.96.0.1", "DELETED between "} {
		e, open := <-watch.ResultChan()
		s, ok := e.Object.(*corev1.Service)
		if !ok || fmt.Sprintf("%s %s %s", e.Type, s.Name, s.Spec.ClusterIP) != want {
			t.Fatalf("the watch says %v (open: %t) instead of %s", e, open, want)
		}
	}
	if names, _ = listed(t, client); names != "a later" {
		t.Errorf("%s are listed", names)
	}
	late, err := client.CoreV1().Services("").Watch(t.Context(), metav1.ListOptions{ResourceVersion: first})
	if !apierrors.IsResourceExpired(err) {
		t.Errorf("who has missed a deletion is told %v, %v", late, err)
	}
	for what, err := range map[string]error{
		"a Pod": catalog.Add(&corev1.Pod{}), "a second one": catalog.Add(changed),
		"a change of nothing": catalog.Update(&corev1.Service{ObjectMeta: named("x")}),
		"the end of nothing":  catalog.Delete(&corev1.Service{ObjectMeta: named("x")}),
	} {
		if err == nil {
			t.Errorf("the catalog takes %s", what)
		}
	}
}

// listed are the names of all Services, and the version of that.
func listed(t *testing.T, client *clientset.Clientset) (names, version string) {
	t.Helper()
	l, err := client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, s := range l.Items {
		all = append(all, s.Name)
	}
	return strings.Join(all, " "), l.ResourceVersion
}

// A copy has what was there, and then changes alone.
func TestCatalog_Copy(t *testing.T) {
	t.Parallel()
	first, err := kubernetes.NewCatalog(&corev1.Service{ObjectMeta: named("a")}, &corev1.Service{ObjectMeta: named("b")})
	if err != nil {
		t.Fatal(err)
	}
	second := first.Copy()
	err = errors.Join(first.Delete(&corev1.Service{ObjectMeta: named("a")}), second.Add(&corev1.Service{ObjectMeta: named("c")}))
	if err != nil {
		t.Fatal(err)
	}
	for want, c := range map[string]*kubernetes.Catalog{"b": first, "a b c": second} {
		names, _ := listed(t, clientOf(t, c))
		if got := strings.Join(slices.Sorted(strings.SplitSeq(names, " ")), " "); got != want {
			t.Errorf("%q instead of %q", got, want)
		}
	}
}
