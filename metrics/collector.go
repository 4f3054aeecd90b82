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

// collector makes the metrics that are collected at a scrape.
type collector struct {
	metrics.BaseStableCollector
	registry *registry
	options  Options
	stale    atomic.Bool // the rows changed since they were counted
	begun    sync.Once   // all rows have been in force once

	mu      sync.Mutex
	engine  Engine
	watches func() []engine.Watch
	counted *counts // nil: never

	build, mode, rows, noLocal                    *metrics.Desc
	healthy, eligible, partial, waiting, failures *metrics.Desc
	unfinished, undone                            *metrics.Desc
	watchAge, watchLists                          *metrics.Desc
	plane                                         plane
}

func newCollector(s *registry, o Options) *collector {
	c := &collector{
		registry: s, options: o,
		build:      s.scraped("fairlead_build_info"),
		mode:       s.scraped("fairlead_mode_info"),
		rows:       s.scraped("fairlead_rows"),
		noLocal:    s.scraped("kubeproxy_sync_proxy_rules_no_local_endpoints_total"),
		healthy:    s.scraped("fairlead_healthy"),
		eligible:   s.scraped("fairlead_node_eligible"),
		partial:    s.scraped("fairlead_partially_programmed"),
		waiting:    s.scraped("fairlead_oldest_pending_change_seconds"),
		unfinished: s.scraped("fairlead_audit_unfinished_seconds"),
		undone:     s.scraped("fairlead_repairs_undone_seconds"),
		failures:   s.scraped("fairlead_consecutive_programming_failures"),
		watchAge:   s.scraped("fairlead_watch_silence_seconds"),
	}
	c.watchLists = s.scrapedCounter("fairlead_watch_lists_total")
	c.plane = newPlane(s)
	c.stale.Store(true)
	s.kube.CustomMustRegister(c)
	return c
}

// DescribeWithStability implements metrics.StableCollector.
func (c *collector) DescribeWithStability(to chan<- *metrics.Desc) {
	for _, d := range c.registry.scrapes {
		to <- d
	}
}

// CollectWithStability implements metrics.StableCollector.
func (c *collector) CollectWithStability(all chan<- metrics.Metric) {
	to := series(all)
	to.gauge(c.build, 1, c.options.Version, runtime.Version())
	if c.options.Mode != nil {
		to.gauge(c.mode, 1, c.options.Mode())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.engine != nil {
		c.collectStatus(to)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		c.count(ctx)
		c.plane.collect(ctx, c.engine, to)
	}
	if c.counted != nil {
		c.counted.collect(c, to)
	}
	if c.watches != nil {
		for _, w := range c.watches() {
			to.gauge(c.watchAge, time.Since(w.LastMessage).Seconds(), w.Resource)
			to.counter(c.watchLists, uint64(w.Lists), w.Resource)
		}
	}
}

func (c *collector) collectStatus(to series) {
	s := c.engine.Status()
	to.gauge(c.healthy, truth(c.engine.Healthy()))
	to.gauge(c.eligible, truth(s.NodeEligible))
	to.gauge(c.partial, truth(s.Partial))
	to.gauge(c.waiting, lasting(s.WaitingSince))
	to.gauge(c.unfinished, lasting(s.AuditUnfinishedSince))
	if u := s.Undone; u != nil {
		to.gauge(c.undone, lasting(u.Since), u.Process)
	} else {
		to.gauge(c.undone, 0, "")
	}
	to.gauge(c.failures, float64(s.Failures))
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
