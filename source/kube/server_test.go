package kube

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"fairlead.dev/fairlead/lab/eventually"
)

// apiServer speaks the list and watch protocol as far as this package hears it: protobuf, HTTP/2, streaming lists,
// bookmarks; and it does whatever a test wants to go wrong. Tests against a real one show its behaviour.
type apiServer struct {
	*httptest.Server
	t      testing.TB
	scheme *runtime.Scheme
	codecs serializer.CodecFactory

	mu       sync.Mutex
	version  int
	objects  map[string]map[string]runtime.Object // by resource, then namespace/name
	watches  map[*serverWatch]bool
	requests []string // what was asked, for tests to look at
	nodes    int      // how many it says there are, if asked for that
	// fault answers a request in the server's place, if it returns true.
	fault func(w http.ResponseWriter, r *http.Request) bool
}

type serverWatch struct {
	resource string
	events   chan watch.Event
	stop     chan struct{}
}

func newServer(t testing.TB) *apiServer {
	known, err := scheme()
	if err != nil {
		t.Fatal(err)
	}
	s := &apiServer{
		t: t, scheme: known, codecs: serializer.NewCodecFactory(known), version: 1000,
		objects: map[string]map[string]runtime.Object{}, watches: map[*serverWatch]bool{},
	}
	s.Server = httptest.NewUnstartedServer(s)
	s.Server.EnableHTTP2 = true
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	s.StartTLS()
	t.Cleanup(s.shut)
	return s
}

func (s *apiServer) shut() {
	s.endWatches()
	s.CloseClientConnections()
	s.Close()
}

// setFault has requests answered by f; nil: by the server.
func (s *apiServer) setFault(f func(w http.ResponseWriter, r *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// endWatches ends all watches as a server does that restarts.
func (s *apiServer) endWatches() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		close(w.stop)
		delete(s.watches, w)
	}
}

func resourceOf(o runtime.Object) string {
	switch o.(type) {
	case *corev1.Service:
		return "services"
	case *corev1.Node:
		return "nodes"
	case *discoveryv1.EndpointSlice:
		return "endpointslices"
	case *networkingv1.ServiceCIDR:
		return "servicecidrs"
	}
	panic(fmt.Sprintf("unknown kind %T", o))
}

func key(o runtime.Object) string {
	m, _ := meta.Accessor(o)
	return m.GetNamespace() + "/" + m.GetName()
}

// put adds or changes objects, and tells the watches.
func (s *apiServer) put(objects ...runtime.Object) { s.change(true, objects...) }

// quietly changes objects, and the watches never hear of it.
func (s *apiServer) quietly(f func()) {
	s.mu.Lock()
	old := s.watches
	s.watches = map[*serverWatch]bool{}
	s.mu.Unlock()
	f()
	s.mu.Lock()
	s.watches = old
	s.mu.Unlock()
}

func (s *apiServer) remove(objects ...runtime.Object) { s.change(false, objects...) }

func (s *apiServer) change(keep bool, objects ...runtime.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range objects {
		o = o.DeepCopyObject()
		s.version++
		m, _ := meta.Accessor(o)
		m.SetResourceVersion(strconv.Itoa(s.version))
		resource := resourceOf(o)
		all := s.objects[resource]
		if all == nil {
			all = map[string]runtime.Object{}
			s.objects[resource] = all
		}
		event := watch.Event{Type: watch.Added, Object: o}
		if _, ok := all[key(o)]; ok {
			event.Type = watch.Modified
		}
		all[key(o)] = o
		if !keep {
			event.Type = watch.Deleted
			delete(all, key(o))
		}
		s.deliver(resource, event)
	}
}

func (s *apiServer) deliver(resource string, e watch.Event) {
	for w := range s.watches {
		if w.resource == resource {
			w.events <- e
		}
	}
}

