package metrics

import "k8s.io/component-base/metrics"

// Description is one metric, without its series.
type Description struct {
	Name, Type string
	Labels     []string
	Help       string
}

// registry makes metrics and lists them. All of them are ALPHA, as all of kube-proxy's are.
type registry struct {
	kube   metrics.KubeRegistry
	listed []Description

	scrapes []*metrics.Desc // of metrics whose values are found at a scrape
}

func (s *registry) note(kind string, d Description) {
	d.Type = kind
	s.listed = append(s.listed, d)
}

// histogram makes a metric and returns what gives its series by their labels' values.
func (s *registry) histogram(d Description, buckets []float64) func(...string) metrics.ObserverMetric {
	s.note("histogram", d)
	v := metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name: d.Name, Help: d.Help, Buckets: buckets, StabilityLevel: metrics.ALPHA,
	}, d.Labels)
	s.kube.MustRegister(v)
	return v.WithLabelValues
}

func (s *registry) counter(d Description) func(...string) metrics.CounterMetric {
	s.note("counter", d)
	v := metrics.NewCounterVec(&metrics.CounterOpts{
		Name: d.Name, Help: d.Help, StabilityLevel: metrics.ALPHA,
	}, d.Labels)
	s.kube.MustRegister(v)
	return v.WithLabelValues
}

func (s *registry) gauge(d Description) func(...string) metrics.GaugeMetric {
	s.note("gauge", d)
	v := metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name: d.Name, Help: d.Help, StabilityLevel: metrics.ALPHA,
	}, d.Labels)
	s.kube.MustRegister(v)
	return v.WithLabelValues
}

// scraped makes a gauge whose values are found at a scrape.
func (s *registry) scraped(d Description) *metrics.Desc { return s.describe("gauge", d) }

func (s *registry) scrapedCounter(d Description) *metrics.Desc { return s.describe("counter", d) }

func (s *registry) describe(kind string, d Description) *metrics.Desc {
	s.note(kind, d)
	s.scrapes = append(s.scrapes, metrics.NewDesc(d.Name, d.Help, d.Labels, nil, metrics.ALPHA, ""))
	return s.scrapes[len(s.scrapes)-1]
}

// series gets the values of a scrape.
type series chan<- metrics.Metric

func (s series) gauge(d *metrics.Desc, value float64, labels ...string) {
	s <- metrics.NewLazyConstMetric(d, metrics.GaugeValue, value, labels...)
}

func (s series) counter(d *metrics.Desc, value uint64, labels ...string) {
	s <- metrics.NewLazyConstMetric(d, metrics.CounterValue, float64(value), labels...)
}
