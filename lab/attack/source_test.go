package attack

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// directory has manifests.
type directory string

func newDirectory(s *stage) directory {
	s.Helper()
	d := directory(filepath.Join(s.top, "manifests"))
	if err := os.Mkdir(string(d), 0o755); err != nil {
		s.Fatal(err)
	}
	return d
}

func (d directory) flags() []string { return []string{"--manifests", string(d)} }

func (d directory) file(name string) string { return filepath.Join(string(d), name+".yaml") }

func (d directory) set(name string, objects []runtime.Object) error {
	if len(objects) == 0 { // an empty file would keep them
		return os.Remove(d.file(name))
	}
	text, err := manifest(objects)
	if err != nil {
		return err
	}
	return d.write(name, text)
}

// write has a manifest take the place of the one of this name at once.
func (d directory) write(name, text string) error {
	hidden := d.file("." + name)
	return errors.Join(os.WriteFile(hidden, []byte(text), 0o644), os.Rename(hidden, d.file(name)))
}

// clear removes the manifests whose names begin so.
func (d directory) clear(prefix string) error {
	entries, err := os.ReadDir(string(d))
	errs := []error{err}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			errs = append(errs, os.RemoveAll(filepath.Join(string(d), e.Name())))
		}
	}
	return errors.Join(errs...)
}

// manifest has a document for each object.
func manifest(objects []runtime.Object) (string, error) {
	var text strings.Builder
	for _, o := range objects {
		one, err := kubernetes.EncodeJSON(o)
		if err != nil {
			return "", err
		}
		text.WriteString("---\n")
		text.Write(one)
		text.WriteByte('\n')
	}
	return text.String(), nil
}

// server is an API server on the node. It may be slow, and counts the Events that it gets.
type server struct {
	*kubernetes.Catalog
	kubeconfig string

	mu     sync.Mutex
	given  map[string]map[string]kubernetes.Object // by the name of what was set, and kind and name
	delay  time.Duration                           // of all but watches
	events []string                                // their notes
}

func newServer(s *stage) *server {
	s.Helper()
	catalog, err := kubernetes.NewCatalog(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: string(testbed.Node)},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: s.bed.Addr(testbed.Node, false).String()},
			{Type: corev1.NodeInternalIP, Address: s.bed.Addr(testbed.Node, true).String()},
		}},
	})
	if err != nil {
		s.Fatal(err)
	}
	a := &server{Catalog: catalog, given: map[string]map[string]kubernetes.Object{}, kubeconfig: filepath.Join(s.top, "kubeconfig")}
	var listener net.Listener
	err = s.bed.Do(testbed.Node, func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		s.Fatal(err)
	}
	web := &http.Server{Handler: a}
	go func() { _ = web.Serve(listener) }()
	s.Cleanup(func() { _ = web.Close() })
	text := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "a",
 "clusters": [{"name": "a", "cluster": {"server": "http://%s"}}], "users": [{"name": "a", "user": {}}],
 "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}]}`, listener.Addr())
	if err := os.WriteFile(a.kubeconfig, []byte(text), 0o600); err != nil {
		s.Fatal(err)
	}
	return a
}

func (a *server) flags() []string { return []string{"--kubeconfig", a.kubeconfig} }

func (a *server) set(name string, objects []runtime.Object) error {
	now := map[string]kubernetes.Object{}
	for _, o := range objects {
		m := o.(kubernetes.Object)
		now[fmt.Sprintf("%T %s", o, m.GetName())] = m
	}
	a.mu.Lock() // not longer: the victim does not wait for the attacker's objects
	before := a.given[name]
	a.given[name] = now
	a.mu.Unlock()
	var errs []error
	for key, m := range now {
		if before[key] == nil {
			errs = append(errs, a.Add(m))
		} else {
			errs = append(errs, a.Update(m))
		}
	}
	for key, m := range before {
		if now[key] == nil {
			errs = append(errs, a.Delete(m))
		}
	}
	return errors.Join(errs...)
}

// ServeHTTP is the catalog's, later.
func (a *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	delay := a.delay
	a.mu.Unlock()
	if delay > 0 && r.URL.Query().Get("watch") == "" {
		late := time.NewTimer(delay)
		defer late.Stop()
		select {
		case <-late.C:
		case <-r.Context().Done():
			return
		}
	}
	switch path := strings.Split(r.URL.Path, "/"); {
	case r.Method == http.MethodPost && path[len(path)-1] == "events":
		a.note(r.Body)
		a.Catalog.ServeHTTP(w, r)
	case strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadataList"):
		partial(w, `{"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "items": [{"metadata": {"name": "node", "uid": "4711"}}]}`)
	case strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata"): // that an Event regards
		partial(w, fmt.Sprintf(`{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": {"name": %q}}`, path[len(path)-1]))
	default:
		a.Catalog.ServeHTTP(w, r)
	}
}

func partial(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, text) // a client that is gone needs no answer
}

// note keeps what an Event says.
func (a *server) note(body io.Reader) {
	said := "nothing that can be read"
	if text, err := io.ReadAll(body); err == nil {
		if o, _, err := scheme.Codecs.UniversalDeserializer().Decode(text, nil, nil); err == nil {
			said = o.(*eventsv1.Event).Note
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.events = append(a.events, said)
}

// slow has all requests but watches wait.
func (a *server) slow(delay time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.delay = delay
}

// written are the Events so far.
func (a *server) written() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.events
}
