package report

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/study"
)

// The lines of golang.org/design/14313-benchmark-format, and of units as benchfmt reads them.
var (
	benchName  = regexp.MustCompile(`^Benchmark[^\s\p{Ll}]\S*-\d+$`)
	configLine = regexp.MustCompile(`^[\p{Ll}][^\s\p{Lu}:]*: \S.*$`)
	unitLine   = regexp.MustCompile(`^Unit \S+ better=(lower|higher)$`)
)

// parsed are the values of a file by name, configuration and unit, and how many lines have them.
func parsed(t *testing.T, text string) (values map[string][]float64, lines int) {
	t.Helper()
	values, kernel := map[string][]float64{}, ""
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		fields := strings.Fields(line)
		switch {
		case line == "" || unitLine.MatchString(line):
		case configLine.MatchString(line):
			if name, rest, _ := strings.Cut(line, ": "); name == "kernel" {
				kernel = rest
			}
		case len(fields) >= 4 && len(fields)%2 == 0 && benchName.MatchString(fields[0]):
			lines++
			if n, err := strconv.Atoi(fields[1]); err != nil || n < 1 {
				t.Errorf("no number of iterations: %s", line)
			}
			for i := 2; i < len(fields); i += 2 {
				v, err := strconv.ParseFloat(fields[i], 64)
				if err != nil {
					t.Errorf("%s: %v", line, err)
				}
				key := fmt.Sprint(kernel, " ", fields[0], " ", fields[i+1])
				values[key] = append(values[key], v)
			}
		default:
			t.Errorf("no line of a benchmark: %q", line)
		}
	}
	return values, lines
}

func TestBenchmarks(t *testing.T) {
	t.Parallel()
	r := made()
	values, lines := parsed(t, string(written(t, Benchmarks, r)))
	turns := 0
	for _, row := range r.Rows {
		turns += one(row.Failed == "")
	}
	if lines != turns {
		t.Errorf("%d lines of %d turns", lines, turns)
	}
	const key = "this kernel BenchmarkLookup/case=last_Service/Services=10000/who=kube-proxy_iptables-2 connect_p50-sec"
	if got := values[key]; len(got) != 24 || got[0] < 50e-6 || got[0] > 60e-6 {
		t.Errorf("%s: %v", key, got)
	}
	failed := &study.Result{Rows: []study.Row{{Experiment: "x", Failed: "it did"}}, Kernels: made().Kernels}
	if _, lines := parsed(t, string(written(t, Benchmarks, failed))); lines > 0 {
		t.Error("a turn that failed has a line")
	}
}
