package metrics_test

import (
	"cmp"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// scrape asks as Prometheus does and returns the body.
func scrape(t testing.TB, h http.Handler) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatal(w.Code, w.Body)
	}
	return w.Body.String()
}

func parse(t *testing.T, text string) map[string]*dto.MetricFamily {
	t.Helper()
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// rows is a scrape as one sorted line for each series: its type, name, labels and value. A histogram has the number and
// sum of its observations, and the buckets that they fell into.
func rows(t *testing.T, text string) []string {
	t.Helper()
	var all []string
	for name, f := range parse(t, text) {
		for _, m := range f.GetMetric() {
			kind := strings.ToLower(f.GetType().String())
			all = append(all, fmt.Sprintf("%s %s%s %s\n", kind, name, labels(m), value(m)))
		}
	}
	slices.Sort(all)
	return all
}

// counted are the rows that are not zero.
func counted(t *testing.T, text string) string {
	t.Helper()
	return strings.Join(slices.DeleteFunc(rows(t, text), func(row string) bool {
		return strings.HasSuffix(row, " 0\n") || strings.Contains(row, "_info{")
	}), "")
}

func labels(m *dto.Metric) string {
	var all []string
	for _, l := range m.GetLabel() {
		all = append(all, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
	}
	return "{" + strings.Join(all, ",") + "}"
}

func value(m *dto.Metric) string {
	h := m.GetHistogram()
	if h == nil {
		return fmt.Sprint(cmp.Or(m.GetCounter().GetValue(), m.GetGauge().GetValue()))
	}
	if h.GetSampleCount() == 0 {
		return "0"
	}
	text := fmt.Sprintf("%d sum %.4g in", h.GetSampleCount(), h.GetSampleSum())
	before := uint64(0)
	for _, b := range h.GetBucket() {
		if n := b.GetCumulativeCount(); n > before {
			text += fmt.Sprintf(" ≤%g", b.GetUpperBound())
			before = n
		}
	}
	return text
}
