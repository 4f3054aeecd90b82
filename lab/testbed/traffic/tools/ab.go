package tools

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// runAB runs ApacheBench. Its times are whole milliseconds, and those of all answers, whatever their status; it speaks
// HTTP/1.0.
func runAB(ctx context.Context, c command, l traffic.Load) (traffic.Result, error) {
	if err := need(map[string]bool{
		"other protocol than HTTP": l.Protocol != traffic.HTTP && l.Protocol != "", "rate": l.Rate > 0,
		"more than one target": len(l.Targets) != 1, "choice of ports": len(l.Sources)+len(l.Addresses) > 0,
		"intervals": l.Interval > 0, "load without an end": l.Requests == 0 && l.Duration == 0,
	}); err != nil {
		return traffic.Result{}, err
	}
	dir, err := os.MkdirTemp("", "fairlead-ab-")
	if err != nil {
		return traffic.Result{}, err
	}
	defer os.RemoveAll(dir)
	plot := filepath.Join(dir, "plot")
	args := []string{"-q", "-d", "-S", "-l", "-r", "-g", plot, "-c", strconv.Itoa(l.Concurrency),
		"-s", strconv.Itoa(wholeSeconds(l.Timeout))}
	if l.KeepAlive {
		args = append(args, "-k")
	}
	if l.Duration > 0 {
		args = append(args, "-t", strconv.Itoa(wholeSeconds(l.Duration)))
	}
	if n := l.Requests; n > 0 {
		args = append(args, "-n", strconv.Itoa(n)) // after -t, which sets it as well
	} else {
		args = append(args, "-n", strconv.Itoa(1<<30))
	}
	out, used, err := c.run(ctx, append(args, fmt.Sprintf("http://%s/", l.Targets[0]))...)
	if err != nil {
		return traffic.Result{}, err
	}
	r, err := parseAB(string(out))
	if err != nil {
		return r, err
	}
	r.Used = used
	return r, readPlot(plot, &r)
}

// wholeSeconds rounds up.
func wholeSeconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }

// parseAB reads what ab prints for people: what it counts is nowhere else.
func parseAB(text string) (r traffic.Result, err error) {
	values := map[string]float64{}
	lines := regexp.MustCompile(`(?m)^([A-Z][\w -]+):\s+(\d+(?:\.\d+)?)(?:\s|$)`)
	for _, m := range lines.FindAllStringSubmatch(text, -1) {
		if values[m[1]], err = strconv.ParseFloat(m[2], 64); err != nil {
			return r, fmt.Errorf("its %q: %w", m[0], err)
		}
	}
	took, ok := values["Time taken for tests"]
	if !ok {
		return r, fmt.Errorf("it said something unexpected:\n%s", text)
	}
	r.Elapsed = time.Duration(took * float64(time.Second))
	r.Bytes = int64(values["HTML transferred"])
	r.Errors = map[string]int{}
	if n := int(values["Failed requests"]); n > 0 {
		r.Errors["failed"] = n
	}
	if n := int(values["Non-2xx responses"]); n > 0 {
		r.Errors["status other than 2xx"] = n
	}
	r.Done = int(values["Complete requests"]) - r.Failed()
	return r, nil
}

// readPlot reads the file for gnuplot, which has a line for each request.
func readPlot(path string, r *traffic.Result) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	if !lines.Scan() || !strings.HasSuffix(lines.Text(), "\tseconds\tctime\tdtime\tttime\twait") {
		return fmt.Errorf("its file for gnuplot has the columns %q: %w", lines.Text(), errors.ErrUnsupported)
	}
	phases := []*traffic.Histogram{&r.Connect, &r.Processing, &r.Total, &r.Waiting}
	for lines.Scan() {
		cells := strings.Split(lines.Text(), "\t")
		for i, phase := range phases {
			ms, err := strconv.ParseInt(cells[len(cells)-len(phases)+i], 10, 64)
			if err != nil {
				return fmt.Errorf("its file for gnuplot: %q: %w", lines.Text(), err)
			}
			phase.Record(time.Duration(ms) * time.Millisecond)
		}
	}
	return lines.Err()
}
