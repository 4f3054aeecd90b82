package kube

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/clientcmd/api"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

func certificate(s *httptest.Server) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

func aService(name, ip string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			ClusterIP: ip, ClusterIPs: []string{ip},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
}

func aSlice(name, svc string, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: svc},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func aNode(name string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: "192.0.2.1"},
		}},
	}
}

func aCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs},
	}
}

// cluster is the smallest that has one of each kind.
func cluster(t testing.TB) *apiServer {
	s := newServer(t)
	s.put(aService("web", "10.96.0.1"), aSlice("web-1", "web", "10.0.0.1", "10.0.0.2"), aNode("n1"),
		aCIDR("kubernetes", "10.96.0.0/16"))
	return s
}

const wholeCluster = `cidr 10.96.0.0/16
node n1 [192.0.2.1]
service default/web [10.96.0.1]
slice default/web-1 10.0.0.1 10.0.0.2`

// rows is a Batch as sorted text.
func rows(b service.Batch) string {
	var rows []string
	for name, s := range b.Services.All() {
		if s == nil {
			rows = append(rows, fmt.Sprintf("service %s gone", name))
			continue
		}
		row := fmt.Sprintf("service %s %v", s.Name, s.ClusterIPs)
		if strings.Contains(s.Ignored, "another proxy") {
			row += " of another proxy"
		}
		rows = append(rows, row)
	}
	for name, s := range b.Slices.All() {
		if s == nil {
			rows = append(rows, fmt.Sprintf("slice %s gone", name))
			continue
		}
		row := fmt.Sprintf("slice %s", s.Name)
		for _, e := range s.Endpoints {
			row += " " + e.Addr.String()
		}
		rows = append(rows, row)
	}
	if b.Node != nil {
		rows = append(rows, fmt.Sprintf("node %s %v", b.Node.Name, b.Node.IPs))
	}
	if b.ServiceCIDRs != nil && len(b.ServiceCIDRs) == 0 {
		rows = append(rows, "cidr none")
	}
	for _, c := range b.ServiceCIDRs {
		rows = append(rows, fmt.Sprintf("cidr %s", c))
	}
	for _, p := range b.Problems {
		rows = append(rows, fmt.Sprintf("problem %s %s", p.Object, p.Field))
	}
	for _, object := range b.Resolved {
		rows = append(rows, "resolved "+object)
	}
	slices.Sort(rows)
	return strings.Join(rows, "\n")
}

func open(t testing.TB, c *Client) source.Source {
	s := c.Source("n1")
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// watched waits until the server has a watch of each resource, so that it can be told something.
func (s *apiServer) watched() {
	s.t.Helper()
	eventually.True(s.t, "each resource is watched", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		resources := map[string]bool{}
		for w := range s.watches {
			resources[w.resource] = true
		}
		return len(resources) == 4
	})
}

// expect calls Next until all rows have come, and accepts no others.
func expect(t testing.TB, s source.Source, want string) {
	t.Helper()
	ctx, cancel := eventually.Context(t.Context())
	defer cancel()
	var got []string
	for {
		b, err := s.Next(ctx)
		if err != nil {
			t.Fatalf("Next: %v; before it came\n%s\nwant\n%s", err, strings.Join(got, "\n"), want)
		}
		if empty(b) {
			t.Fatal("Next returned without anything new")
		}
		got = append(got, strings.Split(rows(b), "\n")...)
		slices.Sort(got)
		got = slices.Compact(got)
		if strings.Join(got, "\n") == want {
			return
		}
		for _, row := range got {
			if !slices.Contains(strings.Split(want, "\n"), row) {
				t.Fatalf("unexpected row %q in\n%s\nwant\n%s", row, strings.Join(got, "\n"), want)
			}
		}
	}
}

// nothing expects that Next has nothing to say for a moment in which the source certainly hears from the server.
func nothing(t testing.TB, s source.Source, api *apiServer) {
	t.Helper()
	api.watched()
	api.put(aCIDR("mark", "10.99.0.0/16"))
	expect(t, s, "cidr 10.96.0.0/16\ncidr 10.99.0.0/16")
	api.remove(aCIDR("mark", "10.99.0.0/16"))
	expect(t, s, "cidr 10.96.0.0/16")
}

