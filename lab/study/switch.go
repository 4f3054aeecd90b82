package study

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

// switchExperiment changes the data plane while clients go on.
func switchExperiment() Experiment {
	return Experiment{
		Description: Description{
			Name: "switch",
			Does: "connections lost while the data plane changes; another proxy is started anew for that",
			Source: "nobody has published one: kube-proxy cannot change its mode. What users do instead is to restart it, " +
				"see the blog of Kubernetes on mode nftables (2025-02-28)",
			Figures: append(clientFigures(),
				Figure{Name: "took", Unit: Seconds, Better: Lower, Does: "from the command until the new data plane is in force"}),
		},
		Cells: func(d Depth) []Cell {
			return []Cell{{
				Cluster: Cluster{Services: 1000, Endpoints: 1}, Takes: 2 * time.Second,
				Contenders: byDepth(d, quickPairs, allPairs), Turn: switchTurn,
			}}
		},
	}
}

// quickPairs are those with nftables, if a program has that.
func quickPairs(all []Contender) []Contender {
	hasNFT := func(c Contender) bool {
		return slices.ContainsFunc(all, func(o Contender) bool {
			return o.Plane == nftablesPlane && o.Kind == c.Kind && o.Program == c.Program
		})
	}
	return slices.DeleteFunc(allPairs(all), func(c Contender) bool {
		return c.To != "" && c.Plane != nftablesPlane && c.To != nftablesPlane && hasNFT(c)
	})
}

// allPairs are all ordered pairs of each program's data planes in place of those. A change between the two kernel
// interfaces of iptables is none of data planes.
func allPairs(all []Contender) (pairs []Contender) {
	legacy := slices.ContainsFunc(all, func(c Contender) bool { return c.Kind == Fairlead && c.Plane == iptablesPlane })
	for _, from := range all {
		if from.Kind == Direct || from.Kind == Again {
			pairs = append(pairs, from)
			continue
		}
		for _, to := range all {
			same := from.Kind == to.Kind && from.Program == to.Program && from.mode() != to.mode()
			if dropped := legacy && (from.Plane == legacyPlane || to.Plane == legacyPlane); same && !dropped {
				pairs = append(pairs, pairOf(from, to))
			}
		}
	}
	return pairs
}

func pairOf(from, to Contender) Contender {
	from.To = to.Plane
	_, short, found := strings.Cut(to.Name, " ")
	if !found {
		short = to.Name
	}
	from.Name += " → " + short
	from.Legacy = from.Legacy || to.Legacy
	if backend := to.backend(); backend != "" && from.backend() == "" && from.Kind == Fairlead {
		from.Args = append(slices.Clone(from.Args), "--iptables-backend="+backend)
	}
	return from
}

func switchTurn(ctx context.Context, s *Site) (f Figures, err error) {
	if err := s.answerProbes(); err != nil { // for the start of another program
		return nil, err
	}
	d, err := s.deploy(ctx, 1, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	c, err := d.ask(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer c.abandon(ctx)
	const before, after = 300 * time.Millisecond, 300 * time.Millisecond
	if err := pause(ctx, before); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.changeBack(ctx)) }()
	begin := time.Now()
	if err := s.change(ctx, s.To); err != nil {
		return nil, err
	}
	took := time.Since(begin)
	if err := pause(ctx, after); err != nil {
		return nil, err
	}
	f, err = c.stop(ctx)
	if s.Proxy != nil && err == nil {
		f["took"] = took.Seconds()
	}
	return f, err
}

// changeBack has the site be as it was, whatever became of the turn. If that cannot be, there is no more to be measured
// on it.
func (s *Site) changeBack(ctx context.Context) error {
	const patience = time.Minute
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	err := s.change(ctx, s.Plane)
	if err != nil {
		err = fmt.Errorf("back to %s: %w", s.Plane, err)
		s.fail(fmt.Errorf("%s: %w", s.Name, err))
	}
	return err
}

// change has the proxy change its data plane: Fairlead by its own command, others by a start in that mode.
func (s *Site) change(ctx context.Context, to string) error {
	mode := Contender{Plane: to}.mode()
	switch {
	case s.Proxy == nil:
		return pause(ctx, 100*time.Millisecond)
	case s.Kind == Peer:
		for i, arg := range s.command {
			if strings.HasPrefix(arg, "--proxy-mode=") {
				s.command[i] = "--proxy-mode=" + mode
			}
		}
		_, err := s.restart(ctx, s.await)
		return err
	}
	program := append(slices.Clone(s.program), "switch", mode, "--control-socket", s.ControlSocket)
	text, err := s.Bed.Command(ctx, testbed.Node, program[0], program[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(program[len(s.program):], " "), err, strings.TrimSpace(string(text)))
	}
	return nil
}
