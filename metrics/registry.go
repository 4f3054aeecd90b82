package metrics

import (
	_ "embed"
	"strings"

	"k8s.io/component-base/metrics"
)

// table has the metrics, each with its labels, and what it means.
//
//go:embed metrics.txt
var table string

// descriptions reads the table. It has no types: these show where metrics are made.
func descriptions() map[string]Description {
	all := map[string]Description{}
	var d Description
	for line := range strings.Lines(table) {
		words := strings.Fields(line)
		if line[0] == ' ' {
			d.Help = strings.Join(append(strings.Fields(d.Help), words...), " ")
		} else {
			d = Description{Name: words[0], Labels: words[1:]}
		}
		all[d.Name] = d
	}
	return all
}

// Description is one metric, without its series.
type Description struct {
	Name, Type string
	Labels     []string
	Help       string
}

// registry makes metrics and lists them. All of them are ALPHA, as all of kube-proxy's are.
type registry struct {
	kube   metrics.KubeRegistry
	known  map[string]Description
	listed []Description

	scrapes []*metrics.Desc // of metrics whose values are found at a scrape
}

func (s *registry) note(kind, name string) Description {
	d := s.known[name]
	d.Type = kind
	s.listed = append(s.listed, d)
	return d
}

// histogram makes a metric and returns what gives its series by their labels' values.
func (s *registry) histogram(name string, buckets []float64) func(...string) metrics.ObserverMetric {
	d := s.note("histogram", name)
	v := metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name: d.Name, Help: d.Help, Buckets: buckets, StabilityLevel: metrics.ALPHA,
	}, d.Labels)
	s.kube.MustRegister(v)
	return v.WithLabelValues
}

func (s *registry) counter(name string) func(...string) metrics.CounterMetric {
	d := s.note("counter", name)
	v := metrics.NewCounterVec(&metrics.CounterOpts{
		Name: d.Name, Help: d.Help, StabilityLevel: metrics.ALPHA,
	}, d.Labels)
	s.kube.MustRegister(v)
	return v.WithLabelValues
}

func (s *registry) gauge(name string) func(...string) metrics.GaugeMetric {
	d := s.note("gauge", name)
	v := metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name: d.Name, Help: d.Help, StabilityLevel: metrics.ALPHA,
	}, d.Labels)
	s.kube.MustRegister(v)
	return v.WithLabelValues
}

// scraped makes a gauge whose values are found at a scrape.
func (s *registry) scraped(name string) *metrics.Desc { return s.describe("gauge", name) }

func (s *registry) scrapedCounter(name string) *metrics.Desc { return s.describe("counter", name) }

func (s *registry) describe(kind, name string) *metrics.Desc {
	d := s.note(kind, name)
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