func TestSource(t *testing.T) {
	t.Parallel()
	api := cluster(t)
	s := open(t, api.client(nil))
	expect(t, s, wholeCluster)
	api.put(aService("web", "10.96.0.2"), aService("db", "10.96.0.3"))
	expect(t, s, "service default/db [10.96.0.3]\nservice default/web [10.96.0.2]")
	api.remove(aService("db", ""), aSlice("web-1", "web"), aNode("n1"))
	expect(t, s, "node  []\nservice default/db gone\nslice default/web-1 gone")
	api.put(aNode("n1"))
	expect(t, s, "node n1 [192.0.2.1]")
}

// A Node that never was is told again and again, one that was deleted only once.
func TestSource_noNode(t *testing.T) {
	t.Parallel()
	api := cluster(t)
	api.remove(aNode("n1"))
	c := api.client(nil)
	c.timing.reminder = 50 * time.Millisecond
	s := open(t, c)
	expect(t, s, strings.ReplaceAll(wholeCluster, "node n1 [192.0.2.1]", "node  []"))
	for range 3 {
		expect(t, s, "node  []")
	}
	api.put(aNode("n1"))
	for {
		b, err := s.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := rows(b); got == "node n1 [192.0.2.1]" {
			break
		} else if got != "node  []" {
			t.Fatal(got)
		}
	}
}

// The same without a server, in a time of its own: what must not come cannot be awaited otherwise.
func TestSource_noNodeAnyMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := &Source{
			ctx: ctx, cancel: cancel, changed: make(chan struct{}, 1),
			pending: service.Batch{Node: &service.Node{}, ServiceCIDRs: []netip.Prefix{}},
		}
		m := newMirror(nodeKind("n1"), s)
		s.mirrors = []*mirror{m}
		do := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		next := func(want string) {
			t.Helper()
			b, err := s.Next(ctx)
			if do(err); rows(b) != want {
				t.Fatalf("%s, want %s", rows(b), want)
			}
		}
		silent := func() {
			t.Helper()
			bubble.Pass(10 * maxReminder)
			if b, ok := s.take(); ok {
				t.Fatal(rows(b))
			}
		}
		do(m.Replace(nil, "1"))
		next("cidr none\nnode  []")
		s.running.Go(func() { s.remindOfNode(time.Second) })
		for range 20 {
			next("node  []")
		}
		node := &compact{name: service.Name{Name: "n1"}, value: &service.Node{Name: "n1"}}
		do(m.Add(node))
		next("node n1 []")
		silent()
		do(m.Delete(node))
		next("node  []")
		silent()
		do(s.Close())
	})
}

// These are the selectors of kube-proxy 1.37 (cmd/kube-proxy/app/server.go).
func TestSource_requests(t *testing.T) {
	t.Parallel()
	api := cluster(t)
	expect(t, open(t, api.client(nil)), wholeCluster)
	api.mu.Lock()
	defer api.mu.Unlock()
	var got []string
	for _, r := range api.requests {
		r, options, _ := strings.Cut(r, "?")
		for _, o := range strings.Split(options, "&") {
			if strings.Contains(o, "Selector=") || strings.HasPrefix(o, "sendInitial") || strings.HasPrefix(o, "allow") {
				r += " " + o
			}
		}
		got = append(got, r)
	}
	slices.Sort(got)
	want := `GET /api/v1/nodes allowWatchBookmarks=true fieldSelector=metadata.name%3Dn1 sendInitialEvents=true
GET /api/v1/services allowWatchBookmarks=true fieldSelector=spec.clusterIP%21%3DNone sendInitialEvents=true
GET /apis/discovery.k8s.io/v1/endpointslices allowWatchBookmarks=true labelSelector=%21service.kubernetes.io%2Fheadless sendInitialEvents=true
GET /apis/networking.k8s.io/v1/servicecidrs allowWatchBookmarks=true sendInitialEvents=true`
	if g := strings.Join(got, "\n"); g != want {
		t.Fatalf("requests:\n%s\nwant\n%s", g, want)
	}
}

