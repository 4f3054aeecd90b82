package metrics

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"k8s.io/component-base/metrics"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/internal/defect"
)

// Metrics is both.
var (
	_ engine.Observer = (*Metrics)(nil)
	_ dataplane.Meter = (*Metrics)(nil)
)

// Round implements engine.Observer.
func (m *Metrics) Round(r engine.Round) {
	now := time.Now()
	m.pending(&r)
	m.programmed(&r, now)
	m.latencies(&r, now)
	m.audited(&r)
	for _, p := range r.Problems {
		m.own.problems(kindOf(p.Object), p.Cause.String()).Inc()
	}
	if n := len(r.Refused); n > 0 {
		m.own.listenFailures.Add(float64(n))
	}
}

// Arrived implements engine.Observer.
func (m *Metrics) Arrived(c engine.Changes) {
	m.proxy.services.Add(float64(c.Services))
	m.proxy.endpoints.Add(float64(c.Slices))
	m.proxy.servicesPending.Add(float64(c.Services))
	m.proxy.endpointsPending.Add(float64(c.Slices))
	set(m.proxy.queued, time.Now())
}

// pending counts what waits.
func (m *Metrics) pending(r *engine.Round) {
	m.proxy.servicesPending.Set(float64(r.Pending.Services))
	m.proxy.endpointsPending.Set(float64(r.Pending.Slices))
	if r.Verb != engine.Rested || len(r.Batch.Services)+len(r.Batch.Slices) > 0 {
		m.collector.stale.Store(true)
	}
}

// programmed measures programming.
func (m *Metrics) programmed(r *engine.Round, now time.Time) {
	if !r.Status.LastProgrammed.IsZero() {
		set(m.proxy.programmed, r.Status.LastProgrammed)
		m.collector.begun.Do(func() { m.own.start.Set(now.Sub(m.started).Seconds()) })
	}
	if r.Err != nil && !defect.Is(defect.MetricsFailures) {
		m.failed(r.Err)
	}
	took := r.Took.Seconds()
	switch r.Verb {
	case engine.Synced:
		observe(m.proxy.full, took)
	case engine.Applied:
		observe(m.proxy.partial, took)
	default:
		return
	}
	observe(m.proxy.sync, took)
}

func (m *Metrics) failed(err error) {
	for _, counter := range m.proxy.failures {
		counter.Inc()
	}
	if errors.Is(err, dataplane.ErrPartial) {
		m.own.refused.Inc()
		return
	}
	m.own.failed.Inc()
}

// latencies tells how late the changes are that are now in force. Clocks of two machines differ: what
// seems to happen in the future has just happened.
func (m *Metrics) latencies(r *engine.Round, now time.Time) {
	for _, at := range r.Arrived {
		m.own.arrived.Observe(now.Sub(at).Seconds())
	}
	for _, h := range r.Happened {
		late := max(0, now.Sub(h.At)).Seconds()
		m.proxy.network.of(h.V6).Observe(late)
		m.own.happened.of(h.V6).Observe(late)
	}
}

func (m *Metrics) audited(r *engine.Round) {
	m.own.orphans.Add(float64(r.Orphans))
	m.own.rebalanced.Add(float64(r.Rebalanced))
	if r.Audited > 0 {
		m.own.audits.Observe(r.Audited.Seconds())
	}
	if len(r.Drifts) == 0 {
		return
	}
	for i := range r.Drifts {
		m.own.drifts(r.Drifts[i].Class).Inc()
	}
	if dataplane.Known(r.Err) {
		m.own.repaired.Inc()
		return
	}
	m.own.failing.Inc()
}

func observe(f families[metrics.ObserverMetric], seconds float64) {
	f[0].Observe(seconds)
	f[1].Observe(seconds)
}

func set(f families[metrics.GaugeMetric], at time.Time) {
	seconds := float64(at.UnixNano()) / 1e9
	f[0].Set(seconds)
	f[1].Set(seconds)
}

// Answered implements engine.Observer.
func (m *Metrics) Answered(path string, status int) {
	switch path {
	case "/healthz":
		m.proxy.healthz.count(status)
	case "/livez":
		m.proxy.livez.count(status)
	}
}

// Drained counts the answers of a handler, and the requests that wait for one.
func (m *Metrics) Drained(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.own.waiting.Inc()
		defer m.own.waiting.Dec()
		a := &answer{w, http.StatusOK}
		h.ServeHTTP(a, r)
		m.own.drained(strconv.Itoa(a.status)).Inc()
	})
}

// answer notes the status.
type answer struct {
	http.ResponseWriter
	status int
}

func (a *answer) WriteHeader(status int) {
	a.status = status
	a.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// Switched counts an attempt to change the data plane. The result is success, failure or cancelled.
func (m *Metrics) Switched(from, to, result string, took time.Duration) {
	m.own.switches(from, to, result).Inc()
	m.own.switchLasted.Observe(took.Seconds())
}

// ConnectionClosed counts a connection that a limit of httpserve closed.
func (m *Metrics) ConnectionClosed(listener, reason string) { m.own.closed(listener, reason).Inc() }

// KubeProxyReturned counts a look that found kube-proxy's rules again.
func (m *Metrics) KubeProxyReturned() { m.own.returned.Inc() }

// Forgot implements dataplane.Meter.
func (m *Metrics) Forgot(v6 bool, flows int, took time.Duration) {
	m.proxy.forgetting.of(v6).Observe(took.Seconds())
	m.proxy.forgotten.of(v6).Add(float64(flows))
}

// Listening implements dataplane.Meter.
func (m *Metrics) Listening(v6 bool, more int) { m.proxy.listeners.of(v6).Add(float64(more)) }

// NotListening implements dataplane.Meter.
func (m *Metrics) NotListening(v6 bool) { m.proxy.notListening.of(v6).Inc() }
