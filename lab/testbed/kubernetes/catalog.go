package kubernetes

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"

	"fairlead.dev/fairlead/lab/testbed"
)

// Catalog is an API server that lists the objects it was given, and announces those that it is given later, and
// changes: all that a service proxy asks for. It is for where a real one is too much: in a test kernel, with one
// processor, for tens of thousands of Services. It speaks protobuf.
type Catalog struct {
	mu          sync.Mutex
	version     int
	collections map[string]*collection // by resource

	servers []*http.Server
	ended   chan error // one error for each
}

// collection are the objects of one resource.
type collection struct {
	list    runtime.Object // without items
	items   []Object
	index   map[name]int // of items
	text    []byte       // the encoded list; nil: not yet
	deleted int          // the version of the last deletion
	watches map[*watcher]bool
}

type name struct{ namespace, name string }

func nameOf(o Object) name { return name{o.GetNamespace(), o.GetName()} }

// watcher is a client with a watch.
type watcher struct {
	frames chan []byte
	gone   <-chan struct{}
}

// NewCatalog makes one that has Services, EndpointSlices, Nodes, ServiceCIDRs and ConfigMaps.
func NewCatalog(objects ...runtime.Object) (*Catalog, error) {
	c := &Catalog{collections: map[string]*collection{}}
	for resource, list := range map[string]runtime.Object{
		"services": &corev1.ServiceList{}, "endpointslices": &discoveryv1.EndpointSliceList{},
		"nodes": &corev1.NodeList{}, "servicecidrs": &networkingv1.ServiceCIDRList{},
		"configmaps": &corev1.ConfigMapList{},
	} {
		c.collections[resource] = &collection{list: list, index: map[name]int{}, watches: map[*watcher]bool{}}
	}
	for _, o := range objects {
		if err := c.Add(o); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Copy is a Catalog with the same objects, which changes and is served by itself. It costs little.
func (c *Catalog) Copy() *Catalog {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := &Catalog{version: c.version, collections: map[string]*collection{}}
	for resource, s := range c.collections {
		next.collections[resource] = &collection{
			list: s.list, items: slices.Clone(s.items), index: maps.Clone(s.index), text: s.text, deleted: s.deleted,
			watches: map[*watcher]bool{},
		}
	}
	return next
}

// Add announces an object that is new. The catalog keeps it.
func (c *Catalog) Add(o runtime.Object) error { return c.announce(watch.Added, o) }

// Update announces an object in place of the one with its name. The catalog keeps it: a caller that changes an
// object of the catalog must pass a copy.
func (c *Catalog) Update(o runtime.Object) error { return c.announce(watch.Modified, o) }

// Delete announces that the object with this one's name is no more.
func (c *Catalog) Delete(o runtime.Object) error {
	return c.announce(watch.Deleted, o.DeepCopyObject())
}

func (c *Catalog) announce(what watch.EventType, o runtime.Object) error {
	resource, err := resourceOf(o)
	if err == nil {
		err = setKind(o)
	}
	if err != nil {
		return err
	}
	m := o.(Object) // as all of which there are resources
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.collections[resource]
	key := nameOf(m)
	if _, there := s.index[key]; there == (what == watch.Added) {
		return fmt.Errorf("%s %s/%s cannot be %s (is it there: %t)", resource, key.namespace, key.name, what, there)
	}
	c.version++
	m.SetResourceVersion(strconv.Itoa(c.version))
	s.keep(what, m)
	if what == watch.Deleted {
		s.deleted = c.version
	}
	return s.tell(what, o)
}

// keep brings the items up to date.
func (s *collection) keep(what watch.EventType, o Object) {
	key := nameOf(o)
	s.text = nil
	switch i := s.index[key]; what {
	case watch.Added:
		s.index[key] = len(s.items)
		s.items = append(s.items, o)
	case watch.Modified:
		s.items[i] = o
	case watch.Deleted:
		last := len(s.items) - 1
		s.index[nameOf(s.items[last])] = i
		s.items[i], s.items = s.items[last], s.items[:last]
		delete(s.index, key)
	}
}

// tell tells all that watch.
func (s *collection) tell(what watch.EventType, o runtime.Object) error {
	if len(s.watches) == 0 {
		return nil
	}
	frame, err := event(what, o)
	if err != nil {
		return err
	}
	for w := range s.watches {
		select {
		case w.frames <- frame:
		case <-w.gone:
		}
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
	case *corev1.ConfigMap:
		return "configmaps", nil
	}
	return "", fmt.Errorf("a Catalog has no %T", o)
}

// wire is how the objects are written.
func wire() runtime.SerializerInfo {
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	return info
}

// encode writes an object that has its kind.
func encode(o runtime.Object) ([]byte, error) { return runtime.Encode(wire().Serializer, o) }

func setKind(o runtime.Object) error {
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		return err
	}
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	return nil
}

// event is what a watch hears of an object.
func event(what watch.EventType, o runtime.Object) ([]byte, error) {
	text, err := encode(o)
	if err != nil {
		return nil, err
	}
	e := &metav1.WatchEvent{Type: string(what), Object: runtime.RawExtension{Raw: text}}
	return runtime.Encode(wire().StreamSerializer.Serializer, e)
}

// Serve answers on the node's loopback address until Close, and writes a kubeconfig for that into dir. One Catalog can
// serve several Beds.
func (c *Catalog) Serve(bed *testbed.Bed, dir string) (kubeconfig string, err error) {
	var listener net.Listener
	err = bed.Do(testbed.Node, func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		return "", err
	}
	server := &http.Server{Handler: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.servers = append(c.servers, server); c.ended == nil {
		c.ended = make(chan error)
	}
	go func() { c.ended <- server.Serve(listener) }()
	kubeconfig = filepath.Join(dir, "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "a",
 "clusters": [{"name": "a", "cluster": {"server": "http://%s"}}], "users": [{"name": "a", "user": {}}],
 "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}]}`, listener.Addr())
	return kubeconfig, os.WriteFile(kubeconfig, []byte(text), 0o600)
}

// Close ends what Serve began.
func (c *Catalog) Close() (err error) {
	c.mu.Lock()
	servers := c.servers
	c.servers = nil
	c.mu.Unlock()
	for _, server := range servers {
		err = errors.Join(err, server.Close())
	}
	for range servers {
		if ended := <-c.ended; !errors.Is(ended, http.ErrServerClosed) {
			err = errors.Join(err, ended)
		}
	}
	return err
}

// ServeHTTP answers lists, watches, and questions for one node or ConfigMap. It accepts Events and forgets them. A
// request for a watch that begins with a list learns that this server is too old for it.
func (c *Catalog) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parent, resource := path.Split(r.URL.Path)
	name := ""
	if of := path.Base(parent); of == "nodes" || of == "configmaps" {
		resource, name = of, resource
	}
	s := c.collections[resource]
	switch query := r.URL.Query(); {
	case r.Method != http.MethodGet:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, "{}")
	case s == nil:
		http.NotFound(w, r)
	case query.Get("sendInitialEvents") != "":
		refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	case query.Get("watch") != "":
		c.watch(w, r, s)
	case name != "":
		c.get(w, r, s, name)
	default:
		text, err := c.list(s)
		answer(w, http.StatusOK, text, err)
	}
}

// refuse is the answer to a parameter that the server does not know, and to one that is of too long ago.
func refuse(w http.ResponseWriter, code int, why metav1.StatusReason) {
	status := &metav1.Status{Status: metav1.StatusFailure, Reason: why, Code: int32(code)}
	status.SetGroupVersionKind(metav1.Unversioned.WithKind("Status"))
	text, err := encode(status)
	answer(w, code, text, err)
}

func answer(w http.ResponseWriter, code int, text []byte, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	w.WriteHeader(code)
	_, _ = w.Write(text) // a client that is gone needs no answer
}

func (c *Catalog) list(s *collection) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.text != nil {
		return s.text, nil
	}
	list, items := s.list.DeepCopyObject(), make([]runtime.Object, len(s.items))
	for i, o := range s.items {
		items[i] = o
	}
	if err := meta.SetList(list, items); err != nil {
		return nil, err
	}
	m, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	m.SetResourceVersion(strconv.Itoa(c.version))
	if err := setKind(list); err != nil {
		return nil, err
	}
	s.text, err = encode(list)
	return s.text, err
}