func TestSource_deadlineLosesNothing(t *testing.T) {
	t.Parallel()
	api := cluster(t)
	s := open(t, api.client(nil))
	expect(t, s, wholeCluster)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	seen := map[service.Name]bool{}
	take := func(ctx context.Context) {
		b, err := s.Next(ctx)
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		for n := range b.Services.All() {
			seen[n] = true
		}
	}
	for i := range 100 {
		api.put(aService(fmt.Sprint("s", i), "10.96.1.1"))
		take(over)
	}
	for len(seen) < 100 {
		take(t.Context())
	}
}

func TestSource_relistTellsWhatChanged(t *testing.T) {
	t.Parallel()
	for _, streaming := range []bool{true, false} {
		t.Run(fmt.Sprint("streaming=", streaming), func(t *testing.T) {
			t.Parallel()
			api := cluster(t)
			api.put(aService("db", "10.96.0.9"), aService("bad", "no address"))
			if !streaming {
				api.setFault(refuseStreaming)
			}
			s := open(t, api.client(nil))
			expect(t, s, "cidr 10.96.0.0/16\nnode n1 [192.0.2.1]\nproblem Service default/bad spec.clusterIPs[0]\n"+
				"service default/bad []\nservice default/db [10.96.0.9]\nservice default/web [10.96.0.1]\n"+
				"slice default/web-1 10.0.0.1 10.0.0.2")
			api.watched()
			api.quietly(func() {
				api.remove(aService("db", ""))
				api.put(aSlice("web-1", "web", "10.0.0.7"), aService("web", "10.96.0.1")) // a new version of the same
			})
			for _, r := range []string{"services", "endpointslices"} {
				api.send(r, watch.Event{Type: watch.Error, Object: &metav1.Status{
					Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired,
				}})
			}
			expect(t, s, "service default/db gone\nslice default/web-1 10.0.0.7")
			nothing(t, s, api)
			api.put(aService("bad", "still none"))
			expect(t, s, "problem Service default/bad spec.clusterIPs[0]\nresolved Service default/bad")
			api.remove(aService("bad", ""))
			expect(t, s, "resolved Service default/bad\nservice default/bad gone")
		})
	}
}

func refuseStreaming(w http.ResponseWriter, r *http.Request) bool {
	if r.URL.Query().Get("sendInitialEvents") == "" {
		return false
	}
	refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	return true
}

// client-go logs each failed request only at a high verbosity: the link logs once what matters.
func TestSource_logsOfAnOutage(t *testing.T) {
	t.Parallel()
	for _, level := range []slog.Level{slog.LevelInfo, slog.LevelDebug} {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			logs, log := newLogbookFrom(level)
			api := cluster(t)
			var refused atomic.Int32
			api.setFault(func(w http.ResponseWriter, _ *http.Request) bool {
				refused.Add(1)
				refuse(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable)
				return true
			})
			open(t, api.client(log))
			eventually.True(t, "more than 12 requests are refused", func() bool { return refused.Load() > 12 })
			if level == slog.LevelDebug {
				logs.await(t, "level=DEBUG")
			} else if l := logs.with("level=DEBUG"); l != nil {
				t.Errorf("at level INFO it logs:\n%s", strings.Join(l, ""))
			}
		})
	}
}

func TestSource_serverAwayAtStart(t *testing.T) {
	t.Parallel()
	logs, log := newLogbook()
	var away atomic.Bool
	away.Store(true)
	server := cluster(t)
	server.setFault(func(_ http.ResponseWriter, r *http.Request) bool {
		if away.Load() && strings.HasSuffix(r.URL.Path, "/endpointslices") {
			panic(http.ErrAbortHandler) // one kind alone is not enough for a first batch
		}
		return false
	})
	c := server.client(log)
	c.timing.reminder = 50 * time.Millisecond
	s := open(t, c)
	logs.await(t, "the API server does not answer")
	logs.await(t, "still waiting for the first list")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if b, err := s.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Next = %s, %v before the slices were known", rows(b), err)
	}
	away.Store(false)
	expect(t, s, wholeCluster)
	logs.await(t, "the API server serves again")
}

