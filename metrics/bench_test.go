package metrics_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/metrics"
	"fairlead.dev/fairlead/model"
)

// BenchmarkRound is what observing adds to each change.
func BenchmarkRound(b *testing.B) {
	m := metrics.New(metrics.Options{})
	now := time.Now()
	r := engine.Round{
		Verb: engine.Applied, Took: 100 * time.Microsecond, Status: was(now),
		Happened: []engine.Happening{{At: now}}, Arrived: []time.Time{now},
	}
	b.ReportAllocs()
	for b.Loop() {
		m.Round(r)
	}
}

// BenchmarkScrape is what a scrape costs, counting the rows of many Services anew included.
func BenchmarkScrape(b *testing.B) {
	for _, services := range []int{0, 10_000, 50_000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			m := metrics.New(metrics.Options{})
			m.Follow(still{stateOf(services)})
			for b.Loop() {
				m.Round(engine.Round{Verb: engine.Applied})
				if text := scrape(b, m.Own()); text == "" {
					b.Fatal("nothing")
				}
			}
		})
	}
}

// still is an engine that lends a State.
type still struct{ state *model.State }

func (still) Status() engine.Status { return engine.Status{} }
func (still) Healthy() bool         { return true }

func (s still) Do(ctx context.Context, f func(context.Context, engine.View) error) error {
	return f(ctx, engine.View{State: s.state})
}

// stateOf has a ClusterIP and a NodePort for each Service, and ten backends.
func stateOf(services int) *model.State {
	s := model.NewState()
	for i := range services {
		addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		id := model.PoolID{Service: fmt.Sprintf("default/web-%d:http", i)}
		s.Pools[id] = model.Pool{Backends: make([]model.Backend, 10)}
		s.Guards[netip.PrefixFrom(addr, 32)] = model.Reject
		for _, port := range []uint16{80, 30080} {
			s.Frontends[model.Key{Addr: addr, Port: port, Protocol: model.TCP}] = model.Frontend{
				Service: id.Service, Verdict: model.Forward, Pool: id,
			}
		}
	}
	return s
}
