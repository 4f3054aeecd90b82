package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/service"
)

// inBubble runs a test with a clock that begins in the year 2000 and stands still while anything runs.
func inBubble(t *testing.T, test func(t *testing.T)) {
	t.Parallel()
	synctest.Test(t, test)
}

// was is a status after all has been programmed.
func was(at time.Time) engine.Status { return engine.Status{LastProgrammed: at, NodeEligible: true} }

func expect(t *testing.T, m *metrics.Metrics, want string) {
	t.Helper()
	if have := counted(t, scrape(t, m.Own())); have != want {
		t.Errorf("have:\n%swant:\n%s", have, want)
	}
}

func TestRounds(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{})
		bubble.Pass(2 * time.Second)
		now := time.Now()
		m.Arrived(engine.Changes{Services: 2, Slices: 3})
		m.Round(engine.Round{
			Verb: engine.Synced, Took: 40 * time.Millisecond, Status: was(now),
			Arrived: []time.Time{now.Add(-50 * time.Millisecond)},
		})
		bubble.Pass(time.Second)
		m.Arrived(engine.Changes{Services: 0, Slices: 2})
		m.Round(engine.Round{ // a second later, one slice of each family and a problem
			Verb: engine.Applied, Took: 3 * time.Millisecond, Status: was(time.Now()),
			Problems: []service.Problem{
				{Object: "Service default/web"}, {Object: "Service a/b", Cause: service.Share}, {Object: "/etc/x.yaml"},
			},
			Happened: []engine.Happening{{At: time.Now().Add(-400 * time.Millisecond)}, {At: time.Now().Add(-3 * time.Second), V6: true}},
			Arrived:  []time.Time{time.Now().Add(-4 * time.Millisecond), time.Now().Add(-5 * time.Millisecond)},
		})
		bubble.Pass(time.Second)
		m.Round(engine.Round{Audited: 20 * time.Microsecond, Orphans: 2, Rebalanced: 3, Status: was(time.Now())})
		expect(t, m, `counter fairlead_orphans_reset_total{} 2
counter fairlead_problems_total{kind="Service",reason="invalid"} 1
counter fairlead_problems_total{kind="Service",reason="share"} 1
counter fairlead_problems_total{kind="other",reason="invalid"} 1
counter fairlead_rebalanced_connections_total{} 3
counter kubeproxy_sync_proxy_rules_endpoint_changes_total{} 5
counter kubeproxy_sync_proxy_rules_service_changes_total{} 2
gauge fairlead_start_duration_seconds{} 2
gauge kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 9.46684803e+08
gauge kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv6"} 9.46684803e+08
gauge kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 9.46684804e+08
gauge kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} 9.46684804e+08
histogram fairlead_audit_duration_seconds{} 1 sum 2e-05 in ≤4e-05
histogram fairlead_endpoint_programming_duration_seconds{ip_family="IPv4"} 1 sum 0.4 in ≤0.512
histogram fairlead_endpoint_programming_duration_seconds{ip_family="IPv6"} 1 sum 3 in ≤4.096
histogram fairlead_programming_duration_seconds{} 3 sum 0.059 in ≤0.0064 ≤0.0512
histogram kubeproxy_network_programming_duration_seconds{ip_family="IPv4"} 1 sum 0.4 in ≤0.5
histogram kubeproxy_network_programming_duration_seconds{ip_family="IPv6"} 1 sum 3 in ≤3
histogram kubeproxy_sync_full_proxy_rules_duration_seconds{ip_family="IPv4"} 1 sum 0.04 in ≤0.064
histogram kubeproxy_sync_full_proxy_rules_duration_seconds{ip_family="IPv6"} 1 sum 0.04 in ≤0.064
histogram kubeproxy_sync_partial_proxy_rules_duration_seconds{ip_family="IPv4"} 1 sum 0.003 in ≤0.004
histogram kubeproxy_sync_partial_proxy_rules_duration_seconds{ip_family="IPv6"} 1 sum 0.003 in ≤0.004
histogram kubeproxy_sync_proxy_rules_duration_seconds{ip_family="IPv4"} 2 sum 0.043 in ≤0.004 ≤0.064
histogram kubeproxy_sync_proxy_rules_duration_seconds{ip_family="IPv6"} 2 sum 0.043 in ≤0.004 ≤0.064
`)
	})
}

