package study

import (
	"context"
	"errors"
	"time"
)

// footprintExperiment starts proxies and looks at what they take.
func footprintExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "footprint", Axis: servicesAxis,
			Does: "what starting takes: time, processor time and memory, of the process and the kernel",
			Source: "kubernetes/kubernetes pull requests 126013 and 130119: memory, and time to start, of kube-proxy with " +
				"10,000 Services",
			Figures: []Figure{
				{Name: "memory", Unit: Bytes, Better: Lower, Main: true, Does: "of the process then"},
				{Name: "peak", Unit: Bytes, Better: Lower, Does: "the most until then, with the largest program it has run"},
				{Name: "kernel", Unit: Bytes, Better: Lower, Does: "by how much the memory of the machine's kernel grew"},
				{Name: "start", Unit: Seconds, Better: Lower, Does: "until all Services answered"},
				{Name: "cpu", Unit: Seconds, Better: Lower, Does: "processor time until then, with the programs that it has run"},
			},
		},
		Cells: footprintCells,
	}
}

func footprintCells(d Depth) (cells []Cell) {
	add := func(name string, sizes []int, endpoints int) {
		for _, n := range sizes {
			cells = append(cells, Cell{
				Case: name, Size: n, Cluster: Cluster{Services: n, Endpoints: 1}, Takes: time.Second, Contenders: proxies,
				Turn: func(ctx context.Context, s *Site) (Figures, error) { return footprintTurn(ctx, s, endpoints) },
			})
		}
	}
	add("one endpoint each", byDepth(d, []int{100, 1000}, []int{1, 500, 1000, 5000, 10_000, 20_000}), 1)
	add("ten endpoints each", byDepth(d, []int{100}, []int{100, 1000, 4000}), 10)
	return cells
}

// footprintTurn is on a site of its own: where rules are already, a start is another thing.
func footprintTurn(ctx context.Context, s *Site, endpoints int) (f Figures, err error) {
	if err := awaitKernel(ctx); err != nil {
		return nil, err
	}
	fresh := &Site{Contender: s.Contender, Cluster: s.Cluster, Kernel: s.Kernel}
	fresh.Endpoints = endpoints
	defer func() { err = errors.Join(err, fresh.close()) }()
	catalog := s.Catalog
	if fresh.Cluster != s.Cluster {
		if catalog, err = fresh.catalog(); err != nil {
			return nil, err
		}
	}
	if err := fresh.build(ctx, catalog, s.program); err != nil {
		return nil, err
	}
	const settled = 300 * time.Millisecond // it gives back what only the start has taken
	if err := pause(ctx, settled); err != nil {
		return nil, err
	}
	used, err := fresh.Proxy.Usage()
	if err != nil {
		return nil, err
	}
	return Figures{
		"memory": float64(used.RSS), "peak": float64(used.Peak + used.ChildPeak), "kernel": float64(fresh.KernelMemory),
		"start": fresh.Start.Seconds(), "cpu": used.CPU.Seconds(),
	}, nil
}

// awaitKernel returns when the kernel's memory changes no more, but after a while at the latest: what has ended is
// freed in the background.
func awaitKernel(ctx context.Context) error {
	const glance, little, patience = 50 * time.Millisecond, 64 << 10, time.Second
	for end := time.Now().Add(patience); time.Now().Before(end); {
		before, _ := KernelMemory()
		if err := pause(ctx, glance); err != nil {
			return err
		}
		after, err := KernelMemory()
		if change := after - before; err != nil || max(change, -change) < little {
			return nil // where it cannot be told, there is nothing to wait for
		}
	}
	return nil
}