func TestSource_keepsStateWhileServerIsAway(t *testing.T) {
	t.Parallel()
	for _, fault := range []struct {
		name string
		want string
		f    func(w http.ResponseWriter, r *http.Request) bool
	}{
		{"refuses credentials", "does not accept the credentials", func(w http.ResponseWriter, _ *http.Request) bool {
			refuse(w, http.StatusUnauthorized, metav1.StatusReasonUnauthorized)
			return true
		}},
		{"forbids", "forbids a request", func(w http.ResponseWriter, _ *http.Request) bool {
			refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden)
			return true
		}},
		{"is broken", "answers with an error", func(w http.ResponseWriter, _ *http.Request) bool {
			refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
			return true
		}},
		{"hangs up", "does not answer", func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) }},
		{"talks garbage", "does not answer", func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Type", "application/vnd.kubernetes.protobuf")
			fmt.Fprint(w, "k8s\x00garbage")
			return true
		}},
	} {
		t.Run(fault.name, func(t *testing.T) {
			t.Parallel()
			logs, log := newLogbook()
			api := cluster(t)
			s := open(t, api.client(log))
			expect(t, s, wholeCluster)
			var refused atomic.Int32
			api.setFault(func(w http.ResponseWriter, r *http.Request) bool {
				refused.Add(1)
				return fault.f(w, r)
			})
			api.endWatches()
			logs.await(t, fault.want)
			// Of each kind some are refused; they come ever more seldom.
			eventually.True(t, "more than 10 requests are refused", func() bool { return refused.Load() > 10 })
			api.quietly(func() { api.put(aService("web", "10.96.0.5")) })
			api.setFault(nil)
			expect(t, s, "service default/web [10.96.0.5]")
			logs.await(t, "serves again")
			if n := len(logs.with("WARN")); n > 5 {
				t.Errorf("%d warnings:\n%s", n, strings.Join(logs.with(""), ""))
			}
			nothing(t, s, api)
		})
	}
}

func TestSource_serverWithoutServiceCIDRs(t *testing.T) {
	t.Parallel()
	for _, code := range []int{http.StatusNotFound, http.StatusForbidden} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			logs, log := newLogbook()
			api := cluster(t)
			api.setFault(func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, "/servicecidrs") {
					return false
				}
				reason := map[int]metav1.StatusReason{404: metav1.StatusReasonNotFound, 403: metav1.StatusReasonForbidden}
				refuse(w, code, reason[code])
				return true
			})
			s := open(t, api.client(log))
			expect(t, s, strings.Replace(wholeCluster, "cidr 10.96.0.0/16", "cidr none", 1))
			api.setFault(nil)
			expect(t, s, "cidr 10.96.0.0/16")
			if warnings := logs.with("WARN"); len(warnings) != 1 || !strings.Contains(warnings[0], "continuing without it") {
				t.Errorf("want one warning, got:\n%s", strings.Join(warnings, ""))
			}
		})
	}
}

// A watch that the server forgot is silent for ever.
func TestSource_silentWatch(t *testing.T) {
	t.Parallel()
	logs, log := newLogbook()
	api := cluster(t)
	c := api.client(log)
	c.timing.silence = 1500 * time.Millisecond // the Reflector lists anew after a watch of less than a second
	s := open(t, c)
	expect(t, s, wholeCluster)
	api.watched()
	api.quietly(func() { api.put(aService("web", "10.96.0.5")) })
	expect(t, s, "service default/web [10.96.0.5]")
	if l := logs.with(""); l != nil {
		t.Errorf("silence is not unusual, but it logs:\n%s", strings.Join(l, ""))
	}
	api.mu.Lock()
	defer api.mu.Unlock()
	lists := 0
	for _, r := range api.requests {
		if !strings.Contains(r, "watch=") && !strings.Contains(r, "metadata.name%3D-") || strings.Contains(r, "sendInitial") {
			lists++
		}
	}
	if lists != 4 {
		t.Errorf("%d lists; a silent watch must not cost one:\n%s", lists, strings.Join(api.requests, "\n"))
	}
}

