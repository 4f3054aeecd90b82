package metrics

import (
	"slices"

	dto "github.com/prometheus/client_model/go"
	"k8s.io/component-base/metrics"

	"fairlead.dev/fairlead/internal/renamed"
)

// withOldNames adds the series of renamed metrics under the names of the release before, so that its dashboards and
// alerts work.
type withOldNames struct{ metrics.Gatherer }

// Gather implements metrics.Gatherer.
func (g withOldNames) Gather() ([]*dto.MetricFamily, error) {
	families, err := g.Gatherer.Gather()
	for _, n := range renamed.Of(renamed.Metric) {
		i := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == n.New })
		if i >= 0 {
			families = append(families, underOldName(families[i], n))
		}
	}
	return families, err
}

// underOldName copies what differs, and shares the values.
func underOldName(f *dto.MetricFamily, n renamed.Name) *dto.MetricFamily {
	help := new("Deprecated: use " + n.New + ".")
	old := &dto.MetricFamily{Name: &n.Old, Help: help, Type: f.Type, Metric: f.GetMetric()}
	if n.OldLabel == "" {
		return old
	}
	old.Metric = nil
	for _, m := range f.GetMetric() {
		series := &dto.Metric{Gauge: m.GetGauge(), Counter: m.GetCounter(), Histogram: m.GetHistogram()}
		for _, l := range m.GetLabel() {
			if l.GetName() == n.NewLabel {
				l = &dto.LabelPair{Name: &n.OldLabel, Value: l.Value}
			}
			series.Label = append(series.Label, l)
		}
		old.Metric = append(old.Metric, series)
	}
	return old
}
