package metrics

import (
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

// newOwn makes Fairlead's own metrics that are counted as things happen. The descriptions are the text of
// docs/metrics.md.
func newOwn(s *registry) own {
	o := own{
		arrived: s.histogram(fairlead("programming_duration_seconds",
			"Time from the arrival of changed objects until they are programmed."),
			metrics.ExponentialBuckets(0.0001, 2, 21))(),
		happened: by(s.histogram(fairlead("endpoint_programming_duration_seconds",
			"kubeproxy_network_programming_duration_seconds in finer buckets.", "ip_family"),
			metrics.ExponentialBuckets(0.001, 2, 17))),
		audits: s.histogram(fairlead("audit_duration_seconds",
			"Duration of an audit, which compares the kernel with the rows."),
			metrics.ExponentialBuckets(0.00001, 4, 12))(),
		start: s.gauge(fairlead("start_duration_seconds",
			"Time from the start of the process until all rules were programmed; 0: not yet."))(),
		stale: s.gauge(fairlead("configuration_refused",
			"1 if the configuration files are refused and the previous configuration stays active."))(),
		blocked: s.gauge(fairlead("forwarding_blocked",
			"1 if chain FORWARD drops packets that kube-proxy accepts in the configured mode."))(),
		drifts: s.counter(fairlead("drifts_total",
			"Differences that audits found in the kernel after external changes, by class of object.", "class")),
		orphans: s.counter(fairlead("orphans_reset_total",
			"Connections reset as their backend was gone and did not acknowledge anything (resetOrphans)."))(),
		rebalanced: s.counter(fairlead("rebalanced_connections_total",
			"Idle connections closed for balance (annotation rebalance)."))(),
		problems: s.counter(fairlead("problems_total",
			"Problems of objects, by kind and reason.", "kind", "reason")),
		listenFailures: s.counter(fairlead("health_check_listen_failures_total",
			"Failures to open a server of /healthz or a healthCheckNodePort, each counted once."))(),
		returned: s.counter(fairlead("kube_proxy_returns_total",
			"Times that kube-proxy's rules were found again after their removal."))(),
		closed: s.counter(fairlead("http_closed_connections_total",
			"Connections of HTTP clients that a limit closed, by listener and limit.", "listener", "reason")),
	}
	o.drained = s.counter(fairlead("drained_requests_total",
		"Answers to pods that wait until they are drained, by status: 200 drained, 503 not in time, 429 too many waited.",
		"code"))
	o.waiting = s.gauge(fairlead("drained_waiting", "Pods that wait until they are drained."))()
	for _, code := range []string{"200", "404", "429", "503"} {
		o.drained(code)
	}
	o.switches = s.counter(fairlead("plane_switches_total",
		"Attempts to change the data plane while the process runs.", "from", "to", "result"))
	o.switchLasted = s.histogram(fairlead("plane_switch_duration_seconds",
		"Duration of an attempt to change the data plane, until the new one is active or removed."),
		metrics.ExponentialBuckets(0.001, 2, 17))()
	repairs := s.counter(fairlead("repairs_total", "Attempts to repair external changes of the kernel.", "result"))
	o.repaired, o.failing = repairs("success"), repairs("failure")
	failures := s.counter(fairlead("programming_failures_total",
		"Failed attempts to program the kernel, by what is missing: some rows, or all changes since.", "extent"))
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

func fairlead(name, help string, labels ...string) Description {
	return Description{Name: "fairlead_" + name, Help: help, Labels: labels}
}

const namespaceKind, otherKind = "Namespace", "other"

func kinds() []string {
	return []string{"Service", "EndpointSlice", "Node", "ServiceCIDR", namespaceKind, otherKind}
}

// kindOf is the kind of a Problem's object. There are few, whatever manifests say.
func kindOf(object string) string {
	first, _, _ := strings.Cut(object, " ")
	for _, kind := range kinds() {
		if kind == first {
			return kind
		}
	}
	return otherKind
}
