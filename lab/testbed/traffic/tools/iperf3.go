package tools

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// StartIPerf3 starts iperf3 as a server. It serves one client after the other.
func (a At) StartIPerf3(ctx context.Context, port uint16) (*Daemon, error) {
	return command{a, IPerf3}.start(ctx, "Server listening",
		"--server", "--port", strconv.Itoa(int(port)), "--forceflush")
}

// iperf3Report is what of iperf3's JSON is used.
type iperf3Report struct {
	Error     string
	Intervals []struct{ Sum iperf3Sum }
	End       struct {
		Received iperf3Sum `json:"sum_received"`
	}
}

type iperf3Sum struct {
	Seconds float64
	Bytes   int64
}

// runIPerf3 runs iperf3 for whole seconds.
func runIPerf3(ctx context.Context, c command, l traffic.Load) (traffic.Result, error) {
	if err := need(map[string]bool{
		"other protocol than bulk": l.Protocol != traffic.Bulk, "more than one target": len(l.Targets) != 1,
		"choice of ports": len(l.Sources)+len(l.Addresses) > 0, "load without an end": l.Duration == 0,
	}); err != nil {
		return traffic.Result{}, err
	}
	to := l.Targets[0]
	args := []string{"--json", "--client", to.Addr().String(), "--port", strconv.Itoa(int(to.Port())),
		"--time", strconv.Itoa(wholeSeconds(l.Duration)), "--parallel", strconv.Itoa(l.Concurrency),
		"--connect-timeout", strconv.FormatInt(l.Timeout.Milliseconds(), 10)}
	if l.Interval > 0 {
		args = append(args, "--interval", strconv.FormatFloat(l.Interval.Seconds(), 'f', -1, 64))
	}
	if l.Download {
		args = append(args, "--reverse")
	}
	out, used, failed := c.run(ctx, args...)
	var report iperf3Report
	if err := json.Unmarshal(out, &report); err != nil {
		if failed != nil {
			err = failed
		}
		return traffic.Result{}, err
	}
	if report.Error != "" || failed != nil {
		return traffic.Result{}, fmt.Errorf("%s (%w)", report.Error, failed)
	}
	end := report.End.Received
	r := traffic.Result{
		Elapsed: time.Duration(end.Seconds * float64(time.Second)), Bytes: end.Bytes, Done: l.Concurrency, Used: used,
	}
	for _, i := range report.Intervals {
		if l.Interval > 0 {
			r.Intervals = append(r.Intervals, traffic.Interval{Bytes: i.Sum.Bytes})
		}
	}
	return r, nil
}
