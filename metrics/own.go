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

	drifts            func(...string) metrics.CounterMetric
	repaired, failing metrics.CounterMetric
	refused, failed   metrics.CounterMetric
	problems          func(...string) metrics.CounterMetric
	deaf, returned    metrics.CounterMetric
	cutOff            func(...string) metrics.CounterMetric

	switches     func(...string) metrics.CounterMetric
	switchLasted metrics.ObserverMetric
}

func newOwn(s *shelf) own {
	o := own{
		arrived: s.histogram(fairlead("programming_duration_seconds",
			"From the arrival of changed objects until what they mean is in force."),
			metrics.ExponentialBuckets(0.0001, 2, 21))(),
		happened: by(s.histogram(fairlead("endpoint_programming_duration_seconds",
			"kubeproxy_network_programming_duration_seconds in finer buckets.", "ip_family"),
			metrics.ExponentialBuckets(0.001, 2, 17))),
		audits: s.histogram(fairlead("audit_duration_seconds",
			"How long it took to compare the kernel with what it shall hold."),
			metrics.ExponentialBuckets(0.00001, 4, 12))(),
		start: s.gauge(fairlead("start_duration_seconds",
			"From the start of the process until all rules were in force; 0: they are not yet."))(),
		stale: s.gauge(fairlead("configuration_refused",
			"Whether the files of the configuration say what is not accepted, so that the one before stays in force."))(),
		blocked: s.gauge(fairlead("forwarding_blocked",
			"Whether chain FORWARD drops what kube-proxy would accept in the configured mode and other rules do not."))(),
		drifts: s.counter(fairlead("drifts_total",
			"Differences that audits found in the kernel because somebody else changed it, by class of object.", "class")),
		problems: s.counter(fairlead("problems_total",
			"What was found to be wrong with objects, by their kind and why.", "kind", "reason")),
		deaf: s.counter(fairlead("health_check_listen_failures_total",
			"Servers of /healthz or a healthCheckNodePort that could not be opened, each counted once."))(),
		returned: s.counter(fairlead("kube_proxy_returns_total",
			"Looks that found rules which kube-proxy had made since its rules were removed."))(),
		cutOff: s.counter(fairlead("http_closed_connections_total",
			"Connections of HTTP clients that a limit closed, by listener and limit.", "listener", "reason")),
	}
	o.switches = s.counter(fairlead("plane_switches_total",
		"Attempts to change the data plane while the process runs.", "from", "to", "result"))
	o.switchLasted = s.histogram(fairlead("plane_switch_duration_seconds",
		"From the beginning of such an attempt until the new data plane was in force, or nothing was left of it."),
		metrics.ExponentialBuckets(0.001, 2, 17))()
	repairs := s.counter(fairlead("repairs_total", "Attempts to undo what somebody else did to the kernel.", "result"))
	o.repaired, o.failing = repairs("success"), repairs("failure")
	failures := s.counter(fairlead("programming_failures_total",
		"Failed attempts to program the kernel, by what is not in force: some rows, or all changes since.", "extent"))
	o.refused, o.failed = failures("rows"), failures("everything")
	for _, kind := range kinds() {
		o.problems(kind, service.Invalid.String())
	}
	for _, cause := range service.Causes() {
		o.problems("Service", cause.String())
	}
	for _, listener := range httpserve.Listeners() {
		for _, reason := range httpserve.Reasons() {
			o.cutOff(listener, reason)
		}
	}
	return o
}

func fairlead(name, help string, labels ...string) Description {
	return Description{Name: "fairlead_" + name, Help: help, Labels: labels}
}

const otherKind = "other"

func kinds() []string {
	return []string{"Service", "EndpointSlice", "Node", "ServiceCIDR", otherKind}
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
