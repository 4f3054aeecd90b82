package bench

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// crowd are virtual nodes that follow one API server with the rights of kube-proxy.
type crowd struct {
	*cluster
	gzip    bool
	server  string
	tls     *tls.Config
	ctx     context.Context
	leave   context.CancelFunc
	nodes   []*virtualNode
	tally   tally
	running sync.WaitGroup
	ended   atomic.Int64 // watches that the server ended: those of clients that do not keep up
}

// virtualNode is a client with a connection of its own. It counts what comes and keeps nothing.
type virtualNode struct {
	http     *http.Client
	received atomic.Int64 // bytes of the connection, TLS and HTTP/2 included
}

func newCrowd(b *testing.B, c *cluster, gzip bool) *crowd {
	b.Helper()
	kubeconfig, err := c.plane.Kubeconfig(b.TempDir(), kubernetes.KubeProxy())
	if err != nil {
		b.Fatal(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		b.Fatal(err)
	}
	secrets, err := rest.TLSConfigFor(config)
	if err != nil {
		b.Fatal(err)
	}
	w := &crowd{cluster: c, gzip: gzip, server: config.Host, tls: secrets}
	w.ctx, w.leave = context.WithCancel(b.Context())
	b.Cleanup(w.close)
	return w
}

func (w *crowd) close() {
	w.leave()
	w.running.Wait()
	for _, n := range w.nodes {
		n.http.CloseIdleConnections()
	}
	w.nodes = nil
}

// grow has nodes join until there are so many.
func (w *crowd) grow(n int) error {
	const atOnce = 16
	group := errgroup.Group{}
	group.SetLimit(atOnce)
	for i := len(w.nodes); i < n; i++ {
		node := w.newNode()
		w.nodes = append(w.nodes, node)
		group.Go(func() error { return w.follow(node, fmt.Sprintf("node-%d", i)) })
	}
	return group.Wait()
}

func (w *crowd) newNode() *virtualNode {
	n := &virtualNode{}
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		return countedConn{conn, &n.received}, err
	}
	n.http = &http.Client{Transport: &http.Transport{
		DialContext: dial, TLSClientConfig: w.tls.Clone(), ForceAttemptHTTP2: true, DisableCompression: !w.gzip,
	}}
	return n
}

// countedConn counts what is read.
type countedConn struct {
	net.Conn
	received *atomic.Int64
}

func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.received.Add(int64(n))
	return n, err
}

// received is by all nodes.
func (w *crowd) received() (bytes int64) {
	for _, n := range w.nodes {
		bytes += n.received.Load()
	}
	return bytes
}

// watched is what an agent asks for: source/kube has these resources with these selectors.
func watched(node string) []url.URL {
	selected := func(path, labels, fields string) url.URL {
		return url.URL{Path: path, RawQuery: url.Values{"labelSelector": {labels}, "fieldSelector": {fields}}.Encode()}
	}
	return []url.URL{
		selected("/api/v1/nodes", "", "metadata.name="+node),
		selected("/apis/networking.k8s.io/v1/servicecidrs", "", ""),
		selected("/api/v1/services", "", "spec.clusterIP!=None"),
		selected("/apis/discovery.k8s.io/v1/endpointslices", "!"+corev1.IsHeadlessService, ""),
	}
}

// streaming is how client-go begins a watch with all objects.
const streaming = "&watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan" +
	"&allowWatchBookmarks=true&timeoutSeconds=3600"

