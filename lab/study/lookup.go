package study

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// lookupExperiment asks what the search through the rules takes.
func lookupExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "lookup",
			Does: "what the rules add to a new connection to the first and to the last Service",
			Source: "Xie and Hoole, Huawei: Scale Kubernetes to Support 50,000 Services (KubeCon Europe 2017, " +
				"slideshare.net/LCChina/scale-kubernetes-to-support-50000-services)",
			Axis: servicesAxis, Figures: []Figure{
				{Name: "connect", Unit: Seconds, Better: Lower, Main: true, Does: "the system call connect(2), median"},
				{Name: "p10", Unit: Seconds, Better: Lower, Does: "a tenth are faster: what is disturbed least"},
				{Name: "p99", Unit: Seconds, Better: Lower, Does: "a hundredth are slower"},
			},
		},
		Cells: lookupCells, ForIPVS: lookupCells,
	}
}

func lookupCells(d Depth) (cells []Cell) {
	for _, n := range byDepth(d, usual, []int{1, 100, 1000, 4000, 5000, 10_000, 20_000, 30_000, 40_000}) {
		cells = append(cells, atEnds(Cell{
			Size: n, Cluster: Cluster{Services: n, Endpoints: 1},
			Takes:      100 * time.Millisecond,
			Contenders: withRules(n),
		}, func(_ context.Context, s *Site, to netip.AddrPort) (Figures, error) {
			return lookupTurn(s, to, 500)
		})...)
	}
	return cells
}

// atEnds are a cell's turns with the Service that comes first where rules are tried one after the other, and with the
// one that comes last.
func atEnds(c Cell, turn func(context.Context, *Site, netip.AddrPort) (Figures, error)) (cells []Cell) {
	for _, name := range []string{"first Service", "last Service"} {
		c.Case = name
		c.Turn = func(ctx context.Context, s *Site) (Figures, error) {
			all, err := s.inOrder(ctx)
			if err != nil {
				return nil, err
			}
			return turn(ctx, s, map[string]netip.AddrPort{"first Service": all[0], "last Service": all[len(all)-1]}[name])
		}
		cells = append(cells, c)
	}
	return cells
}

// withRules leaves out mode userspace: there the proxy answers the connection, and only then looks for a backend.
func withRules(services int) func([]Contender) []Contender {
	able := ableToHold(services)
	return func(all []Contender) []Contender {
		if able != nil {
			all = able(all)
		}
		return slices.DeleteFunc(all, func(c Contender) bool { return c.Plane == userspacePlane })
	}
}

func lookupTurn(s *Site, to netip.AddrPort, connections int) (f Figures, err error) {
	loop, err := s.loop()
	if err != nil {
		return nil, err
	}
	loop.Ask(to)
	// A program that has just listed rules has filled the processor's caches, so no contender is measured before.
	if _, err := loop.Connects(connections / 10); err != nil {
		return nil, err
	}
	took, err := loop.Connects(connections)
	if err != nil {
		return nil, err
	}
	var all traffic.Histogram
	for _, d := range took {
		all.Record(d)
	}
	return Figures{
		"connect": all.Quantile(0.5).Seconds(), "p10": all.Quantile(0.1).Seconds(), "p99": all.Quantile(0.99).Seconds(),
	}, nil
}

// loop is a client and all backends in one thread, in place of the server.
func (s *Site) loop() (loop *traffic.Loop, err error) {
	if s.workers.loop != nil {
		return s.workers.loop, nil
	}
	if err := errors.Join(s.closeServer(), s.Bed.StopServing(string(ServerPod))); err != nil {
		return nil, err
	}
	s.workers.loop, err = traffic.NewLoop(s.Bed, ClientPod, ServerPod, s.ports())
	return s.workers.loop, err
}

// inOrder are all Services in the order in which rules are tried. kube-proxy's mode iptables writes them in one of its
// own, which may be another one with each change; all others look them up.
func (s *Site) inOrder(ctx context.Context) (all []netip.AddrPort, err error) {
	for i := range s.Services {
		all = append(all, s.Service(i))
	}
	if s.Kind != Peer || s.Plane != iptablesPlane {
		return all, nil
	}
	program, args := "iptables-save", []string{"-t", "nat"}
	if s.Legacy {
		program, args = legacyProgram(), append([]string{"iptables-save"}, args...)
	}
	rules, err := s.Bed.Command(ctx, testbed.Node, program, args...).Output()
	if err != nil {
		return nil, fmt.Errorf("list the rules of %s: %w", s.Name, err)
	}
	all, err = serviceRules(string(rules))
	if s.theirs { // others lead elsewhere
		all = slices.DeleteFunc(all, func(a netip.AddrPort) bool { return !s.leads(a) })
	}
	return all, err
}

// serviceRules are the Services in the list that kube-proxy's mode iptables makes.
func serviceRules(rules string) (all []netip.AddrPort, err error) {
	rule := regexp.MustCompile(`(?m)^-A KUBE-SERVICES -d ([^/ ]+)\S* .*--dport (\d+) -j KUBE-SVC-`)
	for _, words := range rule.FindAllStringSubmatch(rules, -1) {
		to, err := netip.ParseAddrPort(words[1] + ":" + words[2])
		if err != nil {
			return nil, fmt.Errorf("the rule %q: %w", words[0], err)
		}
		all = append(all, to)
	}
	if len(all) == 0 {
		return nil, errors.New("KUBE-SERVICES has no Service")
	}
	return all, nil
}