func (c *Catalog) get(w http.ResponseWriter, r *http.Request, s *collection, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range s.items {
		if o.GetName() == name {
			text, err := encode(o)
			answer(w, http.StatusOK, text, err)
			return
		}
	}
	http.NotFound(w, r)
}

// watch streams what happens after the version that was asked for. A client that missed a deletion must list again.
func (c *Catalog) watch(w http.ResponseWriter, r *http.Request, s *collection) {
	me := &watcher{frames: make(chan []byte, 100), gone: r.Context().Done()}
	missed, err := c.subscribe(s, me, r.URL.Query().Get("resourceVersion"))
	switch {
	case errors.Is(err, errTooOld):
		refuse(w, http.StatusGone, metav1.StatusReasonExpired)
		return
	case err != nil:
		answer(w, 0, nil, err)
		return
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(s.watches, me)
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
		case frame := <-me.frames:
			_, _ = out.Write(frame) // if it has gone, its context ends
		case <-me.gone:
			return
		}
	}
}

// errTooOld says that a watch cannot begin at a version.
var errTooOld = errors.New("something was deleted since")

func (c *Catalog) subscribe(s *collection, w *watcher, version string) (missed [][]byte, err error) {
	from, _ := strconv.Atoi(version) // without a version: all
	c.mu.Lock()
	defer c.mu.Unlock()
	if from > 0 && from < s.deleted {
		return nil, errTooOld
	}
	for _, o := range s.items {
		if v, _ := strconv.Atoi(o.GetResourceVersion()); v > from {
			frame, err := event(watch.Added, o)
			if err != nil {
				return nil, err
			}
			missed = append(missed, frame)
		}
	}
	s.watches[w] = true
	return missed, nil
}

// flusher sends what is written at once.
type flusher struct{ http.ResponseWriter }

func (f flusher) Write(b []byte) (int, error) {
	n, err := f.ResponseWriter.Write(b)
	f.ResponseWriter.(http.Flusher).Flush()
	return n, err
}
