package metrics

import (
	"net/http"

	"k8s.io/component-base/metrics"
)

// families are the series of one metric, IPv4's first. Both families are programmed together, so what
// two proxiers of kube-proxy would say one by one is said of both.
type families[M any] [2]M

// by makes a series for each family.
func by[M any](series func(...string) M, before ...string) families[M] {
	values := append(before[:len(before):len(before)], "")
	f := families[M]{}
	for i, name := range [...]string{"IPv4", "IPv6"} {
		values[len(before)] = name
		f[i] = series(values...)
	}
	return f
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
		sync: by(s.histogram(perFamily("sync_proxy_rules_duration_seconds",
			"Duration of programming all rules, or a change of them."), syncBuckets())),
		full: by(s.histogram(perFamily("sync_full_proxy_rules_duration_seconds",
			"Duration of programming all rules."), syncBuckets())),
		partial: by(s.histogram(perFamily("sync_partial_proxy_rules_duration_seconds",
			"Duration of programming a change of the rules."), syncBuckets())),
		network: by(s.histogram(perFamily("network_programming_duration_seconds",
			"Time from a change of an EndpointSlice, as the endpoint controller dates it, until it is "+
				"programmed."),
			networkBuckets())),
		queued: by(s.gauge(perFamily("sync_proxy_rules_last_queued_timestamp_seconds",
			"Time of the last change that had to be programmed."))),
		programmed: by(s.gauge(perFamily("sync_proxy_rules_last_timestamp_seconds",
			"Time when the kernel was last known to hold all rules."))),
		failures: by(s.counter(perFamily("sync_proxy_rules_nftables_sync_failures_total",
			"Failures to program the kernel."))),
		forgetting: by(s.histogram(perFamily("conntrack_reconciler_sync_duration_seconds",
			"Duration of a search for stale UDP flows in the connection tracker."), syncBuckets())),
		forgotten: by(s.counter(perFamily("conntrack_reconciler_deleted_entries_total",
			"Stale UDP flows that were deleted from the connection tracker."))),
		listeners: by(s.gauge(perFamily("nftables_localhost_nodeport_listeners",
			"Sockets that serve NodePorts on the loopback address."))),
		notListening: by(s.counter(perFamily("nftables_localhost_nodeport_listener_creation_failures_total",
			"Failures to open a socket that serves NodePorts on the loopback address."))),
	}
	// There is no step of its own that could fail; dashboards ask for it all the same.
	by(s.counter(perFamily("sync_proxy_rules_nftables_cleanup_failures_total",
		"Failures to delete stale chains: always 0, since each sync deletes them.")))
	p.addChanges(s)
	p.addHealth(s)
	return p
}

func (p *proxy) addChanges(s *registry) {
	p.services = s.counter(kubeproxy("sync_proxy_rules_service_changes_total", "Changes of Services."))()
	p.endpoints = s.counter(kubeproxy("sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices."))()
	p.servicesPending = s.gauge(kubeproxy("sync_proxy_rules_service_changes_pending",
		"Changes of Services that are not programmed."))()
	p.endpointsPending = s.gauge(kubeproxy("sync_proxy_rules_endpoint_changes_pending",
		"Changes of EndpointSlices that are not programmed."))()
}

func (p *proxy) addHealth(s *registry) {
	of := func(path string) answers {
		codes := s.counter(kubeproxy("proxy_"+path+"_total", "Answers on /"+path+", by HTTP status.", "code"))
		return answers{codes("200"), codes("503")}
	}
	p.healthz, p.livez = of("healthz"), of("livez")
}

func kubeproxy(name, help string, labels ...string) Description {
	return Description{Name: "kubeproxy_" + name, Help: help, Labels: labels}
}

func perFamily(name, help string) Description { return kubeproxy(name, help, "ip_family") }

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
