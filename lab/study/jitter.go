package study

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// jitterExperiment looks at clients while endpoints of other Services change.
func jitterExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "jitter", Axis: "changes per second",
			Does: "requests and bulk data over time while endpoints of other Services change",
			Source: "Kubernetes scalability thresholds: up to 20 changes of endpoints a second; KEP-3453 on what a refresh of " +
				"all rules costs",
			Figures: []Figure{
				{Name: "p99", Unit: Seconds, Better: Lower, Main: true, Margin: 0.25,
					Does: "a connection and its answer while endpoints change"},
				{Name: "p50", Unit: Seconds, Better: Lower, Does: "the same, median"},
				{Name: "longest", Unit: Seconds, Better: Lower, Does: "the longest of them"},
				{Name: "p99 ratio", Unit: Count, Better: Lower, Does: "p99 while endpoints change, to that just before"},
				{Name: "lost", Unit: Count, Better: Lower, Does: "requests without an answer"},
				{Name: "throughput", Unit: BitRate, Better: Higher, Does: "of bulk data then: the median interval"},
				{Name: "worst interval", Unit: Share, Better: Higher, Does: "the slowest interval, as a share of the median"},
				{Name: "proxy", Unit: Share, Better: Lower, Does: "of one processor, that the proxy takes while endpoints change"},
			},
		},
		Cells: jitterCells,
	}
}

// unrest is how the endpoints change.
type unrest struct {
	rate  int           // changes in a second
	anew  bool          // the proxy starts anew meanwhile, and with that refreshes all rules
	lasts time.Duration // requests before, requests meanwhile, and bulk data meanwhile
}

func jitterCells(d Depth) (cells []Cell) {
	lasts := byDepth(d, 300*time.Millisecond, time.Second)
	c := Cell{Cluster: Cluster{Services: 1000, Endpoints: 1}, Takes: 4 * lasts}
	for _, rate := range byDepth(d, []int{0, 100}, []int{0, 10, 100}) {
		c.Size, c.Turn = rate, unrest{rate: rate, lasts: lasts}.turn
		cells = append(cells, c)
	}
	c.Case, c.Size, c.Turn = "all rules are refreshed", 0, unrest{anew: true, lasts: lasts}.turn
	return append(cells, c)
}

