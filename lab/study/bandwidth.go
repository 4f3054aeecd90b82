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
	sizes, rounds, lasts := []int{100, 4000}, 4, 200*time.Millisecond
	switch d {
	case Brief:
		sizes = brief
	case Full:
		sizes, rounds, lasts = []int{1, 1000, 4000, 10_000, 25_000}, 7, time.Second
	}
	for _, n := range sizes {
		for _, last := range []bool{false, true} {
			name := "first Service"
			if last {
				name = "last Service"
			}
			cells = append(cells, Cell{
				Case: name, Size: n, Cluster: Cluster{Services: n, Endpoints: 1}, Rounds: rounds, Takes: lasts,
				Turn: func(ctx context.Context, s *Site) (Figures, error) {
					return bandwidthTurn(ctx, s, last, lasts)
				},
			})
		}
	}
	return cells
}

// bandwidthTurn carries data to the first Service, or to the last one.
func bandwidthTurn(ctx context.Context, s *Site, last bool, lasts time.Duration) (Figures, error) {
	to, end, err := s.ends(ctx)
	if err != nil {
		return nil, err
	}
	if last {
		to = end
	}
	if _, err := s.server(ctx, traffic.Server{Protocol: traffic.Bulk}); err != nil {
		return nil, err
	}
	r, err := s.run(ctx, ClientPod, traffic.Load{
		Protocol: traffic.Bulk, Targets: []netip.AddrPort{to}, Duration: lasts, Interval: lasts / 10,
	})
	if err != nil {
		return nil, err
	}
	if r.Failed() > 0 {
		return nil, fmt.Errorf("a connection to %s ended before its time: %v", to, r.Errors)
	}
	return Figures{
		"throughput": 8 * r.BytesPerSecond(), "worst interval": bitRates(r, lasts/10)[0],
		"connect": r.Connect.Quantile(0.5).Seconds(),
	}, nil
}
