// Package metrics counts and measures what Fairlead does, for Prometheus. Metrics that kube-proxy has, too, keep its
// names, types, labels and buckets, so that its dashboards and alerts work. The names of all others begin with
// fairlead_.
//
//	engine ── Round, Answered ──► Metrics ──► Handler ──► GET /metrics
//	planes ── Forgot, Listening ─►   │  ▲
//	engine ◄── rows? status? ────────┘  └── process, Go runtime, client-go
//
// Frequent events are counted as they happen, without allocation, since programming waits for that. States are
// collected at each scrape.
//
// The registry is a Metrics' own. Handler adds the registry that all Kubernetes libraries share. That one has facts of
// the whole process: its CPU time and memory, the Go runtime, and the requests of client-go, which has one global hook.
package metrics

//go:generate go run ./list ../docs/metrics.md

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // client-go tells legacyregistry of its requests

	"fairlead.dev/fairlead/engine"
)

// Options say what a Metrics shows of the process. Its functions may be called from several
// goroutines.
type Options struct {
	Version string        // of this build
	Mode    func() string // the data plane in force, as /proxyMode tells it; nil: unknown
	// ShowHiddenFor, if not empty, shows metrics that are hidden because they are deprecated
	// (--show-hidden-metrics-for-version). It holds for the whole process.
	ShowHiddenFor string
}

// Metrics implements engine.Observer and dataplane.Meter.
type Metrics struct {
	registry  registry
	started   time.Time
	proxy     proxy
	own       own
	collector *collector
}

// New makes a Metrics in which everything is zero.
func New(o Options) *Metrics {
	if o.ShowHiddenFor != "" {
		metrics.SetShowHidden()
	}
	m := &Metrics{registry: registry{kube: metrics.NewKubeRegistry(), known: descriptions()}, started: time.Now()}
	m.proxy = newProxy(&m.registry)
	m.own = newOwn(&m.registry)
	m.collector = newCollector(&m.registry, o)
	return m
}

// Follow says which engine to ask for its state, from now on.
func (m *Metrics) Follow(e Engine) {
	m.collector.mu.Lock()
	defer m.collector.mu.Unlock()
	m.collector.engine = e
	m.collector.stale.Store(true)
}

// Watching sets the function that reports the watches of the API server; nil: none.
func (m *Metrics) Watching(f func() []engine.Watch) {
	m.collector.mu.Lock()
	defer m.collector.mu.Unlock()
	m.collector.watches = f
}

// ConfigurationRefused says whether a configuration is in force that the files do not say any more.
func (m *Metrics) ConfigurationRefused(is bool) { m.own.stale.Set(truth(is)) }

// ServiceSeries sets how many ports of Services have series of their own.
func (m *Metrics) ServiceSeries(n int) {
	m.collector.mu.Lock()
	defer m.collector.mu.Unlock()
	m.collector.plane.top.limit = n
}

// ForwardingBlocked says whether FORWARD is closed to what kube-proxy would accept there.
func (m *Metrics) ForwardingBlocked(is bool) { m.own.blocked.Set(truth(is)) }

// Handler serves /metrics.
func (m *Metrics) Handler() http.Handler {
	return handler(prometheus.Gatherers{withOldNames{m.registry.kube}, legacyregistry.DefaultGatherer})
}

func handler(g metrics.Gatherer) http.Handler {
	return metrics.HandlerFor(g, metrics.HandlerOpts{ErrorHandling: metrics.ContinueOnError})
}

// List describes all of them but those of the whole process, sorted by name.
func (m *Metrics) List() []Description {
	all := slices.Clone(m.registry.listed)
	slices.SortFunc(all, func(a, b Description) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