func (u unrest) turn(ctx context.Context, s *Site) (Figures, error) {
	if err := s.rest(ctx); err != nil {
		return nil, err
	}
	quiet, err := u.requests(ctx, s)
	if err != nil {
		return nil, err
	}
	var busy, bulk traffic.Result
	took, err := u.meanwhile(ctx, s, func() (err error) {
		if busy, err = u.requests(ctx, s); err == nil {
			bulk, err = s.bulk(ctx, s.Service(0), u.lasts, u.interval())
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if lost := unanswered(busy); lost > u.tolerates()*float64(busy.Done) {
		return nil, fmt.Errorf("%g of %g requests had no answer: %v", lost, lost+float64(busy.Done), busy.Errors)
	}
	p99 := busy.Total.Quantile(0.99)
	rates := bitRates(bulk, u.interval())
	median := rates[len(rates)/2]
	return Figures{
		"p99": p99.Seconds(), "p50": busy.Total.Quantile(0.5).Seconds(), "longest": busy.Total.Quantile(1).Seconds(),
		"p99 ratio":  p99.Seconds() / max(quiet.Total.Quantile(0.99), time.Microsecond).Seconds(),
		"lost":       unanswered(quiet) + unanswered(busy),
		"throughput": median, "worst interval": rates[0] / max(median, 1),
		"proxy": took,
	}, nil
}

// patience is how long a request is waited for. Where a proxy that answers itself starts anew, connections wait for the
// next one, and what the kernel sends again comes after a second, and later again.
func (u unrest) patience() time.Duration {
	if u.anew {
		return 4 * time.Second
	}
	return time.Second
}

// tolerates is the share of requests that may have no answer. Where the proxy starts anew, one that answers itself ends
// those that it has: how many that are is a figure.
func (u unrest) tolerates() float64 {
	if u.anew {
		return 1
	}
	return tolerated
}

// interval is what bulk data is counted in.
func (u unrest) interval() time.Duration { return u.lasts / 25 }

// requests are short and begin at a steady rate. Their times count from when they should have begun.
func (u unrest) requests(ctx context.Context, s *Site) (traffic.Result, error) {
	const rate = 1000
	most := int(rate*min(u.lasts, u.patience()).Seconds()) + rate/5 // more than can wait at the same time
	if _, err := s.server(ctx, traffic.Server{}); err != nil {
		return traffic.Result{}, err
	}
	return s.run(ctx, ClientPod, traffic.Load{
		Targets: []netip.AddrPort{s.Service(0)}, Rate: s.rate(rate), Concurrency: most,
		Duration: u.lasts, Timeout: u.patience(),
	})
}

// bitRates are those of the intervals of a load, sorted. The last one is left out: it is not whole.
func bitRates(r traffic.Result, interval time.Duration) (rates []float64) {
	for _, i := range r.Intervals[:max(len(r.Intervals)-1, 0)] {
		rates = append(rates, 8*float64(i)/interval.Seconds())
	}
	if len(rates) == 0 {
		return []float64{8 * r.BytesPerSecond()}
	}
	slices.Sort(rates)
	return rates
}

// meanwhile changes endpoints while something is done, and puts them back. It returns the share of a processor that the
// proxy has taken.
func (u unrest) meanwhile(ctx context.Context, s *Site, do func() error) (proxy float64, err error) {
	if s.Proxy == nil { // telling a change takes a few microseconds, which is nothing beside the requests
		return 0, do()
	}
	before, err := s.Proxy.Usage()
	if err != nil {
		return 0, err
	}
	begin, stop, ended := time.Now(), make(chan struct{}), make(chan error)
	go func() {
		if u.anew {
			ended <- s.refresh(ctx)
			return
		}
		ended <- u.change(s, stop)
	}()
	err = do()
	close(stop)
	err = errors.Join(err, <-ended)
	after, failed := s.Proxy.Usage()
	if err = errors.Join(err, failed); err != nil {
		return 0, err
	}
	if u.anew {
		before.CPU = 0 // it was another process
	}
	return (after.CPU - before.CPU).Seconds() / time.Since(begin).Seconds(), nil
}

// refresh has the proxy read and set all rules, as it does when it starts, and now and then (kube-proxy: each hour).
func (s *Site) refresh(ctx context.Context) error {
	took, err := s.restart(ctx, func(ctx context.Context) error { return s.Proxy.Ready(ctx) })
	s.worked(took, 1)
	return err
}

// change gives one Service after the other a second endpoint, until it is told to stop. Then it takes them back.
// Clients use the first Service, which stays as it is.
func (u unrest) change(s *Site, stop <-chan struct{}) (err error) {
	if u.rate == 0 {
		<-stop
		return nil
	}
	next := time.NewTicker(time.Second / time.Duration(u.rate))
	defer next.Stop()
	changed := map[int]bool{}
	for n := 0; err == nil; n++ {
		select {
		case <-next.C:
			i := min(1+n%max(s.Services-1, 1), s.Services-1)
			changed[i] = !changed[i]
			err = s.announce(i, changed[i])
		case <-stop:
			for i, more := range changed {
				if more {
					err = errors.Join(err, s.announce(i, false))
				}
			}
			s.worked(time.Second, 1) // it may take long, and no client is measured
			return err
		}
	}
	<-stop
	return err
}

// announce has a Service have one endpoint more, or not.
func (s *Site) announce(i int, more bool) error {
	slice := s.slice(i)
	if more {
		slice.Endpoints = append(slice.Endpoints, readyEndpoint(s.Backend(i+1, 0).Addr()))
	}
	return s.Catalog.Update(slice)
}
