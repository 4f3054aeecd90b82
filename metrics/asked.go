package metrics

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/component-base/metrics"

	"fairlead.dev/fairlead/engine"
)

// Engine is what a scrape asks; *engine.Engine is one.
type Engine interface {
	Status() engine.Status
	Healthy() bool
	Do(ctx context.Context, f func(context.Context, engine.View) error) error
}

// patience is how long a scrape waits for an engine that is busy. After that it tells what it heard
// last: when an engine is stuck, its metrics are wanted most.
const patience = 500 * time.Millisecond

// asked are the metrics that are collected at a scrape.
type asked struct {
	metrics.BaseStableCollector
	options Options
	stale   atomic.Bool // the rows changed since they were counted
	begun   sync.Once   // all rows have been in force once

	mu      sync.Mutex
	engine  Engine
	watches func() []Watch
	counted *counts // nil: never

	build, mode, rows, noLocal                    *metrics.Desc
	healthy, eligible, partial, waiting, failures *metrics.Desc
	unfinished, undone                            *metrics.Desc
	watchAge, watchLists                          *metrics.Desc
	plane                                         plane
}

func newAsked(s *registry, o Options) *asked {
	a := &asked{
		options: o,
		build: s.asked(fairlead("build_info", "Version of this program; always 1.",
			"version", "go_version")),
		mode: s.asked(fairlead("mode_info", "The active data plane; always 1.", "mode")),
		rows: s.asked(fairlead("rows", "Rows, by kind.", "kind")),
		noLocal: s.asked(kubeproxy("sync_proxy_rules_no_local_endpoints_total",
			"Ports of Services with a traffic policy Local that have endpoints, but none on this node.",
			"traffic_policy", "ip_family")),
		healthy: s.asked(fairlead("healthy", "1 if /livez succeeds.")),
		eligible: s.asked(fairlead("node_eligible",
			"1 if load balancers may use this node; 0 if its Node is deleted, tainted or unknown. "+
				"/healthz returns 503 if this or fairlead_healthy is 0.")),
		partial: s.asked(fairlead("partially_programmed",
			"1 if the kernel refuses some rows and all others are programmed.")),
		waiting: s.asked(fairlead("oldest_pending_change_seconds",
			"Age of the oldest change that is not programmed; 0: none waits.")),
		unfinished: s.asked(fairlead("audit_unfinished_seconds",
			"Time for which audits have been too slow to finish; 0: they finish.")),
		undone: s.asked(fairlead("repairs_undone_seconds",
			"Time for which another program has undone each repair, by its name if the kernel reports it; 0: "+
				"repairs hold.", "author")),
		failures: s.asked(fairlead("consecutive_programming_failures",
			"Failed attempts to program the kernel since the last that succeeded.")),
		watchAge: s.asked(fairlead("watch_silence_seconds",
			"Time since the API server last sent anything on the watch of a resource, or was first asked.", "resource")),
	}
	a.watchLists = s.askedCounter(fairlead("watch_lists_total",
		"Times that all objects of a resource were fetched from the API server.", "resource"))
	a.plane = newPlane(s)
	a.stale.Store(true)
	s.kube.CustomMustRegister(a)
	return a
}

func (a *asked) follow(e Engine) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.engine = e
	a.stale.Store(true)
}

func (a *asked) watch(f func() []Watch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.watches = f
}

// DescribeWithStability implements metrics.StableCollector.
func (a *asked) DescribeWithStability(to chan<- *metrics.Desc) {
	for _, d := range []*metrics.Desc{
		a.build, a.mode, a.rows, a.noLocal,
		a.healthy, a.eligible, a.partial, a.waiting, a.failures, a.unfinished, a.undone,
		a.watchAge, a.watchLists,
	} {
		to <- d
	}
	a.plane.describe(to)
}

// CollectWithStability implements metrics.StableCollector.
func (a *asked) CollectWithStability(to chan<- metrics.Metric) {
	tell := func(d *metrics.Desc, value float64, labels ...string) {
		to <- metrics.NewLazyConstMetric(d, metrics.GaugeValue, value, labels...)
	}
	tell(a.build, 1, a.options.Version, runtime.Version())
	if a.options.Mode != nil {
		tell(a.mode, 1, a.options.Mode())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.engine != nil {
		a.tellStatus(tell)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		a.count(ctx)
		a.plane.tell(ctx, a.engine, to)
	}
	if a.counted != nil {
		a.counted.tell(a, tell)
	}
	if a.watches != nil {
		for _, w := range a.watches() {
			tell(a.watchAge, time.Since(w.Heard).Seconds(), w.Resource)
			to <- metrics.NewLazyConstMetric(a.watchLists, metrics.CounterValue, float64(w.Lists), w.Resource)
		}
	}
}

func (a *asked) tellStatus(tell func(*metrics.Desc, float64, ...string)) {
	s := a.engine.Status()
	tell(a.healthy, truth(a.engine.Healthy()))
	tell(a.eligible, truth(s.NodeEligible))
	tell(a.partial, truth(s.Partial))
	tell(a.waiting, lasting(s.WaitingSince))
	tell(a.unfinished, lasting(s.AuditUnfinishedSince))
	if u := s.Undone; u != nil {
		tell(a.undone, lasting(u.Since), u.Process)
	} else {
		tell(a.undone, 0, "")
	}
	tell(a.failures, float64(s.Failures))
}

// lasting is for how long something has lasted, in seconds; the zero time: it does not.
func lasting(since time.Time) float64 {
	if since.IsZero() {
		return 0
	}
	return time.Since(since).Seconds()
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
