package daemon

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"fairlead.dev/fairlead/advise"
	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/model"
)

// Question is what Recommend is asked.
type Question struct {
	Config   *config.Config
	State    *model.State // the node's rows
	Traffic  advise.Traffic
	Duration time.Duration
	Progress func(plane string, n, of int)
}

// Recommend finds the data plane that suits this machine. It changes nothing here, and returns when nothing of its
// measurements is left.
func Recommend(ctx context.Context, q Question) advise.Report {
	begin := time.Now()
	m := advise.Measure(ctx, advise.Options{
		Planes: candidates(q.Config), State: q.State, Duration: q.Duration, Progress: q.Progress,
	})
	took := time.Since(begin)
	m.Wait()
	c := advise.Case{Rows: advise.Count(q.State), Traffic: q.Traffic, Findings: m.Findings}
	there, _ := present() // who may not look does not learn it
	return advise.NewReport(c, there, took)
}

// present is the data plane of ours that has rules in the kernel, and not only for connections that are open; empty:
// none has. One that another one stands behind is asked before that.
func present() (name string, err error) {
	all := planes()
	slices.SortStableFunc(all, func(p, q plane) int { return model.FalseFirst(q.behind != "", p.behind != "") })
	var errs []error
	for _, p := range all {
		left, err := p.traces()
		if left.Rules && !left.Retired {
			return p.name, nil
		}
		errs = append(errs, err)
	}
	return "", errors.Join(errs...)
}

// candidates are the data planes, each as the configuration has it, but in a place of its own.
func candidates(c *config.Config) (all []advise.Plane) {
	for _, p := range planes() {
		s := planeOf(c, p.name)
		if p.name == iptablesPlane && s.iptables.Backend == "" {
			s.iptables.Backend, _ = iptables.Detect() // that of the machine; there is nothing of it in a scratch cluster
		}
		all = append(all, advise.Plane{Name: p.name, Open: s.openIn})
	}
	return all
}

// fewElements are enough for what is measured; by default tables take memory by that of the machine.
const fewElements = 16384

// openIn opens a plane in a scratch cluster.
func (s planeSettings) openIn(at advise.Place) (dataplane.Dataplane, error) {
	if s.name == ebpfPlane {
		if at.Cgroup == "" || at.BPF == "" {
			return nil, errors.New("it needs a control group (version 2) and a file system for programs of its own")
		}
		s.ebpf.CgroupRoot, s.ebpf.BPFRoot, s.ebpf.Acceleration = at.Cgroup, at.BPF, config.EBPFAccelerationOff
		s.ebpf.Sizes = config.EBPFSizes{
			Affinities: fewElements, Flows: fewElements, Sockets: fewElements, Translations: fewElements,
		}
	}
	o, err := s.openItself(dataplane.Config{Log: slog.New(slog.DiscardHandler)})
	return o.Dataplane, err
}
