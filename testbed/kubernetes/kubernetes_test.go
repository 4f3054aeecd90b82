package kubernetes

import (
	"os"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

// newPlane is a control plane that ends with the test.
func newPlane(t *testing.T, o Options) *ControlPlane {
	t.Helper()
	o.Parts = NeedParts(t)
	c, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// newBed is a cluster's network that ends with the test.
func newBed(t *testing.T) *testbed.Bed {
	t.Helper()
	b, err := testbed.New(t.Context(), testbed.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func TestStart(t *testing.T) {
	c := newPlane(t, Options{Controllers: []string{}})
	bed := newBed(t)
	r, err := c.Serve(bed)
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.Client().CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Log(list.Items)
	for _, u := range []User{Admin, KubeProxy, {Name: "system:serviceaccount:kube-system:kube-proxy"}} {
		path, err := r.Kubeconfig(t.TempDir(), u)
		if err != nil {
			t.Fatal(err)
		}
		kubectl := bed.Command(t.Context(), testbed.Node, NeedParts(t).Path("kubectl"), "--kubeconfig", path, "get", "services", "-A")
		out, err := kubectl.CombinedOutput()
		t.Logf("%s: %v\n%s", u.Name, err, out)
	}
}
