package tools

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// k6Script asks the targets in turn.
const k6Script = `import http from 'k6/http';
import exec from 'k6/execution';
const load = JSON.parse(__ENV.FAIRLEAD_LOAD);
export const options = load.options;
export default function () {
	http.get(load.targets[exec.scenario.iterationInTest % load.targets.length], load.params);
}
`

// runK6 runs k6. The Processing is what it calls http_req_duration, and the Total that and connecting.
func runK6(ctx context.Context, c command, l traffic.Load) (traffic.Result, error) {
	if err := need(map[string]bool{
		"other protocol than HTTP": l.Protocol != traffic.HTTP && l.Protocol != "", "choice of ports": len(l.Sources) > 0,
		"choice of addresses": len(l.Addresses) > 0,
		"intervals":           l.Interval > 0, "load without an end": l.Requests == 0 && l.Duration == 0,
		"rate without a duration": l.Rate > 0 && l.Duration == 0,
	}); err != nil {
		return traffic.Result{}, err
	}
	dir, err := os.MkdirTemp("", "fairlead-k6-")
	if err != nil {
		return traffic.Result{}, err
	}
	defer os.RemoveAll(dir)
	script, samples := filepath.Join(dir, "load.js"), filepath.Join(dir, "samples.csv")
	if err := os.WriteFile(script, []byte(k6Script), 0o600); err != nil {
		return traffic.Result{}, err
	}
	what, err := json.Marshal(k6Load(l))
	if err != nil {
		return traffic.Result{}, err
	}
	_, used, err := c.run(ctx, "run", "--quiet", "--no-usage-report", "--address", "", "--env",
		"FAIRLEAD_LOAD="+string(what), "--out", "csv=timeFormat=unix_micro,fileName="+samples, script)
	if err != nil {
		return traffic.Result{}, err
	}
	f, err := os.Open(samples)
	if err != nil {
		return traffic.Result{}, err
	}
	defer f.Close()
	r, err := parseK6(f)
	r.Used = used
	return r, err
}

// k6Load is what the script reads.
func k6Load(l traffic.Load) any {
	type object = map[string]any
	var targets []string
	for _, to := range l.Targets {
		targets = append(targets, fmt.Sprintf("http://%s/", to))
	}
	scenario := object{"executor": "shared-iterations", "vus": l.Concurrency, "iterations": l.Requests}
	duration := fmt.Sprintf("%dms", l.Duration.Milliseconds())
	switch {
	case l.Rate > 0:
		scenario = object{
			"executor": "constant-arrival-rate", "rate": int(l.Rate), "timeUnit": "1s", "duration": duration,
			"preAllocatedVUs": l.Concurrency,
		}
	case l.Requests == 0:
		scenario = object{"executor": "constant-vus", "vus": l.Concurrency, "duration": duration}
	case l.Duration > 0:
		scenario["maxDuration"] = duration
	}
	return object{
		"targets": targets, "params": object{"timeout": l.Timeout.Milliseconds()},
		"options": object{
			"noConnectionReuse": !l.KeepAlive, "discardResponseBodies": true,
			"systemTags": []string{"status", "error_code", "error"},
			"scenarios":  object{"load": scenario},
		},
	}
}

// k6Request is what the rows of one request say.
type k6Request struct {
	ended  time.Time
	status string
	phases map[string]time.Duration // by metric
}

// parseK6 reads the rows of all metrics: those of one request stand together, http_reqs first.
func parseK6(from io.Reader) (traffic.Result, error) {
	s := k6Samples{result: traffic.Result{Errors: map[string]int{}}}
	rows := csv.NewReader(from)
	head, err := rows.Read()
	for err == nil {
		var row []string
		if row, err = rows.Read(); err == nil {
			err = s.add(func(column string) string { return row[max(0, slices.Index(head, column))] })
		}
	}
	s.finish()
	if s.result.Elapsed = s.last.Sub(s.first); !errors.Is(err, io.EOF) {
		return s.result, fmt.Errorf("its samples: %w", err)
	}
	return s.result, nil
}

// k6Samples makes a Result of k6's samples.
type k6Samples struct {
	result      traffic.Result
	first, last time.Time
	request     k6Request
}

// add takes a row, of which at tells the cell in a column.
func (s *k6Samples) add(at func(column string) string) error {
	value, err := strconv.ParseFloat(at("metric_value"), 64)
	if err != nil {
		return err
	}
	switch metric := at("metric_name"); metric {
	case "http_reqs":
		s.finish()
		ended, err := strconv.ParseInt(at("timestamp"), 10, 64)
		s.request = k6Request{time.UnixMicro(ended), at("status"), map[string]time.Duration{}}
		if s.request.status == "0" {
			s.request.status = at("error")
		}
		return err
	case "http_req_duration", "http_req_connecting", "http_req_waiting":
		if s.request.phases != nil {
			s.request.phases[metric] = time.Duration(value * float64(time.Millisecond))
		}
	case "data_received":
		s.result.Bytes += int64(value)
	}
	return nil
}

// finish notes a request, if there is one.
func (s *k6Samples) finish() {
	request := s.request
	if request.phases == nil {
		return
	}
	s.request = k6Request{}
	connect, processing := request.phases["http_req_connecting"], request.phases["http_req_duration"]
	if begun := request.ended.Add(-connect - processing); s.first.IsZero() || begun.Before(s.first) {
		s.first = begun
	}
	if request.ended.After(s.last) {
		s.last = request.ended
	}
	r := &s.result
	switch code, err := strconv.Atoi(request.status); {
	case err != nil:
		r.Errors[request.status]++
	case code != http.StatusOK:
		r.Errors["status "+request.status]++
	default:
		r.Done++
		r.Processing.Record(processing)
		r.Waiting.Record(request.phases["http_req_waiting"])
		r.Total.Record(connect + processing)
		if connect > 0 {
			r.Connect.Record(connect)
		}
	}
}
