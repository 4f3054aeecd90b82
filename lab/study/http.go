package study

import (
	"context"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// httpExperiment has a single user.
func httpExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name:   "http",
			Does:   "one user asks 100 web servers behind a Service, one request after the other",
			Source: "a published comparison of the modes of kube-proxy with k6",
			Figures: []Figure{
				{Name: "duration", Unit: Seconds, Better: Lower, Main: true,
					Does: "request and answer, mean (k6: http_req_duration)"},
				{Name: "duration.median", Unit: Seconds, Better: Lower, Does: "request and answer, median"},
				{Name: "waiting.p95", Unit: Seconds, Better: Lower, Does: "until the answer begins: a twentieth wait longer " +
					"(k6: http_req_waiting)"},
				{Name: "connect", Unit: Seconds, Better: Lower, Does: "until there is a connection, median; with one kept: 0"},
				{Name: "total", Unit: Seconds, Better: Lower, Does: "all of it, median"},
				rateFigure(), failedFigure(),
			},
		},
		Cells: httpCells,
	}
}

func httpCells(d Depth) (cells []Cell) {
	lasts := byDepth(d, 200*time.Millisecond, time.Second)
	for _, name := range []string{"a connection for each request", "one connection, kept"} {
		load := traffic.Load{Duration: lasts, KeepAlive: name == "one connection, kept"}
		cells = append(cells, Cell{
			Case: name, Cluster: Cluster{Services: 1, Endpoints: 100}, Takes: lasts,
			Turn: func(ctx context.Context, s *Site) (Figures, error) { return httpTurn(ctx, s, load) },
		})
	}
	return cells
}

func httpTurn(ctx context.Context, s *Site, load traffic.Load) (Figures, error) {
	load.Targets = s.Targets(0)
	if load.KeepAlive { // a user keeps one, and so there is one server that it asks
		load.Targets = load.Targets[:1]
	}
	r, err := s.ask(ctx, errand{load: load})
	if err != nil {
		return nil, err
	}
	duration := r.Processing.Summary()
	return Figures{
		"duration": duration.Mean, "duration.median": duration.Median, "waiting.p95": r.Waiting.Quantile(0.95).Seconds(),
		"connect": r.Connect.Quantile(0.5).Seconds(), "total": r.Total.Quantile(0.5).Seconds(),
		"rate": r.PerSecond(), "failed": float64(r.Failed()),
	}, nil
}
