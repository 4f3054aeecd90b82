package study

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// rulesExperiment asks through a NodePort while there are more and more endpoints.
func rulesExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "rules",
			Does: "requests per second through a NodePort, from outside, while rules grow; the backend takes 2,000 a second",
			Source: "a published comparison: 1 to 5,000 replicas, 10,014 to 200,000 DNAT rules, 100 to 20,000 clients, a " +
				"backend limited to 2,000 requests a second with bursts of 3,000 and answers of 512 bytes, then with 500 ms of " +
				"delay",
			Axis: "DNAT rules", Figures: []Figure{
				{Name: "rate", Unit: PerSecond, Better: Higher, Main: true, Does: "requests that were answered with success"},
				{Name: "total", Unit: Seconds, Better: Lower, Does: "connection, request and answer, median"},
				{Name: "total.p99", Unit: Seconds, Better: Lower, Does: "connection, request and answer: a hundredth take longer"},
				{Name: "limited", Unit: Count, Does: "requests that the backend refused because of its limit (503)"},
				failedFigure(),
			},
		},
		Cells: rulesCells,
	}
}

// rulesCase is how clients and the backend behave.
type rulesCase struct {
	clients int
	delay   time.Duration
	limited bool
	lasts   time.Duration
}

func (c rulesCase) String() string {
	name := Number(c.clients) + " at a time"
	if c.delay > 0 {
		name += fmt.Sprintf(", %d ms of delay", c.delay.Milliseconds())
	}
	if !c.limited {
		name += ", no limit" // the comparison did not have that: it shows what the limit hides
	}
	return name
}

// rulesCells are sizes in one case, and without the limit, and all cases at the largest size. There is a DNAT rule for
// each endpoint of each Service.
func rulesCells(d Depth) (cells []Cell) {
	const lasts, shorter, delay = 250 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond
	common := []rulesCase{{100, 0, true, lasts}, {100, 0, false, lasts}}
	sizes := []Cluster{rulesCluster(2, 1), rulesCluster(2, 5000)}
	others := []rulesCase{{1000, shorter, true, 2 * lasts}}
	if d == Full {
		sizes = []Cluster{rulesCluster(2, 1), rulesCluster(2, 500), rulesCluster(2, 5000), rulesCluster(40, 5000)}
		// So many clients need a while until all of them are there.
		others = []rulesCase{
			{1000, 0, false, lasts}, {1000, delay, true, lasts + 2*delay}, {10_000, 0, true, 2 * time.Second},
		}
	}
	for i, cluster := range sizes {
		cases := common
		if i == len(sizes)-1 {
			cases = slices.Concat(common, others)
		}
		for _, c := range cases {
			cells = append(cells, Cell{
				Case: c.String(), Size: cluster.Services * cluster.Endpoints, Cluster: cluster, Takes: c.lasts,
				Turn: c.turn,
			})
		}
	}
	return cells
}

func rulesCluster(services, endpoints int) Cluster {
	return Cluster{Services: services, Endpoints: endpoints, NodePorts: true}
}

func (c rulesCase) turn(ctx context.Context, s *Site) (Figures, error) {
	e := errand{
		from: testbed.Outside, servers: []traffic.Server{{Bytes: 512, Delay: c.delay}},
		load: traffic.Load{
			Targets: []netip.AddrPort{s.NodePort(s.Services - 1)}, Concurrency: c.clients, Duration: c.lasts,
			Timeout: 30 * time.Second,
		},
	}
	if c.limited {
		e.servers[0].Limit = traffic.Limit{Rate: 2000, Burst: 3000}
	}
	r, err := s.ask(ctx, e)
	if err != nil {
		return nil, err
	}
	limited := r.Errors[refusedByLimit]
	return Figures{
		"rate": r.PerSecond(), "total": r.Total.Quantile(0.5).Seconds(), "total.p99": r.Total.Quantile(0.99).Seconds(),
		"limited": float64(limited), "failed": float64(r.Failed() - limited),
	}, nil
}
