package check

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	names "github.com/prometheus/common/model"
	"k8s.io/client-go/rest"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/model"
)

// following is an engine to which something of everything has happened.
type following struct{}

func (following) Status() engine.Status {
	return engine.Status{LastProgrammed: time.Now(), NodeEligible: true}
}
func (following) Healthy() bool { return true }

func (following) Do(ctx context.Context, f func(context.Context, engine.View) error) error {
	return f(ctx, engine.View{State: model.NewState(), Plane: counting{}})
}

// counting is a data plane that does nothing else.
type counting struct{ dataplane.Dataplane }

func (counting) Counters(context.Context) (dataplane.Counters, error) {
	return dataplane.Counters{
		Tables: []dataplane.Table{{Name: "connections", Capacity: 2, Used: 1, Counted: true}}, Dials: &dataplane.Dials{},
		Connections: true, Traffic: true,
	}, nil
}

// exporter serves what a node that runs for a while does: /metrics.
func exporter(t *testing.T) http.Handler {
	t.Helper()
	m := metrics.New(metrics.Options{Version: "v1", Mode: func() string { return "nftables" }})
	m.Watching(func() []engine.Watch {
		return []engine.Watch{{Resource: "services", LastMessage: time.Now(), Lists: 1}}
	})
	m.ServiceSeries(10)
	m.Follow(following{})
	m.Round(engine.Round{Drifts: []dataplane.Drift{{Class: "frontends"}}, Status: following{}.Status()})
	m.Switched("nftables", "ebpf", "success", time.Second)
	askAPIServer(t)
	return m.Handler()
}

// askAPIServer makes one request with client-go, which counts it.
func askAPIServer(t *testing.T) {
	t.Helper()
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	config := &rest.Config{Host: s.URL}
	config.ContentConfig.GroupVersion = &groupVersion
	config.ContentConfig.NegotiatedSerializer = codecs
	client, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Get().AbsPath("/").Do(t.Context()).Error(); err == nil {
		t.Fatal("there is nothing to find")
	}
}

// catalogue has the labels of each series that a scrape can have, by the series' name.
func catalogue(t *testing.T) map[string]map[string]bool {
	t.Helper()
	w := httptest.NewRecorder()
	exporter(t).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	parser := expfmt.NewTextParser(names.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(w.Body.String()))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]map[string]bool{"up": {"job": true, "instance": true}} // Prometheus adds it for each target
	for name, family := range families {
		if strings.HasPrefix(family.GetHelp(), "Deprecated:") {
			continue // neither alerts nor the dashboard may depend on it
		}
		labels := map[string]bool{"job": true, "instance": true} // Prometheus adds them
		for _, l := range family.GetMetric()[0].GetLabel() {
			labels[l.GetName()] = true
		}
		all[name] = labels
		if family.GetMetric()[0].GetHistogram() != nil {
			all[name+"_sum"], all[name+"_count"] = labels, labels
			withLe := map[string]bool{"le": true}
			for l := range labels {
				withLe[l] = true
			}
			all[name+"_bucket"] = withLe
		}
	}
	return all
}
