package study

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/lab/testbed/traffic/tools"
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
	tool := ""
	if lasts >= time.Second { // it knows whole seconds only
		tool = installed(tools.IPerf3)
	}
	for _, n := range sizes {
		for _, last := range []bool{false, true} {
			name := "first Service"
			if last {
				name = "last Service"
			}
			if tool != "" {
				name += ", with " + tool
			}
			cells = append(cells, Cell{
				Case: name, Size: n, Cluster: Cluster{Services: n, Endpoints: 1}, Rounds: rounds, Takes: lasts,
				Turn: func(ctx context.Context, s *Site) (Figures, error) {
					return bandwidthTurn(ctx, s, bulk{tool, last, lasts})
				},
			})
		}
	}
	return cells
}

// bulk is what a turn carries.
type bulk struct {
	tool  string // empty: this program
	last  bool   // to the last Service
	lasts time.Duration
}

// carry has the client do it.
func (b bulk) carry(ctx context.Context, s *Site, l traffic.Load) (traffic.Result, error) {
	if b.tool != "" {
		if err := s.serveBy(ctx, b.tool, traffic.Server{Protocol: traffic.Bulk}); err != nil {
			return traffic.Result{}, err
		}
	} else if _, err := s.server(ctx, traffic.Server{Protocol: traffic.Bulk}); err != nil {
		return traffic.Result{}, err
	}
	return s.run(ctx, errand{tool: b.tool, from: ClientPod, load: l})
}

func bandwidthTurn(ctx context.Context, s *Site, b bulk) (Figures, error) {
	to, end, err := s.ends(ctx)
	if err != nil {
		return nil, err
	}
	if b.last {
		to = end
	}
	r, err := b.carry(ctx, s, traffic.Load{
		Protocol: traffic.Bulk, Targets: []netip.AddrPort{to}, Duration: b.lasts, Interval: b.lasts / 10,
	})
	if err != nil {
		return nil, err
	}
	if r.Failed() > 0 {
		return nil, fmt.Errorf("a connection to %s ended before its time: %v", to, r.Errors)
	}
	f := Figures{"throughput": 8 * r.BytesPerSecond(), "worst interval": bitRates(r, b.lasts/10)[0]}
	if r.Connect.Count() > 0 { // iperf3 does not tell
		f["connect"] = r.Connect.Quantile(0.5).Seconds()
	}
	return f, nil
}
