package metrics

import (
	"net/http"

	"k8s.io/component-base/metrics"
)

// families are the series of one metric, IPv4's first. Both families are programmed together, so what
// two proxiers of kube-proxy would say one by one is said of both.
type families[M any] [2]M

// by makes a series for each family.
func by[M any](series func(...string) M) families[M] {
	return families[M]{series("IPv4"), series("IPv6")}
}

// of is the series of one family.
func (f families[M]) of(v6 bool) M {
	if v6 {
		return f[1]
	}
	return f[0]
}

// proxy are the metrics that kube-proxy has as well (pkg/proxy/metrics/metrics.go of Kubernetes 1.37).
type proxy struct {
	sync, full, partial families[metrics.ObserverMetric]
	network             families[metrics.ObserverMetric]
	queued, programmed  families[metrics.GaugeMetric]

	services, endpoints               metrics.CounterMetric
	servicesPending, endpointsPending metrics.GaugeMetric

	healthz, livez answers
	failures       families[metrics.CounterMetric]
	forgetting     families[metrics.ObserverMetric]
	forgotten      families[metrics.CounterMetric]
	listeners      families[metrics.GaugeMetric]
	notListening   families[metrics.CounterMetric]
}

// answers are the series of one health check.
type answers struct{ ok, unavailable metrics.CounterMetric }

func (a answers) count(status int) {
	if status == http.StatusOK {
		a.ok.Inc()
		return
	}
	a.unavailable.Inc()
}

func newProxy(s *registry) proxy {
	p := proxy{
		sync:         by(s.histogram("kubeproxy_sync_proxy_rules_duration_seconds", syncBuckets())),
		full:         by(s.histogram("kubeproxy_sync_full_proxy_rules_duration_seconds", syncBuckets())),
		partial:      by(s.histogram("kubeproxy_sync_partial_proxy_rules_duration_seconds", syncBuckets())),
		network:      by(s.histogram("kubeproxy_network_programming_duration_seconds", networkBuckets())),
		queued:       by(s.gauge("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds")),
		programmed:   by(s.gauge("kubeproxy_sync_proxy_rules_last_timestamp_seconds")),
		failures:     by(s.counter("kubeproxy_sync_proxy_rules_nftables_sync_failures_total")),
		forgetting:   by(s.histogram("kubeproxy_conntrack_reconciler_sync_duration_seconds", syncBuckets())),
		forgotten:    by(s.counter("kubeproxy_conntrack_reconciler_deleted_entries_total")),
		listeners:    by(s.gauge("kubeproxy_nftables_localhost_nodeport_listeners")),
		notListening: by(s.counter("kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total")),

		services:         s.counter("kubeproxy_sync_proxy_rules_service_changes_total")(),
		endpoints:        s.counter("kubeproxy_sync_proxy_rules_endpoint_changes_total")(),
		servicesPending:  s.gauge("kubeproxy_sync_proxy_rules_service_changes_pending")(),
		endpointsPending: s.gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending")(),
		healthz:          newAnswers(s.counter("kubeproxy_proxy_healthz_total")),
		livez:            newAnswers(s.counter("kubeproxy_proxy_livez_total")),
	}
	// There is no step of its own that could fail; dashboards ask for it all the same.
	by(s.counter("kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total"))
	return p
}

func newAnswers(code func(...string) metrics.CounterMetric) answers {
	return answers{code("200"), code("503")}
}

func syncBuckets() []float64 { return metrics.ExponentialBuckets(0.001, 2, 15) }

// networkBuckets are fine to a second, then to a minute, two minutes and five.
func networkBuckets() []float64 {
	return metrics.MergeBuckets(
		metrics.LinearBuckets(0.25, 0.25, 2),
		metrics.LinearBuckets(1, 1, 59),
		metrics.LinearBuckets(60, 5, 12),
		metrics.LinearBuckets(120, 30, 7),
	)
}
