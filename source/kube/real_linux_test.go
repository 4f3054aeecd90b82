package kube

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

// newPlane is a real API server and etcd, without controllers. The API server makes the Service
// "kubernetes" and a ServiceCIDR.
func newPlane(t testing.TB, o kubernetes.Options) *kubernetes.ControlPlane {
	t.Helper()
	o.Parts = kubernetes.NeedParts(t)
	o.Controllers = []string{}
	plane, err := kubernetes.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := plane.Close(); err != nil {
			t.Error(err)
		}
	})
	return plane
}

// connectReal connects with the rights of kube-proxy.
func connectReal(t testing.TB, plane *kubernetes.ControlPlane, log *slog.Logger) *Client {
	t.Helper()
	path, err := plane.Kubeconfig(t.TempDir(), kubernetes.KubeProxy())
	if err != nil {
		t.Fatal(err)
	}
	return connect(t, ClientOptions{Kubeconfig: path, Log: log})
}

// view gathers what a Source says, as the Table of a daemon does.
type view struct {
	t      testing.TB
	source source.Source
	all    service.Batch
	last   service.Batch
}

func newView(t testing.TB, c *Client) *view {
	v := &view{t: t, source: open(t, c)}
	v.next()
	return v
}

func (v *view) next() {
	v.t.Helper()
	ctx, cancel := eventually.Context(v.t.Context())
	defer cancel()
	b, err := v.source.Next(ctx)
	if err != nil {
		v.t.Fatalf("%v; the state is\n%s", err, v)
	}
	v.last = b
	v.all.Services = present(v.all.Services, b.Services)
	v.all.Slices = present(v.all.Slices, b.Slices)
	if b.Node != nil {
		v.all.Node = b.Node
	}
	if b.ServiceCIDRs != nil {
		v.all.ServiceCIDRs = b.ServiceCIDRs
	}
	v.all.Problems = append(v.all.Problems, b.Problems...)
}

// present are the objects that are there after others have changed.
func present[T any](before, changed service.Objects[T]) (now service.Objects[T]) {
	all := maps.Collect(before.All())
	maps.Insert(all, changed.All())
	for name, is := range all {
		if is != nil {
			now.Set(name, is)
		}
	}
	return now
}

func (v *view) String() string { return rows(v.all) }

// await waits for a state. On the way there nothing may vanish that is in it.
func (v *view) await(want string) {
	v.t.Helper()
	for had := v.String(); had != want; had = v.String() {
		v.next()
		for _, row := range strings.Split(had, "\n") {
			if strings.Contains(want, row) && !strings.Contains(v.String(), row) {
				v.t.Errorf("meanwhile %q vanished by\n%s", row, rows(v.last))
			}
		}
	}
}

// apply has an administrator create or replace Services.
func apply(t testing.TB, plane *kubernetes.ControlPlane, services ...*corev1.Service) {
	t.Helper()
	for _, s := range services {
		api := plane.Client().CoreV1().Services(s.Namespace)
		if err := createOrUpdate(t.Context(), api, s); err != nil {
			t.Fatal(err)
		}
	}
}

func createOrUpdate(ctx context.Context, api typedcorev1.ServiceInterface, s *corev1.Service) error {
	old, err := api.Get(ctx, s.Name, metav1.GetOptions{})
	if err != nil {
		_, err = api.Create(ctx, s, metav1.CreateOptions{})
		return err
	}
	s = s.DeepCopy()
	s.ResourceVersion = old.ResourceVersion
	_, err = api.Update(ctx, s, metav1.UpdateOptions{})
	return err
}

func labelled(s *corev1.Service, label, value string) *corev1.Service {
	s.Labels = map[string]string{label: value}
	return s
}

func TestReal(t *testing.T) {
	t.Parallel()
	for _, streaming := range []bool{true, false} {
		t.Run(fmt.Sprint("streaming=", streaming), func(t *testing.T) {
			t.Parallel()
			logs, log := newLogbook()
			plane := newPlane(t, kubernetes.Options{APIServerArgs: []string{
				"--service-cluster-ip-range=10.96.0.0/16", fmt.Sprint("--feature-gates=WatchList=", streaming),
			}})
			testReal(t, plane, log)
			if l := logs.with("WARN"); l != nil {
				t.Errorf("warnings:\n%s", strings.Join(l, ""))
			}
		})
	}
}

