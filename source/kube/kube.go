// Package kube delivers the Services, EndpointSlices, ServiceCIDRs and the own Node of a Kubernetes cluster, and writes
// Events, Leases and a condition of pods to it. An object becomes compact as it arrives and is not kept, so that
// neither the first list nor a relist ever holds the whole objects. Objects stay until the API server changes or
// deletes them: no error of it, of the network or of an object makes anything vanish.
//
//	API server ══ watch, protobuf ══► stream ─► compact ─► Reflector ─► mirror ─► Batch ─► Next()
//	           ◄════ Events ═════ queue, one worker ◄─ Emit()     (what changed, coalesced by object)
//
// The mirror remembers what was last delivered – the reader's own values, not copies – to find what a
// relist changed. It compares values, not resource versions: those of a cluster whose etcd was
// restored from a backup count anew. A relist that says there are no objects any more is believed, as
// kube-proxy does, since a cluster without Services is legal; a warning says how many were removed.
package kube

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/util/flowcontrol"
)

// ClientOptions say how to reach the API server: the field clientConnection of a
// KubeProxyConfiguration, and --master. Without Kubeconfig and Master it is the one of the cluster in
// whose pod the process runs.
type ClientOptions struct {
	Kubeconfig         string  // path; empty: none
	Master             string  // URL; it replaces that of the kubeconfig; empty: not
	ContentType        string  // of requests; empty: protobuf
	AcceptContentTypes string  // of answers; empty: that of the requests
	QPS                float32 // requests a second; 0: 5, negative: without limit
	Burst              int     // 0: 10
	UserAgent          string  // empty: made of the program's name
	Log                *slog.Logger
}

// Client speaks to one API server. It may be used by several goroutines, and needs no closing.
type Client struct {
	server  string
	groups  map[schema.GroupVersion]rest.Interface // the groups of the API that are watched
	events  rest.Interface
	leases  rest.Interface
	pods    rest.Interface     // to write to them
	objects metadata.Interface // to find UIDs
	link    *link
	log     *slog.Logger
	timing  timing
	source  atomic.Pointer[Source] // the last one; nil: none
}

// timing is how long to wait for what.
type timing struct {
	silence  time.Duration // until a watch that says nothing is doubted; most send a bookmark a minute
	list     time.Duration // until a list is given up; servers give up after one minute by default
	settled  time.Duration // until a watch that has not ended counts as working
	absent   time.Duration // until an optional resource that is not offered is asked for again
	reminder time.Duration // until it is said again that something is waited for; doubles up to ten minutes
	backoff  time.Duration // before the first retry; doubles up to maxBackoff
	series   time.Duration // between two counts of a repeated Event
	spread   time.Duration // between what two nodes say of the same, on average, if all did
	flush    time.Duration // until Events that are left at the end are given up
}

// maxBackoff is between half and twice of what a retry waits for at most. It is much shorter than client-go's: a node
// that misses endpoints is worse than a few more refused connections. With 10 s, an API server's restart that took 8 s
// was followed by up to 26 s without news. That is nearly the 30 s for which pods may go on serving by default. A
// server that answers with an error gets longer waits: see restraint.
const maxBackoff = 3 * time.Second

func defaultTiming() timing {
	return timing{
		silence:  5 * time.Minute,
		list:     5 * time.Minute,
		settled:  time.Second,
		absent:   2 * time.Minute,
		reminder: 30 * time.Second,
		backoff:  500 * time.Millisecond,
		series:   time.Minute,
		spread:   100 * time.Millisecond,
		flush:    2 * time.Second,
	}
}

// Connect reads the configuration and prepares a client. It does not wait for the server: one that is
// away at start is asked again and again by what uses the client.
func Connect(o ClientOptions) (*Client, error) {
	config, err := restConfig(o)
	if err != nil {
		return nil, err
	}
	config.ContentType = cmp.Or(o.ContentType, runtime.ContentTypeProtobuf)
	config.AcceptContentTypes = o.AcceptContentTypes
	config.UserAgent = cmp.Or(o.UserAgent, rest.DefaultKubernetesUserAgent())
	config.QPS = cmp.Or(o.QPS, rest.DefaultQPS)
	config.Burst = cmp.Or(o.Burst, rest.DefaultBurst)
	// Servers compress streaming lists, too. Without that a node of 10,000 Services starts a quarter sooner, at
	// the cost of several times the bytes, and the server has less to do for each watch.
	config.DisableCompression = true
	config.Dial = dialer().DialContext
	readTokenWhenRefused(config)
	c := &Client{server: config.Host, log: o.Log, timing: defaultTiming()}
	if c.log == nil {
		c.log = slog.Default()
	}
	c.link = newLink(c)
	if err := c.prepare(config); err != nil {
		return nil, fmt.Errorf("API server %s: %w", config.Host, err)
	}
	return c, nil
}