// follow returns once all objects have come. The watches go on until the crowd leaves.
func (w *crowd) follow(n *virtualNode, name string) error {
	const attempts = 5 // a busy server ends watches early, and an agent asks again
	for _, u := range watched(name) {
		u.RawQuery += streaming
		var s stream
		var err error
		for range attempts {
			if s, err = w.begin(n, u); err == nil {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", u.Path, err)
		}
		w.running.Go(func() {
			defer s.body.Close()
			if w.listen(s); w.ctx.Err() == nil {
				w.ended.Add(1)
			}
		})
	}
	return nil
}

// begin reads a watch up to the first bookmark, which is behind all objects.
func (w *crowd) begin(n *virtualNode, u url.URL) (stream, error) {
	body, err := w.get(n, u, "application/vnd.kubernetes.protobuf")
	if err != nil {
		return stream{}, err
	}
	s := stream{body, bufio.NewReader(body)}
	for kind := watch.Added; kind != watch.Bookmark; {
		if kind, _, err = s.next(); err != nil {
			body.Close()
			return stream{}, err
		}
	}
	return s, nil
}

// list asks for all objects at once, as client-go does of a server without streaming.
func (w *crowd) list(n *virtualNode, name string) error {
	for _, u := range watched(name) {
		u.RawQuery += "&resourceVersion=0"
		body, err := w.get(n, u, "application/vnd.kubernetes.protobuf")
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, body)
		if body.Close(); err != nil {
			return err
		}
	}
	return nil
}

func (w *crowd) get(n *virtualNode, u url.URL, accept string) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(w.ctx, http.MethodGet, w.server+u.String(), nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Accept", accept)
	response, err := n.http.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(response.Body)
		response.Body.Close()
		return nil, fmt.Errorf("%s: %s: %s", u.Path, response.Status, text)
	}
	return response.Body, nil
}

// listen counts the changes that come, until the watch ends.
func (w *crowd) listen(s stream) {
	for {
		_, sent, err := s.next()
		if err != nil {
			return
		}
		if !sent.IsZero() {
			w.tally.add(sent)
		}
	}
}

// listeners are the nodes whose watches go on.
func (w *crowd) listeners() int { return len(w.nodes) - int(w.ended.Load()) }

// stream are the events of a watch in protobuf, each after its length. An event's first field is its type.
type stream struct {
	body io.Closer
	*bufio.Reader
}

// next reads an event. That of a change by cluster.patch says when it was sent.
func (s stream) next() (kind watch.EventType, sent time.Time, err error) {
	const head = 1024 // which has the annotations
	prefix, err := s.Peek(4)
	if err != nil {
		return kind, sent, err
	}
	size := int(binary.BigEndian.Uint32(prefix))
	event, err := s.Peek(4 + min(size, head))
	if err != nil {
		return kind, sent, err
	}
	event = event[4:]
	if len(event) < 2 || len(event) < 2+int(event[1]) {
		return kind, sent, fmt.Errorf("%q is no event", event)
	}
	kind = watch.EventType(event[2 : 2+event[1]])
	if kind == watch.Modified {
		sent = triggered(event)
	}
	_, err = s.Discard(4 + size)
	return kind, sent, err
}

// triggered is the time in an annotation of an object in protobuf: key, tag, length, value.
func triggered(object []byte) (at time.Time) {
	_, value, ok := bytes.Cut(object, []byte(corev1.EndpointsLastChangeTriggerTime))
	if ok && len(value) > 2 && len(value) >= 2+int(value[1]) {
		at, _ = time.Parse(time.RFC3339Nano, string(value[2:2+value[1]]))
	}
	return at
}

// tally are the delays of changes until nodes have them, in the order of arrival.
type tally struct {
	mu      sync.Mutex
	delays  Series                // seconds
	last    map[time.Time]float64 // the longest of each change, by the time when it was sent
	missing int
	all     chan struct{} // closed when none is missing
}

// clear begins a new tally.
func (t *tally) clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.delays, t.last = nil, map[time.Time]float64{}
}

// expect returns what will be closed after so many arrivals.
func (t *tally) expect(n int) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.missing, t.all = n, make(chan struct{})
	return t.all
}

func (t *tally) add(sent time.Time) {
	delay := time.Since(sent).Seconds()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.delays = append(t.delays, delay)
	t.last[sent] = max(t.last[sent], delay)
	if t.missing--; t.missing == 0 {
		close(t.all)
	}
}

// figures are the delays of all, and the longest of each change.
func (t *tally) figures() (all, last Series) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range t.last {
		last = append(last, d)
	}
	return slices.Clone(t.delays), last
}