func testReal(t *testing.T, plane *kubernetes.ControlPlane, log *slog.Logger) {
	cluster := plane.Client()
	headless := aService("headless", corev1.ClusterIPNone)
	const proxyName = "service.kubernetes.io/service-proxy-name"
	apply(t, plane, aService("web", "10.96.0.10"), headless, labelled(aService("other", "10.96.0.11"), proxyName, "x"))
	if _, err := cluster.DiscoveryV1().EndpointSlices("default").Create(t.Context(), aSlice("web-1", "web", "10.0.0.1"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	skipped := aSlice("headless-1", "headless", "10.0.0.2")
	skipped.Labels[corev1.IsHeadlessService] = ""
	if _, err := cluster.DiscoveryV1().EndpointSlices("default").Create(t.Context(), skipped, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"n1", "n2"} {
		if _, err := cluster.CoreV1().Nodes().Create(t.Context(), aNode(n), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	v := newView(t, connectReal(t, plane, log))
	const start = "cidr 10.96.0.0/16\nnode n1 [192.0.2.1]\nservice default/kubernetes [10.96.0.1]\n" +
		"service default/other [10.96.0.11] of another proxy\n"
	v.await(start + "service default/web [10.96.0.10]\nslice default/web-1 10.0.0.1")
	apply(t, plane, labelled(aService("web", "10.96.0.10"), proxyName, "x"))
	v.await(start + "service default/web [10.96.0.10] of another proxy\nslice default/web-1 10.0.0.1")
	apply(t, plane, aService("web", "10.96.0.10"))
	v.await(start + "service default/web [10.96.0.10]\nslice default/web-1 10.0.0.1")
	if err := cluster.DiscoveryV1().EndpointSlices("default").Delete(t.Context(), "web-1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	v.await(start + "service default/web [10.96.0.10]")
}

// While nothing is known, nothing may be said, and what does not change must not be said again.
func TestReal_restarts(t *testing.T) {
	t.Parallel()
	logs, log := newLogbook()
	plane := newPlane(t, kubernetes.Options{APIServerArgs: []string{"--service-cluster-ip-range=10.96.0.0/16"}})
	apply(t, plane, aService("web", "10.96.0.10"))
	v := newView(t, connectReal(t, plane, log))
	const start = "cidr 10.96.0.0/16\nnode  []\nservice default/kubernetes [10.96.0.1]\nservice default/web [10.96.0.10]"
	v.await(start)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// Its own slice changes when the API server leaves and comes; everything else must stay quiet.
	quiet := func(name, want string) {
		t.Helper()
		apply(t, plane, aService(name, want))
		for !strings.Contains(v.String(), want) {
			v.next()
			for n := range v.last.Services.All() {
				if n.Name != name && n.Name != "while-away" {
					t.Errorf("before %s came: %s", name, rows(v.last))
				}
			}
		}
	}
	must(plane.StopAPIServer(true))
	logs.await(t, "the API server does not answer")
	must(plane.StartAPIServer(t.Context()))
	quiet("after-apiserver", "10.96.0.11")
	logs.await(t, "serves again")

	must(plane.StopEtcd(true))
	must(plane.StartEtcd(t.Context()))
	quiet("after-etcd", "10.96.0.12")

	must(plane.StopAPIServer(true))
	must(plane.StartAPIServer(t.Context()))
	apply(t, plane, aService("while-away", "10.96.0.13"))
	must(plane.CompactStore(t.Context()))
	quiet("after-compaction", "10.96.0.14")
}

// A cluster whose etcd was restored from a backup counts its versions anew: watches from those that
// it does not know wait for them without a word.
func TestReal_backupRestored(t *testing.T) {
	t.Parallel()
	plane := newPlane(t, kubernetes.Options{APIServerArgs: []string{"--service-cluster-ip-range=10.96.0.0/16"}})
	apply(t, plane, aService("web", "10.96.0.10"), aService("db", "10.96.0.11"))
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const start = "cidr 10.96.0.0/16\nnode  []\n"
	const db, web = "service default/db [10.96.0.11]\n", "service default/web [10.96.0.10]"
	const kubernetes = "service default/kubernetes [10.96.0.1]\n"
	// The API server makes its own Service some time after it answers; the backup is to have it.
	newView(t, connectReal(t, plane, nil)).await(start + db + kubernetes + web)
	must(plane.StopEtcd(false))
	data, backup := plane.StoreDir(), filepath.Join(t.TempDir(), "backup")
	must(os.CopyFS(backup, os.DirFS(data)))
	must(plane.StartEtcd(t.Context()))

	c := connectReal(t, plane, nil)
	c.timing.silence = 8 * time.Second
	must(plane.Client().CoreV1().Services("default").Delete(t.Context(), "db", metav1.DeleteOptions{}))
	apply(t, plane, aService("later", "10.96.0.13"))
	for i := range 200 { // the future
		s := aService("web", "10.96.0.10")
		s.Annotations = map[string]string{"i": fmt.Sprint(i)}
		apply(t, plane, s)
	}
	v := newView(t, c)
	v.await(start + kubernetes + "service default/later [10.96.0.13]\n" + web)

	must(plane.StopAPIServer(true))
	must(plane.StopEtcd(false))
	must(os.RemoveAll(data))
	must(os.CopyFS(data, os.DirFS(backup)))
	must(plane.StartEtcd(t.Context()))
	must(plane.StartAPIServer(t.Context()))
	v.await(start + db + kubernetes + web)
}

// Objects that no API server accepts today may have been stored by an old one.
func TestReal_badObjects(t *testing.T) {
	t.Parallel()
	plane := newPlane(t, kubernetes.Options{APIServerArgs: []string{"--service-cluster-ip-range=10.96.0.0/16"}})
	bad := aService("bad", "010.96.0.300")
	slice := aSlice("bad-1", "bad", "example.com", "10.0.0.1")
	if err := plane.Store(t.Context(), bad, slice, aService("good", "10.96.0.20")); err != nil {
		t.Fatal(err)
	}
	v := newView(t, connectReal(t, plane, nil))
	v.await(`cidr 10.96.0.0/16
node  []
problem EndpointSlice default/bad-1 endpoints[0].addresses[0]
problem Service default/bad spec.clusterIPs[0]
service default/bad []
service default/good [10.96.0.20]
service default/kubernetes [10.96.0.1]
slice default/bad-1 10.0.0.1`)
}
