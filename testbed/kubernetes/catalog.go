package kubernetes

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"

	"fairlead.dev/fairlead/testbed"
)

// Catalog is an API server that lists the objects it was given, and announces those that it is given later:
// all that a service proxy asks for. It is for where a real one is too much: in a test kernel, with one
// processor, for tens of thousands of Services. It speaks protobuf.
type Catalog struct {
	mu      sync.Mutex
	version int
	shelves map[string]*shelf // by resource

	server *http.Server
	ended  chan error
}

// shelf are the objects of one resource.
type shelf struct {
	list    runtime.Object // without items
	items   []runtime.Object
	text    []byte // the encoded list; nil: not yet
	watches map[chan []byte]bool
}

// NewCatalog makes one that has Services, EndpointSlices, Nodes and ServiceCIDRs.
func NewCatalog(objects ...runtime.Object) (*Catalog, error) {
	c := &Catalog{shelves: map[string]*shelf{}}
	for resource, list := range map[string]runtime.Object{
		"services": &corev1.ServiceList{}, "endpointslices": &discoveryv1.EndpointSliceList{},
		"nodes": &corev1.NodeList{}, "servicecidrs": &networkingv1.ServiceCIDRList{},
	} {
		c.shelves[resource] = &shelf{list: list, watches: map[chan []byte]bool{}}
	}
	for _, o := range objects {
		if err := c.Add(o); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Add announces an object that is new. The catalog keeps it.
func (c *Catalog) Add(o runtime.Object) error {
	resource, err := resourceOf(o)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	m, err := meta.Accessor(o)
	if err != nil {
		return err
	}
	m.SetResourceVersion(strconv.Itoa(c.version))
	s := c.shelves[resource]
	s.items, s.text = append(s.items, o), nil
	if len(s.watches) == 0 {
		return nil
	}
	frame, err := added(o)
	if err != nil {
		return err
	}
	for w := range s.watches {
		w <- frame
	}
	return nil
}

func resourceOf(o runtime.Object) (string, error) {
	switch o.(type) {
	case *corev1.Service:
		return "services", nil
	case *corev1.Node:
		return "nodes", nil
	case *discoveryv1.EndpointSlice:
		return "endpointslices", nil
	case *networkingv1.ServiceCIDR:
		return "servicecidrs", nil
	}
	return "", fmt.Errorf("a Catalog has no %T", o)
}

// wire is how the objects are written.
func wire() runtime.SerializerInfo {
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	return info
}

// encode writes an object with its kind.
func encode(o runtime.Object) ([]byte, error) {
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		return nil, err
	}
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	return runtime.Encode(wire().Serializer, o)
}

// added is what a watch hears of a new object.
func added(o runtime.Object) ([]byte, error) {
	text, err := encode(o)
	if err != nil {
		return nil, err
	}
	stream := wire().StreamSerializer
	event := &metav1.WatchEvent{Type: string(watch.Added), Object: runtime.RawExtension{Raw: text}}
	return runtime.Encode(stream.Serializer, event)
}

// Serve answers on the node's loopback address until Close, and writes a kubeconfig for that into dir.
func (c *Catalog) Serve(bed *testbed.Bed, dir string) (kubeconfig string, err error) {
	var listener net.Listener
	err = bed.Do(testbed.Node, func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		return "", err
	}
	c.server, c.ended = &http.Server{Handler: c}, make(chan error, 1)
	go func() { c.ended <- c.server.Serve(listener) }()
	kubeconfig = filepath.Join(dir, "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "a",
 "clusters": [{"name": "a", "cluster": {"server": "http://%s"}}], "users": [{"name": "a", "user": {}}],
 "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}]}`, listener.Addr())
	return kubeconfig, os.WriteFile(kubeconfig, []byte(text), 0o600)
}

// Close ends what Serve began.
func (c *Catalog) Close() error {
	err := c.server.Close()
	if ended := <-c.ended; !errors.Is(ended, http.ErrServerClosed) {
		err = errors.Join(err, ended)
	}
	return err
}

// ServeHTTP answers lists, watches, and questions for one node. What is written (Events) is accepted, and
// forgotten. Who wants to watch from a list on learns that this server is too old for it.
func (c *Catalog) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, name, _ := strings.Cut(r.URL.Path, "/nodes/")
	resource := path[strings.LastIndexByte(path, '/')+1:]
	if name != "" {
		resource = "nodes"
	}
	s := c.shelves[resource]
	switch query := r.URL.Query(); {
	case r.Method != http.MethodGet:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, "{}")
	case s == nil:
		http.NotFound(w, r)
	case query.Get("sendInitialEvents") != "":
		refuse(w)
	case query.Get("watch") != "":
		c.watch(w, r, s)
	case name != "":
		c.get(w, r, s, name)
	default:
		text, err := c.list(s)
		answer(w, text, err)
	}
}

// refuse is the answer to a parameter that the server does not know.
func refuse(w http.ResponseWriter) {
	text, err := encode(&metav1.Status{
		Status: metav1.StatusFailure, Reason: metav1.StatusReasonInvalid, Code: http.StatusUnprocessableEntity,
	})
	if err != nil {
		answer(w, nil, err)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	w.WriteHeader(http.StatusUnprocessableEntity)
	_, _ = w.Write(text) // who has gone needs no answer
}

func answer(w http.ResponseWriter, text []byte, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	_, _ = w.Write(text)
}

func (c *Catalog) list(s *shelf) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.text != nil {
		return s.text, nil
	}
	list := s.list.DeepCopyObject()
	if err := meta.SetList(list, s.items); err != nil {
		return nil, err
	}
	m, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	m.SetResourceVersion(strconv.Itoa(c.version))
	s.text, err = encode(list)
	return s.text, err
}

func (c *Catalog) get(w http.ResponseWriter, r *http.Request, s *shelf, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range s.items {
		if m, err := meta.Accessor(o); err == nil && m.GetName() == name {
			text, err := encode(o)
			answer(w, text, err)
			return
		}
	}
	http.NotFound(w, r)
}

// watch streams what is added after the version that was asked for.
func (c *Catalog) watch(w http.ResponseWriter, r *http.Request, s *shelf) {
	events := make(chan []byte, 100)
	missed, err := c.subscribe(s, events, r.URL.Query().Get("resourceVersion"))
	if err != nil {
		answer(w, nil, err)
		return
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(s.watches, events)
	}()
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	w.WriteHeader(http.StatusOK)
	out := wire().StreamSerializer.Framer.NewFrameWriter(flusher{w})
	for _, frame := range missed {
		_, _ = out.Write(frame)
	}
	w.(http.Flusher).Flush()
	for {
		select {
		case frame := <-events:
			_, _ = out.Write(frame) // if it has gone, its context ends
		case <-r.Context().Done():
			return
		}
	}
}

func (c *Catalog) subscribe(s *shelf, events chan []byte, version string) (missed [][]byte, err error) {
	from, _ := strconv.Atoi(version) // who does not say wants all
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range s.items {
		m, err := meta.Accessor(o)
		if err != nil {
			return nil, err
		}
		if v, _ := strconv.Atoi(m.GetResourceVersion()); v > from {
			frame, err := added(o)
			if err != nil {
				return nil, err
			}
			missed = append(missed, frame)
		}
	}
	s.watches[events] = true
	return missed, nil
}

// flusher sends what is written at once.
type flusher struct{ http.ResponseWriter }

func (f flusher) Write(b []byte) (int, error) {
	n, err := f.ResponseWriter.Write(b)
	f.ResponseWriter.(http.Flusher).Flush()
	return n, err
}

var _ io.Writer = flusher{}
