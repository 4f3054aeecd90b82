package study

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// errand is a load, the place of its clients, and their servers.
type errand struct {
	from    testbed.Place    // empty: ClientPod
	servers []traffic.Server // empty: one of HTTP
	load    traffic.Load
}

// mostFailed is the share of requests that may fail. Where more do, times of the others mean nothing: a proxy that
// serves only some is fast.
const mostFailed = 0.01

// refusedByLimit is how requests fail that a backend has refused because there were too many.
const refusedByLimit = "status 503"

// ask has clients do their load, and makes sure that the backends have answered, and nearly all requests.
func (s *Site) ask(ctx context.Context, e errand) (traffic.Result, error) {
	if e.from == "" {
		e.from = ClientPod
	}
	if e.servers == nil {
		e.servers = []traffic.Server{{}}
	}
	server, err := s.server(ctx, e.servers...)
	if err != nil {
		return traffic.Result{}, err
	}
	before, err := answeredBy(ctx, server)
	if err != nil {
		return traffic.Result{}, err
	}
	r, err := s.run(ctx, e.from, e.load)
	if err == nil {
		err = enough(r)
	}
	if err != nil {
		return r, err
	}
	after, err := answeredBy(ctx, server)
	if more := before + int64(r.Done) - after; err == nil && more > 0 {
		err = fmt.Errorf("%d answers came from somebody else than the backends", more)
	}
	return r, err
}

// enough reports that too many requests have failed.
func enough(r traffic.Result) error {
	failed, all := r.Failed()-r.Errors[refusedByLimit], r.Done+r.Failed()
	if r.Done == 0 || float64(failed) > mostFailed*float64(all) {
		return fmt.Errorf("%d of %d requests failed (%s)", failed, all, troubles(r))
	}
	return nil
}

func (s *Site) run(ctx context.Context, from testbed.Place, l traffic.Load) (traffic.Result, error) {
	client, err := s.client(ctx, from)
	if err != nil {
		return traffic.Result{}, err
	}
	return client.Run(ctx, l)
}

// answeredBy is how many requests a server has answered with success.
func answeredBy(ctx context.Context, server *traffic.Worker) (n int64, err error) {
	counts, err := server.Served(ctx)
	for _, c := range counts {
		n += c.Answered
	}
	return n, err
}

// troubles are why requests failed, and how many.
func troubles(r traffic.Result) string {
	if r.Failed() == 0 {
		return "none has begun before the time was over"
	}
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		all = append(all, fmt.Sprintf("%s: %d", kind, r.Errors[kind]))
	}
	return strings.Join(all, ", ")
}

// summaryFigures are those of a phase that Figures.add fills in, as ab(1) prints them.
func summaryFigures(phase, does, main string) (all []Figure) {
	words := map[string]string{
		"min": "the shortest", "mean": "mean", "sd": "standard deviation", "median": "median", "max": "the longest",
	}
	for _, what := range []string{"min", "mean", "sd", "median", "max"} {
		all = append(all, Figure{
			Name: phase + "." + what, Unit: Seconds, Better: Lower, Does: does + ": " + words[what], Main: what == main,
		})
	}
	return all
}

// add fills in those of summaryFigures.
func (f Figures) add(phase string, h traffic.Histogram) {
	s := h.Summary()
	f[phase+".min"], f[phase+".mean"], f[phase+".sd"] = s.Min, s.Mean, s.SD
	f[phase+".median"], f[phase+".max"] = s.Median, s.Max
}

func rateFigure() Figure {
	return Figure{Name: "rate", Unit: PerSecond, Better: Higher, Does: "requests that were answered"}
}

func failedFigure() Figure {
	return Figure{Name: "failed", Unit: Count, Better: Lower, Does: "requests that were not answered"}
}
