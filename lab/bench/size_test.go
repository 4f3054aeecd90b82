package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// BenchmarkSize compares the agent with kube-proxy, both compiled with -trimpath, -ldflags "-s -w" and without cgo. It
// measures the bytes of the file, and the memory three seconds after all Services of one API server have answered.
func BenchmarkSize(b *testing.B) {
	agent, control := newContestant(b, rivals()[0]), newContestant(b, rivals()[1])
	n := sizesOf(b, "1000")[0]
	if n < probedServices {
		b.Fatalf("%s: %d Services are too few, %d are probed", sizesVariable, n, probedServices)
	}
	c := newCluster(b, n)
	order := []*contestant{agent, control}
	for next := rounds(b, roundsOf(b, 5)); next(); {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, k := range order {
			if err := k.run(b, c, (*run).measureMemory); err != nil {
				b.Fatalf("%s: %v", k.name, err)
			}
		}
	}
	reportSize(b, n, agent, control)
}

func newContestant(b *testing.B, r rival) *contestant {
	b.Helper()
	return &contestant{rival: r, path: r.program(b), vars: r.env(b)}
}

func (r *run) measureMemory(ctx context.Context, o kubernetes.ProxyOptions) error {
	if err := r.measureStart(ctx, o); err != nil {
		return err
	}
	return r.proxy.Kill()
}

// reportSize prints the figures, and those of the agent as a part of the control's.
func reportSize(b *testing.B, n int, agent, control *contestant) {
	b.Helper()
	rows := [][]string{{"program", "bytes of the file", fmt.Sprintf("resident with %d Services × %d", n, perService),
		"of these: of the file", "anonymous"}}
	for _, k := range []*contestant{agent, control} {
		rows = append(rows, []string{k.name, fmt.Sprintf("%.0f", k.fileSize(b)), megabytes(k.settled), megabytes(k.mapped()),
			megabytes(k.anonymous)})
	}
	file, memory := agent.fileSize(b)/control.fileSize(b), agent.settled.Ratio(control.settled)
	rows = append(rows, []string{"ratio", fmt.Sprintf("%.3f", file), memory.String(),
		agent.mapped().Ratio(control.mapped()).String(), agent.anonymous.Ratio(control.anonymous).String()})
	b.ReportMetric(agent.fileSize(b), "bytes:file")
	b.ReportMetric(file, "file-ratio")
	b.ReportMetric(memory.Median, "memory-ratio")
	printTable(fmt.Sprintf("size: medians of %d starts; ratios with the bounds of 95 %%", len(agent.settled)), rows...)
}

// fileSize is the program's, in bytes.
func (k *contestant) fileSize(b *testing.B) float64 {
	b.Helper()
	info, err := os.Stat(k.path)
	if err != nil {
		b.Fatal(err)
	}
	return float64(info.Size())
}

// mapped is what is resident of files, nearly all of it the program's own.
func (k *contestant) mapped() Series {
	mapped := slices.Clone(k.settled)
	for i := range mapped {
		mapped[i] -= k.anonymous[i]
	}
	return mapped
}