// send has all watches of a resource receive an event.
func (s *apiServer) send(resource string, e watch.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deliver(resource, e)
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	fault := s.fault
	s.requests = append(s.requests, r.Method+" "+r.URL.String())
	s.mu.Unlock()
	if fault != nil && fault(w, r) {
		return
	}
	resource := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	switch {
	case strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList"):
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","items":[{"metadata":{"uid":"found"}}],
			"metadata":{"remainingItemCount":%d}}`, max(0, s.nodes-1))
	case r.Method != http.MethodGet:
		refuse(w, http.StatusMethodNotAllowed, metav1.StatusReasonMethodNotAllowed)
	case r.URL.Query().Get("watch") != "":
		s.watch(w, r, resource)
	case s.future(r.URL.Query().Get("resourceVersion")):
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusGatewayTimeout)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Timeout","code":504,
			"details":{"causes":[{"reason":"ResourceVersionTooLarge"}]}}`)
	default:
		s.list(w, resource)
	}
}

func (s *apiServer) future(version string) bool {
	v, _ := strconv.Atoi(version)
	s.mu.Lock()
	defer s.mu.Unlock()
	return v > s.version
}

// refuse answers with a Status.
func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"no"}`, reason, code)
}

func (s *apiServer) protobuf() runtime.SerializerInfo {
	info, _ := runtime.SerializerInfoForMediaType(s.codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	return info
}

func (s *apiServer) encode(o runtime.Object) []byte {
	kinds, _, err := s.scheme.ObjectKinds(o)
	if err != nil {
		s.t.Error(err)
		return nil
	}
	o = o.DeepCopyObject()
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	text, err := runtime.Encode(s.protobuf().Serializer, o)
	if err != nil {
		s.t.Error(err)
	}
	return text
}

func (s *apiServer) list(w http.ResponseWriter, resource string) {
	list := map[string]runtime.Object{
		"services": &corev1.ServiceList{}, "endpointslices": &discoveryv1.EndpointSliceList{},
		"nodes": &corev1.NodeList{}, "servicecidrs": &networkingv1.ServiceCIDRList{},
	}[resource]
	s.mu.Lock()
	if err := meta.SetList(list, s.sorted(resource)); err != nil {
		s.t.Error(err)
	}
	m, _ := meta.ListAccessor(list)
	m.SetResourceVersion(strconv.Itoa(s.version))
	s.mu.Unlock()
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	_, _ = w.Write(s.encode(list))
}

func (s *apiServer) sorted(resource string) (all []runtime.Object) {
	var keys []string
	for k := range s.objects[resource] {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		all = append(all, s.objects[resource][k])
	}
	return all
}

func bookmark(resource string, version int, initial bool) watch.Event {
	m := metav1.ObjectMeta{ResourceVersion: strconv.Itoa(version)}
	if initial {
		m.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	o := map[string]runtime.Object{
		"services": &corev1.Service{ObjectMeta: m}, "endpointslices": &discoveryv1.EndpointSlice{ObjectMeta: m},
		"nodes": &corev1.Node{ObjectMeta: m}, "servicecidrs": &networkingv1.ServiceCIDR{ObjectMeta: m},
	}[resource]
	return watch.Event{Type: watch.Bookmark, Object: o}
}

// watch streams. A watch that does not begin with the initial events begins at the present version:
// tests that need the past list anew.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, resource string) {
	sw := &serverWatch{resource: resource, events: make(chan watch.Event, 100), stop: make(chan struct{})}
	s.mu.Lock()
	var first []watch.Event
	if r.URL.Query().Get("sendInitialEvents") != "" {
		for _, o := range s.sorted(resource) {
			first = append(first, watch.Event{Type: watch.Added, Object: o})
		}
		first = append(first, bookmark(resource, s.version, true))
	} else if v, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion")); v < s.version {
		for _, o := range s.sorted(resource) {
			m, _ := meta.Accessor(o)
			if ov, _ := strconv.Atoi(m.GetResourceVersion()); ov > v {
				first = append(first, watch.Event{Type: watch.Modified, Object: o})
			}
		}
	}
	s.watches[sw] = true
	s.mu.Unlock()
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	defer func() {
		s.mu.Lock()
		delete(s.watches, sw)
		s.mu.Unlock()
	}()
	for _, e := range first {
		s.frame(w, e)
	}
	w.(http.Flusher).Flush()
	for {
		select {
		case e := <-sw.events:
			s.frame(w, e)
			w.(http.Flusher).Flush()
		case <-sw.stop:
			return
		case <-r.Context().Done():
			return
		}
	}
}

func (s *apiServer) frame(w io.Writer, e watch.Event) {
	event := &metav1.WatchEvent{Type: string(e.Type), Object: runtime.RawExtension{Raw: s.encode(e.Object)}}
	stream := s.protobuf().StreamSerializer
	text, err := runtime.Encode(stream.Serializer, event)
	if err != nil {
		s.t.Error(err)
	}
	_, _ = stream.Framer.NewFrameWriter(w).Write(text)
}

// kubeconfig writes a file with which the server is reached at a URL, with this user.
func (s *apiServer) kubeconfig(url string, user *api.AuthInfo) string {
	ca := filepath.Join(s.t.TempDir(), "ca.crt")
	if err := os.WriteFile(ca, certificate(s.Server), 0o600); err != nil {
		s.t.Fatal(err)
	}
	path := filepath.Join(s.t.TempDir(), "kubeconfig")
	err := clientcmd.WriteToFile(api.Config{
		Clusters:       map[string]*api.Cluster{"c": {Server: url, CertificateAuthority: ca, TLSServerName: "example.com"}},
		AuthInfos:      map[string]*api.AuthInfo{"u": user},
		Contexts:       map[string]*api.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}, path)
	if err != nil {
		s.t.Fatal(err)
	}
	return path
}

// client connects to the server.
func (s *apiServer) client(log *slog.Logger) *Client {
	return connect(s.t, ClientOptions{Kubeconfig: s.kubeconfig(s.URL, &api.AuthInfo{}), Log: log})
}

// connect makes a client that has less patience than a real one.
func connect(t testing.TB, o ClientOptions) *Client {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.QPS = -1
	c, err := Connect(o)
	if err != nil {
		t.Fatal(err)
	}
	c.timing.backoff = 5 * time.Millisecond
	c.timing.settled = 20 * time.Millisecond
	c.timing.absent = 20 * time.Millisecond
	c.timing.series = 20 * time.Millisecond
	return c
}

// logbook is what was logged, one line each.
type logbook struct {
	mu    sync.Mutex
	lines []string
	more  chan struct{}
}

func newLogbook() (*logbook, *slog.Logger) { return newLogbookFrom(slog.LevelInfo) }

func newLogbookFrom(level slog.Level) (*logbook, *slog.Logger) {
	b := &logbook{more: make(chan struct{}, 1)}
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}
	return b, slog.New(slog.NewTextHandler(b, options))
}

func (b *logbook) Write(line []byte) (int, error) {
	b.mu.Lock()
	b.lines = append(b.lines, string(line))
	b.mu.Unlock()
	select {
	case b.more <- struct{}{}:
	default:
	}
	return len(line), nil
}

// with are the lines that contain a text.
func (b *logbook) with(text string) (found []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.lines {
		if strings.Contains(l, text) {
			found = append(found, l)
		}
	}
	return found
}

// await waits for a line.
func (b *logbook) await(t testing.TB, text string) {
	t.Helper()
	ctx, cancel := eventually.Context(t.Context())
	defer cancel()
	for len(b.with(text)) == 0 {
		select {
		case <-b.more:
		case <-ctx.Done():
			t.Fatalf("nobody logged %q, but:\n%s", text, strings.Join(b.with(""), ""))
		}
	}
}