// A watch from a version that lies in the future, since etcd was restored, is silent for long, too.
func TestSource_historyWentBack(t *testing.T) {
	t.Parallel()
	logs, log := newLogbook()
	api := cluster(t)
	c := api.client(log)
	c.timing.silence = 100 * time.Millisecond
	s := open(t, c)
	expect(t, s, wholeCluster)
	api.watched()
	api.quietly(func() {
		api.remove(aService("web", ""))
		api.put(aService("db", "10.96.0.6"))
		api.mu.Lock()
		api.version = 500
		api.mu.Unlock()
	})
	expect(t, s, "service default/db [10.96.0.6]\nservice default/web gone")
	logs.await(t, "history went back")
}

func TestSource_bookmarksKeepAWatchAlive(t *testing.T) {
	t.Parallel()
	api := cluster(t)
	c := api.client(nil)
	c.timing.silence = 2 * time.Second
	s := open(t, c)
	expect(t, s, wholeCluster)
	pace := time.NewTicker(c.timing.silence / 20) // the server's, of which the client must not become suspicious
	defer pace.Stop()
	last, heldUp := time.Now(), false
	for range 60 {
		<-pace.C
		heldUp = heldUp || time.Since(last) > c.timing.silence/2 // as this test's process may be: then there was silence
		last = time.Now()
		for _, r := range []string{"services", "endpointslices", "nodes", "servicecidrs"} {
			api.send(r, bookmark(r, 5000, false))
		}
	}
	asked := func(what string) bool {
		api.mu.Lock()
		defer api.mu.Unlock()
		return slices.ContainsFunc(api.requests, func(r string) bool { return strings.Contains(r, what) })
	}
	if asked("resourceVersion=") && !heldUp {
		t.Error("a watch was doubted although it had bookmarks")
	}
	api.endWatches()
	eventually.True(t, "a watch begins at the bookmark", func() bool { return asked("resourceVersion=5000") })
}

// Tokens are short-lived: the kubelet replaces the file.
func TestSource_tokenFileIsReadAgain(t *testing.T) {
	t.Parallel()
	logs, log := newLogbook()
	server := cluster(t)
	token := filepath.Join(t.TempDir(), "token")
	write := func(text string) {
		if err := os.WriteFile(token, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var valid atomic.Value
	valid.Store("one")
	write("one")
	server.setFault(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") == "Bearer "+valid.Load().(string) {
			return false
		}
		refuse(w, http.StatusUnauthorized, metav1.StatusReasonUnauthorized)
		return true
	})
	c := connect(t, ClientOptions{Kubeconfig: server.kubeconfig(server.URL, &api.AuthInfo{TokenFile: token}), Log: log})
	s := open(t, c)
	expect(t, s, wholeCluster)
	valid.Store("two")
	server.endWatches()
	logs.await(t, "does not accept the credentials")
	write("two")
	server.put(aService("web", "10.96.0.5"))
	expect(t, s, "service default/web [10.96.0.5]")
	logs.await(t, "serves again")
}

func TestConnect_errors(t *testing.T) {
	for _, c := range []struct {
		name string
		o    ClientOptions
		want string
	}{
		{"nothing", ClientOptions{}, "clientConnection.kubeconfig (--kubeconfig) and --master are empty"},
		{"missing file", ClientOptions{Kubeconfig: "/nonexistent/config"}, "clientConnection.kubeconfig /nonexistent/config"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("KUBERNETES_SERVICE_HOST", "")
			if _, err := Connect(c.o); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v, want %q", err, c.want)
			}
		})
	}
}

func TestSource_close(t *testing.T) {
	t.Parallel()
	api := newServer(t)
	api.shut()
	s := api.client(nil).Source("n1")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(t.Context()); !errors.Is(err, errClosed) {
		t.Fatal(err)
	}
}
