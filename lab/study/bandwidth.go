package study

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// bandwidthExperiment carries bulk data through one Service of many.
func bandwidthExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "bandwidth", Axis: servicesAxis,
			Does: "bulk data on one connection, through the Service that rules name first and the one that they name last",
			Source: "H. Xie, Scale Kubernetes to Support 50,000 Services (KubeCon Europe 2017): the first and the last " +
				"Service, iptables and IPVS",
			Figures: []Figure{
				{Name: "throughput", Unit: BitRate, Better: Higher, Main: true, Does: "from the client to the server"},
				{Name: "worst interval", Unit: BitRate, Better: Higher, Does: "the slowest tenth of the time"},
				{Name: "connect", Unit: Seconds, Better: Lower, Does: "until the connection was there"},
			},
		},
		Cells: bandwidthCells,
	}
}

func bandwidthCells(d Depth) (cells []Cell) {
	lasts := byDepth(d, 200*time.Millisecond, time.Second)
	for _, n := range byDepth(d, []int{1000, 4000}, []int{1, 1000, 5000, 10_000, 25_000, hugest}) {
		cells = append(cells, atEnds(Cell{
			Size: n, Cluster: Cluster{Services: n, Endpoints: 1}, Takes: lasts, Contenders: ableToHold(n),
		}, func(ctx context.Context, s *Site, to netip.AddrPort) (Figures, error) {
			return bandwidthTurn(ctx, s, to, lasts)
		})...)
	}
	return cells
}

// bandwidthTurn carries data to a Service.
func bandwidthTurn(ctx context.Context, s *Site, to netip.AddrPort, lasts time.Duration) (Figures, error) {
	r, err := s.bulk(ctx, to, lasts, lasts/10)
	if err != nil {
		return nil, err
	}
	return Figures{
		"throughput": 8 * r.BytesPerSecond(), "worst interval": bitRates(r, lasts/10)[0],
		"connect": r.Connect.Quantile(0.5).Seconds(),
	}, nil
}

// bulk carries data to a Service on one connection, and counts it in intervals.
func (s *Site) bulk(ctx context.Context, to netip.AddrPort, lasts, interval time.Duration) (traffic.Result, error) {
	if _, err := s.server(ctx, traffic.Server{Protocol: traffic.Bulk}); err != nil {
		return traffic.Result{}, err
	}
	r, err := s.run(ctx, ClientPod, traffic.Load{
		Protocol: traffic.Bulk, Targets: []netip.AddrPort{to}, Duration: lasts, Interval: interval,
	})
	if err == nil && r.Failed() > 0 {
		err = fmt.Errorf("a connection to %s ended before its time: %v", to, r.Errors)
	}
	return r, err
}
