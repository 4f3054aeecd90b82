package metrics_test

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/memory"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// script is a Source that delivers what a test puts into it.
type script chan service.Batch

func (s script) Next(ctx context.Context) (service.Batch, error) {
	select {
	case b := <-s:
		return b, nil
	case <-ctx.Done():
		return service.Batch{}, ctx.Err()
	}
}

func (script) Close() error { return nil }

// run starts an engine that m observes and asks.
func run(t *testing.T, m *metrics.Metrics, kernel *memory.Kernel) (script, *engine.Engine) {
	t.Helper()
	table, err := service.NewTable(service.Options{NodeName: "node", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}})
	if err != nil {
		t.Fatal(err)
	}
	plane, err := kernel.New(dataplane.Config{Meter: m})
	if err != nil {
		t.Fatal(err)
	}
	s := make(script, 10)
	e := engine.New(engine.Options{Source: s, Table: table, Plane: plane, Observer: m})
	m.Follow(e)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return s, e
}

// web is a Service at 10.0.0.n and NodePort 30000+n, and its slice, with an endpoint on another node
// each.
func web(n byte, change func(*service.Service)) service.Batch {
	name := service.Name{Namespace: "default", Name: string('a' + rune(n))}
	s := &service.Service{
		Name: name, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, n})},
		Ports: []service.Port{{Protocol: model.TCP, Port: 80, NodePort: 30000 + uint16(n)}},
	}
	change(s)
	return service.Batch{
		Services: service.One(name, s),
		Slices: service.One(name, &service.Slice{
			Name: name, Service: name.Name, Changed: time.Now().UnixMicro(),
			Ports: []service.SlicePort{{Protocol: model.TCP, Port: 8080}},
			Endpoints: []service.Endpoint{
				{Addr: netip.AddrFrom4([4]byte{10, 1, 0, n}), Node: service.NodeNamed("other"), Ready: true, Serving: true, Weight: 1},
			},
		}),
	}
}

// TestRows: a real engine is followed from its first batch through a drift that it repairs.
func TestRows(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m, kernel := metrics.New(metrics.Options{}), &memory.Kernel{}
		s, _ := run(t, m, kernel)
		scrape(t, m.Own()) // when there is nothing yet to count

		s <- service.Batch{Node: &service.Node{Name: "node", Eligible: true}, Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
		bubble.Pass(1500 * time.Millisecond)
		for i, change := range []func(*service.Service){
			func(*service.Service) {},
			func(s *service.Service) { s.InternalLocal = true },
			func(s *service.Service) { s.ExternalLocal = true },
		} {
			s <- web(byte(i), change)
			synctest.Wait()
		}
		kernel.Do(func(rows *model.State) { clear(rows.Frontends) })
		bubble.Pass(2 * time.Second)
		scrape(t, m.Own()) // has the rows counted, for which the engine goes round
		synctest.Wait()
		expect(t, m, `counter fairlead_drifts_total{class="frontend"} 7
counter fairlead_repairs_total{result="success"} 1
counter kubeproxy_sync_proxy_rules_endpoint_changes_total{} 3
counter kubeproxy_sync_proxy_rules_service_changes_total{} 3
gauge fairlead_healthy{} 1
gauge fairlead_node_eligible{} 1
gauge fairlead_rows{kind="backends"} 3
gauge fairlead_rows{kind="frontends"} 7
gauge fairlead_rows{kind="guards"} 3
gauge fairlead_rows{kind="pools"} 3
gauge fairlead_start_duration_seconds{} 0.5
gauge kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 9.46684802e+08
gauge kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv6"} 9.46684802e+08
gauge kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 9.46684804e+08
gauge kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} 9.46684804e+08
gauge kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 1
gauge kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"} 1
histogram fairlead_endpoint_programming_duration_seconds{ip_family="IPv4"} 3 sum 0 in ≤0.001
histogram fairlead_programming_duration_seconds{} 3 sum 0 in ≤0.0001
histogram kubeproxy_network_programming_duration_seconds{ip_family="IPv4"} 3 sum 0 in ≤0
histogram kubeproxy_sync_full_proxy_rules_duration_seconds{ip_family="IPv4"} 2 sum 0 in ≤0.001
histogram kubeproxy_sync_full_proxy_rules_duration_seconds{ip_family="IPv6"} 2 sum 0 in ≤0.001
histogram kubeproxy_sync_partial_proxy_rules_duration_seconds{ip_family="IPv4"} 3 sum 0 in ≤0.001
histogram kubeproxy_sync_partial_proxy_rules_duration_seconds{ip_family="IPv6"} 3 sum 0 in ≤0.001
histogram kubeproxy_sync_proxy_rules_duration_seconds{ip_family="IPv4"} 5 sum 0 in ≤0.001
histogram kubeproxy_sync_proxy_rules_duration_seconds{ip_family="IPv6"} 5 sum 0 in ≤0.001
`)
	})
}

// TestBusy: changes count when they come, also while the engine cannot take them, and once only.
func TestBusy(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{})
		s, e := run(t, m, &memory.Kernel{})
		s <- web(0, func(*service.Service) {})
		bubble.Pass(time.Second)
		free := make(chan struct{})
		go func() {
			_ = e.Do(t.Context(), func(context.Context, engine.View) error { <-free; return nil })
		}()
		synctest.Wait()
		counts := func(changes, pending int, queued time.Time) {
			t.Helper()
			text := scrape(t, m.Own())
			for _, want := range []string{
				fmt.Sprint("service_changes_total ", changes), fmt.Sprint("endpoint_changes_total ", changes),
				fmt.Sprint("service_changes_pending ", pending), fmt.Sprint("endpoint_changes_pending ", pending),
				fmt.Sprintf("last_queued_timestamp_seconds{ip_family=\"IPv6\"} %v", float64(queued.UnixMicro())/1e6),
			} {
				if !strings.Contains(text, "kubeproxy_sync_proxy_rules_"+want+"\n") {
					t.Errorf("%q is missing", want)
				}
			}
		}
		bubble.Pass(time.Second)
		sent := time.Now()
		s <- web(1, func(*service.Service) {})
		s <- web(2, func(*service.Service) {})
		bubble.Pass(time.Minute)
		counts(3, 2, sent)
		close(free)
		bubble.Pass(time.Second)
		counts(3, 0, sent)
	})
}