// prepare makes the clients. They share connections. Events have a limit of their own, so that many
// of them do not delay what matters, and so have Leases and Pods.
func (c *Client) prepare(config *rest.Config) error {
	http, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	known, err := scheme()
	if err != nil {
		return err
	}
	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = serializer.NewCodecFactory(known).WithoutConversion()
	config.RateLimiter = limiter(config)
	c.groups = map[schema.GroupVersion]rest.Interface{}
	for _, k := range kinds("") {
		if c.groups[k.group], err = restClient(config, http, k.group); err != nil {
			return err
		}
	}
	config.RateLimiter = limiter(config)
	if c.events, err = restClient(config, http, eventsv1.SchemeGroupVersion); err != nil {
		return err
	}
	if c.objects, err = metadata.NewForConfigAndClient(config, http); err != nil {
		return err
	}
	config.RateLimiter = limiter(config)
	if c.leases, err = restClient(config, http, coordinationv1.SchemeGroupVersion); err != nil {
		return err
	}
	config.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(podWrites, podBurst)
	c.pods, err = restClient(config, http, corev1.SchemeGroupVersion)
	return err
}

func limiter(config *rest.Config) flowcontrol.RateLimiter {
	if config.QPS < 0 {
		return flowcontrol.NewFakeAlwaysRateLimiter()
	}
	return flowcontrol.NewTokenBucketRateLimiter(config.QPS, config.Burst)
}

// restConfig finds the server and the credentials as kube-proxy does.
func restConfig(o ClientOptions) (*rest.Config, error) {
	if o.Kubeconfig == "" && o.Master == "" {
		config, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("no API server: clientConnection.kubeconfig (--kubeconfig) and --master are " +
				"empty, and this is no pod with a service account (KUBERNETES_SERVICE_HOST is not set); set one of them")
		}
		if err != nil {
			return nil, fmt.Errorf("credentials of the pod's service account: %w", err)
		}
		return config, nil
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: o.Kubeconfig},
		&clientcmd.ConfigOverrides{ClusterInfo: api.Cluster{Server: o.Master}}).ClientConfig()
	switch {
	case err != nil && o.Kubeconfig != "":
		return nil, fmt.Errorf("clientConnection.kubeconfig %s: %w", o.Kubeconfig, err)
	case err != nil:
		return nil, fmt.Errorf("--master %s: %w", o.Master, err)
	}
	return config, nil
}

// dialer notices within half a minute that the other side has left without a word. HTTP/2 has pings
// of its own for that, HTTP/1 has not.
func dialer() *net.Dialer {
	return &net.Dialer{
		Timeout:         15 * time.Second,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
	}
}

// readTokenWhenRefused has a token file read again as soon as the token is refused, beside once a
// minute as client-go does otherwise.
func readTokenWhenRefused(config *rest.Config) {
	if config.BearerTokenFile == "" {
		return
	}
	tokens := transport.NewCachedFileTokenSource(config.BearerTokenFile)
	config.Wrap(transport.ResettableTokenSourceWrapTransport(tokens))
	config.BearerToken, config.BearerTokenFile = "", ""
}

// scheme knows the few kinds that are used here. The one of client-go's clientset knows all of
// Kubernetes, which costs a node some megabytes.
func scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	return s, errors.Join(corev1.AddToScheme(s), discoveryv1.AddToScheme(s), networkingv1.AddToScheme(s),
		eventsv1.AddToScheme(s), coordinationv1.AddToScheme(s))
}

// restClient speaks to one group of the API.
func restClient(config *rest.Config, http *http.Client, group schema.GroupVersion) (*rest.RESTClient, error) {
	config = rest.CopyConfig(config)
	config.GroupVersion = &group
	config.APIPath = "/apis"
	if group.Group == "" {
		config.APIPath = "/api"
	}
	return rest.RESTClientForConfigAndClient(config, http)
}
