package study

import (
	"context"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// connectExperiment makes short connections, as the comparison of iptables and IPVS did with ab.
func connectExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "connect",
			Does: "short HTTP connections while there are more and more Services: 600, 200 at a time (in full runs: 10,000, " +
				"1,000 at a time)",
			Source: "UCloud, UK8S: kube-proxy modes (github.com/UCloudDoc-Team/uk8s, userguide/kubeproxy_mode.md); there ab " +
				"ran on the node, and Services had some 20 endpoints",
			Axis: servicesAxis, Figures: connectFigures(),
		},
		Cells: connectCells, ForIPVS: connectCells,
	}
}

func connectFigures() []Figure {
	return slices.Concat(
		summaryFigures("total", "connection, request and answer", "median"),
		summaryFigures("connect", "until there is a connection", ""),
		summaryFigures("processing", "from then on until the end of the answer", ""),
		summaryFigures("waiting", "from the request until the answer begins", ""),
		[]Figure{rateFigure(), failedFigure()},
	)
}

func connectCells(d Depth) (cells []Cell) {
	load := byDepth(d, traffic.Load{Requests: 600, Concurrency: 200},
		traffic.Load{Requests: 4000, Concurrency: 1000})
	for _, n := range byDepth(d, usual, []int{100, 500, 1000, 2000, 3000, 4000, 10_000, 20_000, hugest}) {
		cells = append(cells, Cell{
			Case: Number(load.Concurrency) + " at a time", Size: n, Cluster: Cluster{Services: n, Endpoints: 1},
			Takes: time.Duration(load.Requests) * 100 * time.Microsecond, Contenders: ableToHold(n),
			Turn: func(ctx context.Context, s *Site) (Figures, error) { return connectTurn(ctx, s, load) },
		})
	}
	return cells
}

// usual are the numbers of Services that are enough to see what grows with them.
var usual = []int{100, 1000, 4000}

// hugest is the number of Services that kube-proxy needs minutes for.
const hugest = 50_000

// ableToHold leaves out kube-proxy where there are so many Services.
func ableToHold(services int) func([]Contender) []Contender {
	if services < hugest {
		return nil
	}
	return func(all []Contender) []Contender {
		return slices.DeleteFunc(all, func(c Contender) bool { return c.Kind == Peer })
	}
}

// connectTurn asks the Service that has as many before it in the rules as after it.
func connectTurn(ctx context.Context, s *Site, load traffic.Load) (Figures, error) {
	all, err := s.inOrder(ctx)
	if err != nil {
		return nil, err
	}
	load.Targets = all[len(all)/2:][:1]
	r, err := s.ask(ctx, errand{load: load})
	if err != nil {
		return nil, err
	}
	f := Figures{"rate": r.PerSecond(), "failed": float64(r.Failed())}
	f.add("connect", r.Connect)
	f.add("processing", r.Processing)
	f.add("waiting", r.Waiting)
	f.add("total", r.Total)
	return f, nil
}