// TestFailures: the kernel refuses everything, then nothing but some rows, and a stranger meddles.
func TestFailures(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{})
		waiting := engine.Status{WaitingSince: time.Now(), Failures: 1}
		m.Arrived(engine.Changes{Services: 2, Slices: 1})
		m.Round(engine.Round{Pending: engine.Changes{Services: 2, Slices: 1}, Verb: engine.Synced, Took: time.Millisecond, Err: errors.New("broken"), Status: waiting})
		m.Arrived(engine.Changes{Services: 3})
		m.Round(engine.Round{Pending: engine.Changes{Services: 5, Slices: 1}, Status: waiting}) // the retry is not due
		expect(t, m, `counter fairlead_programming_failures_total{extent="everything"} 1
counter kubeproxy_sync_proxy_rules_endpoint_changes_total{} 1
counter kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"} 1
counter kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv6"} 1
counter kubeproxy_sync_proxy_rules_service_changes_total{} 5
gauge kubeproxy_sync_proxy_rules_endpoint_changes_pending{} 1
gauge kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 9.466848e+08
gauge kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv6"} 9.466848e+08
gauge kubeproxy_sync_proxy_rules_service_changes_pending{} 5
histogram kubeproxy_sync_full_proxy_rules_duration_seconds{ip_family="IPv4"} 1 sum 0.001 in ≤0.001
histogram kubeproxy_sync_full_proxy_rules_duration_seconds{ip_family="IPv6"} 1 sum 0.001 in ≤0.001
histogram kubeproxy_sync_proxy_rules_duration_seconds{ip_family="IPv4"} 1 sum 0.001 in ≤0.001
histogram kubeproxy_sync_proxy_rules_duration_seconds{ip_family="IPv6"} 1 sum 0.001 in ≤0.001
`)

		m = metrics.New(metrics.Options{})
		drifts := []dataplane.Drift{{Class: "frontends"}, {Class: "slots"}, {Class: "frontends"}}
		partial := engine.Status{LastProgrammed: time.Now(), Failures: 1}
		m.Round(engine.Round{Drifts: drifts, Err: fmt.Errorf("%w: x", dataplane.ErrPartial), Status: partial})
		m.Round(engine.Round{Drifts: drifts[:1], Err: errors.New("broken"), Status: waiting})
		m.Round(engine.Round{Refused: make([]engine.Refusal, 2), Status: partial})
		expect(t, m, `counter fairlead_drifts_total{class="frontends"} 3
counter fairlead_drifts_total{class="slots"} 1
counter fairlead_health_check_listen_failures_total{} 2
counter fairlead_programming_failures_total{extent="everything"} 1
counter fairlead_programming_failures_total{extent="rows"} 1
counter fairlead_repairs_total{result="failure"} 1
counter fairlead_repairs_total{result="success"} 1
counter kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"} 2
counter kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv6"} 2
gauge kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 9.466848e+08
gauge kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} 9.466848e+08
`)
	})
}

func TestMeterAndAnswers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{})
		m.Forgot(false, 3, 2*time.Millisecond)
		m.Forgot(true, 0, time.Millisecond)
		m.Listening(true, 7)
		m.Listening(true, -3)
		m.NotListening(true)
		for _, status := range []int{200, 503, 503} {
			m.Answered("/healthz", status)
		}
		m.Answered("/livez", 200)
		expect(t, m, `counter kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"} 3
counter kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total{ip_family="IPv6"} 1
counter kubeproxy_proxy_healthz_total{code="200"} 1
counter kubeproxy_proxy_healthz_total{code="503"} 2
counter kubeproxy_proxy_livez_total{code="200"} 1
gauge kubeproxy_nftables_localhost_nodeport_listeners{ip_family="IPv6"} 4
histogram kubeproxy_conntrack_reconciler_sync_duration_seconds{ip_family="IPv4"} 1 sum 0.002 in ≤0.002
histogram kubeproxy_conntrack_reconciler_sync_duration_seconds{ip_family="IPv6"} 1 sum 0.001 in ≤0.001
`)
	})
}

