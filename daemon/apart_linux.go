package daemon

import (
	"errors"
	"log/slog"
	"slices"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/model"
)

// Present is the data plane of Fairlead that has rules in the kernel, not counting rules that only open connections
// still need; empty: none has. A plane that another one stands behind is asked before that.
func Present() (name string, err error) {
	all := planes()
	slices.SortStableFunc(all, func(p, q plane) int { return model.FalseFirst(q.behind != "", p.behind != "") })
	var errs []error
	for _, p := range all {
		left, err := p.Inspect()
		if left.Rules && !left.Retired {
			return p.Name, nil
		}
		errs = append(errs, err)
	}
	return "", errors.Join(errs...)
}

// Apart is where OpenApart opens a data plane: the empty network namespace of the calling thread, and resources that
// keep the plane from the machine's own one. An empty field means that there is none.
type Apart struct {
	Cgroup string // the cgroup of all sockets there
	BPF    string // a directory in a file system of type bpf
}

// elementsApart are enough for what is measured; by default tables take memory by that of the machine.
const elementsApart = 16384

// OpenApart opens a data plane as the configuration has it, with all that wraps it, to measure it apart from the one
// that serves the node. The caller closes it.
func OpenApart(c *config.Config, name string, at Apart) (dataplane.Dataplane, error) {
	s := planeOf(c, name)
	if s.name == iptablesPlane && s.iptables.Backend == "" {
		s.iptables.Backend, _ = iptables.Detect() // that of the machine; apart from it there are no rules to tell
	}
	if s.name == ebpfPlane {
		if at.Cgroup == "" || at.BPF == "" {
			return nil, errors.New("it needs its own cgroup (version 2) and its own file system of type bpf")
		}
		s.ebpf.CgroupRoot, s.ebpf.BPFRoot, s.ebpf.Acceleration = at.Cgroup, at.BPF, config.EBPFAccelerationOff
		s.ebpf.Sizes = config.EBPFSizes{
			Affinities: elementsApart, Flows: elementsApart, Sockets: elementsApart, Translations: elementsApart,
		}
	}
	p, err := s.openItself(dataplane.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	return p.Dataplane, nil
}
