package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"

	"golang.org/x/sync/errgroup"
)

// Object is one that Store can keep.
type Object interface {
	runtime.Object
	metav1.Object
}

// Store writes objects straight into etcd, in the encoding of the API server: nothing checks or
// completes them. That is how objects come about which no API server would accept today, and the fast
// way to have many. Services, EndpointSlices, Nodes, Namespaces and ServiceCIDRs can be stored. They are
// changed: they get what every stored object has.
func (c *ControlPlane) Store(ctx context.Context, objects ...Object) error {
	const atOnce = 16
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, o := range objects {
		group.Go(func() error {
			key, err := StorageKey(o)
			if err != nil {
				return err
			}
			data, err := storageBytes(o)
			if err != nil {
				return fmt.Errorf("encode %s: %w", key, err)
			}
			return c.StoreRaw(ctx, key, data)
		})
	}
	return group.Wait()
}

// StoreRaw writes any bytes below a key of etcd, see StorageKey. The API server decodes JSON as well as its own
// encoding. Bytes that it cannot decode stop it from listing the resource at all.
func (c *ControlPlane) StoreRaw(ctx context.Context, key string, data []byte) error {
	return c.store.call(ctx, "kv/put", map[string]any{"key": []byte(key), "value": data})
}

// Unstore deletes an object from etcd, as if it had never been.
func (c *ControlPlane) Unstore(ctx context.Context, key string) error {
	return c.store.call(ctx, "kv/deleterange", map[string]any{"key": []byte(key)})
}

// CompactStore makes etcd forget all history, so that watches from earlier revisions have expired.
func (c *ControlPlane) CompactStore(ctx context.Context) error {
	if err := c.store.healthy(ctx); err != nil { // tells the revision
		return err
	}
	return c.store.call(ctx, "kv/compaction", map[string]any{"revision": c.store.revision.Load(), "physical": true})
}

// StorageKey is where the API server keeps an object.
func StorageKey(o Object) (string, error) {
	switch o.(type) {
	case *corev1.Service:
		return "/registry/services/specs/" + o.GetNamespace() + "/" + o.GetName(), nil
	case *discoveryv1.EndpointSlice:
		return "/registry/endpointslices/" + o.GetNamespace() + "/" + o.GetName(), nil
	case *corev1.Node:
		return "/registry/minions/" + o.GetName(), nil
	case *corev1.Namespace:
		return "/registry/namespaces/" + o.GetName(), nil
	case *networkingv1.ServiceCIDR:
		return "/registry/servicecidrs/" + o.GetName(), nil
	}
	return "", fmt.Errorf("where the API server keeps a %T is not known here", o)
}

func storageBytes(o Object) ([]byte, error) {
	if o.GetUID() == "" {
		o.SetUID(uuid.NewUUID())
	}
	if created := o.GetCreationTimestamp(); created.IsZero() {
		o.SetCreationTimestamp(metav1.Now())
	}
	o.SetResourceVersion("") // etcd's business
	if err := setKind(o); err != nil {
		return nil, err
	}
	return encode(o)
}

// etcdClient speaks the JSON form of etcd's protocol.
type etcdClient struct {
	http     *http.Client
	revision atomic.Int64 // the last that an answer told
}

func newEtcdClient(socket string) *etcdClient {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	return &etcdClient{http: &http.Client{Transport: &http.Transport{DialContext: dial, MaxIdleConnsPerHost: 16}}}
}

func (e *etcdClient) healthy(ctx context.Context) error {
	return e.call(ctx, "kv/range", map[string]any{"key": []byte("health")})
}

func (e *etcdClient) call(ctx context.Context, path string, request map[string]any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://etcd/v3/"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := e.http.Do(post)
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd: %s: %s: %s", path, response.Status, answer)
	}
	var told struct {
		Header struct {
			Revision int64 `json:",string"`
		}
	}
	if err := json.Unmarshal(answer, &told); err != nil {
		return fmt.Errorf("etcd: %s: %w", path, err)
	}
	e.revision.Store(told.Header.Revision)
	return nil
}
