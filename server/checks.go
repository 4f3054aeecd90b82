package server

import (
	"fmt"
	"net/http"

	"k8s.io/component-base/metrics"
)

// checks answers /healthz, of which ping is all, and counts its answers for /metrics/slis as every
// component of Kubernetes does (KEP-3466).
type checks struct {
	registry metrics.KubeRegistry
	last     *metrics.GaugeVec
	total    *metrics.CounterVec
}

func newChecks() *checks {
	c := &checks{
		registry: metrics.NewKubeRegistry(),
		last: metrics.NewGaugeVec(&metrics.GaugeOpts{
			Name: "kubernetes_healthcheck", StabilityLevel: metrics.STABLE,
			Help: "What one health check last said: 1 if all was well.",
		}, []string{"name", "type"}),
		total: metrics.NewCounterVec(&metrics.CounterOpts{
			Name: "kubernetes_healthchecks_total", StabilityLevel: metrics.STABLE,
			Help: "What one health check said, and how often.",
		}, []string{"name", "type", "status"}),
	}
	c.registry.MustRegister(c.last, c.total)
	return c
}

func (c *checks) handler() http.Handler {
	return metrics.HandlerWithReset(c.registry, metrics.HandlerOpts{})
}

func (c *checks) healthz(w http.ResponseWriter, r *http.Request) {
	c.last.WithLabelValues("ping", "healthz").Set(1)
	c.total.WithLabelValues("ping", "healthz", "success").Inc()
	header(w, "text/plain; charset=utf-8")
	if _, verbose := r.URL.Query()["verbose"]; verbose {
		fmt.Fprint(w, "[+]ping ok\nhealthz check passed\n")
		return
	}
	fmt.Fprint(w, "ok")
}