func TestDrained(t *testing.T) {
	t.Parallel()
	m := metrics.New(metrics.Options{})
	h := m.Drained(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		expect(t, m, "gauge fairlead_drained_waiting{} 1\n")
		if err := http.NewResponseController(w).Flush(); err != nil { // it reaches what is behind
			t.Error(err)
		}
	}))
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/drained", nil))
	late := m.Drained(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "not drained", http.StatusServiceUnavailable)
	}))
	for range 2 {
		late.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/drained", nil))
	}
	expect(t, m, `counter fairlead_drained_requests_total{code="200"} 1
counter fairlead_drained_requests_total{code="503"} 2
`)
}

// TestClockOfAnother: the endpoint controller's clock is ahead of this node's.
func TestClockOfAnother(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{})
		m.Round(engine.Round{Happened: []engine.Happening{{At: time.Now().Add(time.Hour)}}})
		expect(t, m, `histogram fairlead_endpoint_programming_duration_seconds{ip_family="IPv4"} 1 sum 0 in ≤0.001
histogram kubeproxy_network_programming_duration_seconds{ip_family="IPv4"} 1 sum 0 in ≤0
`)
	})
}

// busy is an engine that does not come round.
type busy struct{}

func (busy) Status() engine.Status {
	return engine.Status{WaitingSince: time.Now().Add(-90 * time.Second), Failures: 3, Error: "broken", NodeEligible: true}
}
func (busy) Healthy() bool { return false }

func (busy) Do(ctx context.Context, _ func(context.Context, engine.View) error) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestBusyEngine: a scrape waits for an engine half a second, and tells what there is to tell.
func TestBusyEngine(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{})
		m.Follow(busy{})
		start := time.Now()
		expect(t, m, `gauge fairlead_consecutive_programming_failures{} 3
gauge fairlead_node_eligible{} 1
gauge fairlead_oldest_pending_change_seconds{} 90
`)
		if took := time.Since(start); took != 500*time.Millisecond {
			t.Error("the scrape took", took)
		}
	})
}

func TestWatchesAndInfo(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{Version: "v1", Mode: func() string { return "nftables" }})
		m.Watching(func() []engine.Watch {
			return []engine.Watch{
				{Resource: "services", LastMessage: time.Now().Add(-time.Minute), Lists: 2},
				{Resource: "nodes", LastMessage: time.Now(), Lists: 1},
			}
		})
		text := scrape(t, m.Own())
		if have, want := counted(t, text), `counter fairlead_watch_lists_total{resource="nodes"} 1
counter fairlead_watch_lists_total{resource="services"} 2
gauge fairlead_watch_silence_seconds{resource="services"} 60
`; have != want {
			t.Errorf("have:\n%swant:\n%s", have, want)
		}
		for _, want := range []string{`fairlead_build_info{`, `version="v1"} 1`, "fairlead_mode_info{mode=\"nftables\"} 1\n"} {
			if !strings.Contains(text, want) {
				t.Error("missing:", want)
			}
		}
	})
}

// TestZero: what can be counted is there before it happens, so that a rate knows the first time.
func TestZero(t *testing.T) {
	t.Parallel()
	have := strings.Join(slices.DeleteFunc(rows(t, scrape(t, metrics.New(metrics.Options{}).Own())),
		func(row string) bool { return !strings.HasSuffix(row, " 0\n") }), "")
	want, err := os.ReadFile("testdata/zero.txt")
	if err != nil {
		t.Fatal(err)
	}
	if have != string(want) {
		t.Errorf("have:\n%swant:\n%s", have, want)
	}
}

func TestLint(t *testing.T) {
	t.Parallel()
	m := metrics.New(metrics.Options{Mode: func() string { return "nftables" }})
	m.Follow(busy{})
	problems, err := promlint.New(strings.NewReader(scrape(t, m.Own()))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if p.Metric == "kubeproxy_sync_proxy_rules_no_local_endpoints_total" {
			continue // a gauge that ends in _total: kube-proxy's name
		}
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// TestProcess: what kube-proxy tells of its process is there as well.
func TestProcess(t *testing.T) {
	t.Parallel()
	families := parse(t, scrape(t, metrics.New(metrics.Options{}).Handler()))
	for _, name := range []string{
		"process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds",
		"go_goroutines", "go_gc_duration_seconds", "registered_metrics_total",
		"kubeproxy_sync_proxy_rules_duration_seconds",
	} {
		if families[name] == nil {
			t.Error("missing:", name)
		}
	}
	if families["kubernetes_build_info"] != nil {
		t.Error("kubernetes_build_info would say that this is a version of Kubernetes")
	}
}
