package metrics_test

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/model"
)

// counting is an engine whose plane has counted connections of Services.
type counting struct {
	still
	connections *[]uint64 // of the Services s-0, s-1, …
}

func (c counting) Do(ctx context.Context, f func(context.Context, engine.View) error) error {
	return f(ctx, engine.View{State: c.state, Plane: countingPlane{connections: *c.connections}})
}

type countingPlane struct {
	dataplane.Dataplane
	connections []uint64
}

func (c countingPlane) Counters(context.Context) (all dataplane.Counters, err error) {
	all.Connections, all.Traffic = true, true
	for i, n := range c.connections {
		all.Served = append(all.Served, dataplane.Served{
			Pool: model.PoolID{Service: fmt.Sprintf("shop/s-%d:http", i)},
			Sum:  dataplane.Sum{Connections: n, ToBackend: dataplane.Traffic{Packets: n, Bytes: 100 * n}},
		})
	}
	return all, nil
}

// seriesOf are the values of a metric, sorted, one a line.
func seriesOf(text, name string) []string {
	lines := regexp.MustCompile(`(?m)^`+name+`[{ ].*$`).FindAllString(text, -1)
	slices.Sort(lines)
	return lines
}

// TestServed_busy: what was counted is not gone while the engine is busy.
func TestServed_busy(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		m := metrics.New(metrics.Options{})
		m.Follow(counting{still{stateOf(1)}, &[]uint64{5}})
		before := seriesOf(scrape(t, m.Own()), "fairlead_served_connections_total")
		m.Follow(busy{})
		after := seriesOf(scrape(t, m.Own()), "fairlead_served_connections_total")
		if len(before) != 1 || !slices.Equal(before, after) {
			t.Errorf("before %v, after %v", before, after)
		}
	})
}

// TestTop: the number of series is bounded, and nothing that was counted is lost or counted twice.
func TestTop(t *testing.T) {
	connections := make([]uint64, 100)
	m := metrics.New(metrics.Options{})
	m.Follow(counting{still{stateOf(1)}, &connections})
	m.ServiceSeries(2)
	connections[7], connections[9], connections[3] = 50, 40, 10
	want := []string{
		`fairlead_service_connections_total{service_name="",service_namespace="",service_port=""} 10`,
		`fairlead_service_connections_total{service_name="s-7",service_namespace="shop",service_port="http"} 50`,
		`fairlead_service_connections_total{service_name="s-9",service_namespace="shop",service_port="http"} 40`,
	}
	if got := seriesOf(scrape(t, m.Handler()), "fairlead_service_connections_total"); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	before := map[string]float64{}
	growth := 0.0
	for i := range 200 { // other Services get more now
		for s := range connections {
			connections[s] += uint64((s*7 + i) % 13)
		}
		text := scrape(t, m.Handler())
		lines := seriesOf(text, "fairlead_service_connections_total")
		if len(lines) != 3 {
			t.Fatalf("there are %d series:\n%s", len(lines), strings.Join(lines, "\n"))
		}
		now := map[string]float64{}
		for _, line := range lines {
			name, value, _ := strings.Cut(line, "} ")
			now[name], _ = strconv.ParseFloat(value, 64)
			if had, there := before[name]; there && now[name] < had {
				t.Errorf("%s} fell from %v to %v", name, had, now[name])
			} else if there {
				growth += now[name] - had
			}
		}
		before = now
	}
	if growth == 0 {
		t.Error("no series has grown")
	}
	m.ServiceSeries(0)
	if got := seriesOf(scrape(t, m.Handler()), "fairlead_service_connections_total"); len(got) > 0 {
		t.Errorf("there are series: %v", got)
	}
}
