package report

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// Benchmarks writes all turns in the format of Go's benchmarks (golang.org/design/14313-benchmark-format), so that
// benchstat can compare them: a line for each turn, with all its figures.
//
//	Unit connect-sec better=lower
//	kernel: this kernel
//	BenchmarkLookup/case=last_Service/Services=1000/who=nftables-2 1 1.9e-05 connect-sec
func Benchmarks(w io.Writer, r *study.Result) error {
	s := NewStatistics(r)
	b := bufio.NewWriter(w)
	benchConfig(b, "pkg", "fairlead.dev/fairlead/lab/study", "fairlead", r.Version)
	told := map[string]bool{}
	for _, d := range r.Experiments {
		for _, f := range d.Figures {
			if unit := benchUnit(f); f.Better != "" && !told[unit] {
				told[unit] = true
				fmt.Fprintf(b, "Unit %s better=%s\n", unit, f.Better)
			}
		}
	}
	for _, k := range r.Kernels {
		benchConfig(b, "kernel", k.Name, "release", k.Release, "cpu", k.CPU)
		for _, row := range r.Rows {
			if row.Kernel == k.Name && row.Failed == "" {
				d, _ := s.Experiment(row.Experiment)
				benchLine(b, d, row, max(k.CPUs, 1))
			}
		}
	}
	return b.Flush()
}

// benchConfig are keys with their values, as far as there are such.
func benchConfig(b *bufio.Writer, pairs ...string) {
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			fmt.Fprintf(b, "%s: %s\n", pairs[i], pairs[i+1])
		}
	}
}

// benchLine is a turn with figures.
func benchLine(b *bufio.Writer, d study.Description, row study.Row, processors int) {
	var values strings.Builder
	for _, f := range d.Figures {
		if v, ok := row.Figures[f.Name]; ok && !math.IsNaN(v) && !math.IsInf(v, 0) {
			fmt.Fprintf(&values, " %.6g %s", v, benchUnit(f))
		}
	}
	if values.Len() == 0 {
		return
	}
	fmt.Fprintf(b, "Benchmark%s%s", strings.ToUpper(row.Experiment[:1]), row.Experiment[1:])
	if row.Case != "" {
		fmt.Fprintf(b, "/case=%s", benchWord(row.Case))
	}
	if row.Size > 0 {
		fmt.Fprintf(b, "/%s=%d", benchWord(d.Axis), row.Size)
	}
	fmt.Fprintf(b, "/who=%s-%d 1%s\n", benchWord(row.Contender), processors, values.String())
}

// benchWord has neither spaces nor slashes, which end a part of a name.
func benchWord(text string) string { return strings.NewReplacer(" ", "_", "/", "_").Replace(text) }

// benchUnit is a figure with its unit, which tells figures apart.
func benchUnit(f study.Figure) string {
	unit := map[study.Unit]string{
		study.Seconds: "sec", study.Bytes: "B", study.BitRate: "bit/sec", study.PerSecond: "1/sec", study.Share: "share",
	}[f.Unit]
	return strings.Join(slices.DeleteFunc([]string{benchWord(f.Name), unit}, func(s string) bool { return s == "" }), "-")
}
