package takeover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/internal/xt"
)

// legacy is kube-proxy's chains in the x_tables of the kernel, which iptables-legacy shows.
type legacy struct {
	family family
	tables []string // in which chains can be kube-proxy's
	log    *slog.Logger
	kept   *kept
}

func (l *legacy) tool() string   { return l.family.prefix + "tables-legacy" }
func (l *legacy) String() string { return IPTablesLegacy + " " + l.family.name }

func (l *legacy) find(context.Context) ([]Leftover, error) {
	var found []Leftover
	err := l.each(func(s xt.Socket, table string) error {
		t, err := s.Read(table, nil)
		if err == nil {
			at := Leftover{Backend: IPTablesLegacy, Family: l.family.name, Table: table}
			found = append(found, l.plan(t).leftovers(at, l.tool())...)
		}
		return err
	})
	return found, err
}

func (l *legacy) plan(t *xt.Table) plan {
	p := planOf(t, l.kept.keeps(t.Name, forwardOf(t)))
	l.kept.note(p)
	return p
}

func planOf(t *xt.Table, keepForward bool) plan {
	var chains []string
	var jumps []jump
	for _, c := range t.Chains {
		chains = append(chains, c.Name)
		for e := range t.Entries(c) {
			if e.To != "" && e.To != xt.Next {
				jumps = append(jumps, jump{from: c.Name, fromBase: c.Base, to: e.To, id: e.At})
			}
		}
	}
	return newPlan(t.Name, chains, jumps, keepForward)
}

// forwardOf looks at the chain FORWARD. Its policy is its last rule.
func forwardOf(t *xt.Table) (f forward) {
	for _, c := range t.Chains {
		if !c.Base || c.Name != forwardHook {
			continue
		}
		for e := range t.Entries(c) {
			target, _ := t.TargetName(e.Bytes)
			verdict, ok := t.Verdict(e.Bytes)
			refuses := target == "REJECT" || ok && verdict == xt.Drop
			f.closed = f.closed || refuses && t.Unconditional(e.Bytes)
			f.kube = f.kube || e.To == forwardChain
		}
	}
	return f
}

func (l *legacy) blocked() (blocked bool, err error) {
	err = l.each(func(s xt.Socket, table string) error {
		if table != filterTable {
			return nil
		}
		t, err := s.Read(table, nil)
		if err == nil {
			f := forwardOf(t)
			blocked = f.closed && !f.kube
		}
		return err
	})
	return blocked, err
}

// each calls f for each of the tables that exist, and goes on after errors.
func (l *legacy) each(f func(s xt.Socket, table string) error) error {
	s, err := xt.Open(l.family.v6)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", l.tool(), err)
	}
	defer func() { _ = s.Close() }()
	present, err := s.Present()
	if err != nil {
		return fmt.Errorf("%s: %w", l.tool(), err)
	}
	present = slices.DeleteFunc(present, func(t string) bool { return !slices.Contains(l.tables, t) })
	if bits.UintSize != 64 && len(present) > 0 {
		return fmt.Errorf("%s: on a machine of 32 bits this is left to kube-proxy: run kube-proxy --cleanup", l.tool())
	}
	var errs []error
	for _, table := range present {
		if err := f(s, table); err != nil {
			errs = append(errs, fmt.Errorf("%s, table %s: %w", l.tool(), table, err))
		}
	}
	return errors.Join(errs...)
}

// remove replaces each table by one without kube-proxy's part, which is how the kernel changes these
// tables. Programs that do the same at the same time must wait.
func (l *legacy) remove(ctx context.Context) error {
	found, err := l.find(ctx)
	if err != nil || len(found) == 0 {
		return err
	}
	lock, err := xt.Lock(ctx, l.log)
	if err != nil {
		return fmt.Errorf("%s: %w", l.tool(), err)
	}
	defer lock.Close()
	return l.each(func(s xt.Socket, table string) error {
		t, err := s.Read(table, nil)
		if err != nil {
			return err
		}
		p := l.plan(t)
		if p.empty() || defect.Is(defect.TakeoverChains) {
			return nil
		}
		if err := t.Apply(p.change()); err != nil {
			return err
		}
		counters, err := s.Replace(t)
		if err != nil {
			return fmt.Errorf("replace it: %w", err)
		}
		return s.AddCounters(t, counters)
	})
}

// change is what a plan does to a table of x_tables.
func (p plan) change() *xt.Change {
	c := &xt.Change{Gone: p.chains}
	for _, j := range p.jumps {
		c.Remove = append(c.Remove, xt.Place{Chain: j.from, At: j.id})
	}
	return c
}
