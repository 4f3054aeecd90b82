package metrics

import (
	"slices"
	"strings"

	"k8s.io/component-base/metrics"

	"fairlead.dev/fairlead/httpserve"
	"fairlead.dev/fairlead/service"
)

// own are the metrics that only Fairlead has and that are counted as things happen.
type own struct {
	arrived  metrics.ObserverMetric
	happened families[metrics.ObserverMetric]
	audits   metrics.ObserverMetric
	start    metrics.GaugeMetric
	stale    metrics.GaugeMetric // whether the configuration in the files was refused
	blocked  metrics.GaugeMetric // whether FORWARD is closed

	drifts                   func(...string) metrics.CounterMetric
	repaired, failing        metrics.CounterMetric
	orphans, rebalanced      metrics.CounterMetric
	refused, failed          metrics.CounterMetric
	problems                 func(...string) metrics.CounterMetric
	listenFailures, returned metrics.CounterMetric
	closed                   func(...string) metrics.CounterMetric

	switches     func(...string) metrics.CounterMetric
	switchLasted metrics.ObserverMetric

	drained func(...string) metrics.CounterMetric
	waiting metrics.GaugeMetric // for that
}

func newOwn(s *registry) own {
	milliseconds := metrics.ExponentialBuckets(0.001, 2, 17)
	o := own{
		arrived:        s.histogram("fairlead_programming_duration_seconds", metrics.ExponentialBuckets(0.0001, 2, 21))(),
		happened:       by(s.histogram("fairlead_endpoint_programming_duration_seconds", milliseconds)),
		audits:         s.histogram("fairlead_audit_duration_seconds", metrics.ExponentialBuckets(0.00001, 4, 12))(),
		start:          s.gauge("fairlead_start_duration_seconds")(),
		stale:          s.gauge("fairlead_configuration_refused")(),
		blocked:        s.gauge("fairlead_forwarding_blocked")(),
		drifts:         s.counter("fairlead_drifts_total"),
		orphans:        s.counter("fairlead_orphans_reset_total")(),
		rebalanced:     s.counter("fairlead_rebalanced_connections_total")(),
		problems:       s.counter("fairlead_problems_total"),
		listenFailures: s.counter("fairlead_health_check_listen_failures_total")(),
		returned:       s.counter("fairlead_kube_proxy_returns_total")(),
		closed:         s.counter("fairlead_http_closed_connections_total"),
	}
	o.drained = s.counter("fairlead_drained_requests_total")
	o.waiting = s.gauge("fairlead_drained_waiting")()
	for _, code := range []string{"200", "404", "429", "503"} {
		o.drained(code)
	}
	o.switches = s.counter("fairlead_plane_switches_total")
	o.switchLasted = s.histogram("fairlead_plane_switch_duration_seconds", milliseconds)()
	repairs := s.counter("fairlead_repairs_total")
	o.repaired, o.failing = repairs("success"), repairs("failure")
	failures := s.counter("fairlead_programming_failures_total")
	o.refused, o.failed = failures("rows"), failures("everything")
	for _, kind := range kinds() {
		if kind != namespaceKind {
			o.problems(kind, service.Invalid.String())
		}
	}
	o.problems(namespaceKind, service.Share.String())
	for _, cause := range service.Causes() {
		o.problems("Service", cause.String())
	}
	for _, listener := range httpserve.Listeners() {
		for _, reason := range httpserve.Reasons() {
			o.closed(listener, reason)
		}
	}
	return o
}

const namespaceKind, otherKind = "Namespace", "other"

func kinds() []string {
	return []string{"Service", "EndpointSlice", "Node", "ServiceCIDR", namespaceKind, otherKind}
}

// kindOf is the kind of a Problem's object. There are few, whatever manifests say.
func kindOf(object string) string {
	if kind, _, _ := strings.Cut(object, " "); slices.Contains(kinds(), kind) {
		return kind
	}
	return otherKind
}
