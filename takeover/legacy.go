package takeover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"slices"

	"fairlead.dev/fairlead/internal/defect"
	"fairlead.dev/fairlead/xtables"
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

// present are those of the tables that exist. To ask for one that does not would make it, with its hooks.
func (l *legacy) present() ([]string, error) {
	exist, err := xtables.Present(l.family.v6)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", l.tool(), err)
	}
	return slices.DeleteFunc(slices.Clone(l.tables), func(t string) bool { return !slices.Contains(exist, t) }), nil
}

func (l *legacy) find(context.Context) ([]Leftover, error) {
	var found []Leftover
	err := l.each(func(s xtables.Socket, table string) error {
		blob, err := readXT(s, l.family.v6, table)
		if err == nil {
			found = append(found, l.leftovers(l.plan(blob, table), table)...)
		}
		return err
	})
	return found, err
}

func (l *legacy) plan(b *xtBlob, table string) plan {
	p := b.plan(table, l.kept.keeps(table, b.forward()))
	l.kept.note(p)
	return p
}

func (l *legacy) blocked() (blocked bool, err error) {
	err = l.each(func(s xtables.Socket, table string) error {
		if table != filterTable {
			return nil
		}
		blob, err := readXT(s, l.family.v6, table)
		if err == nil {
			f := blob.forward()
			blocked = f.closed && !f.kube
		}
		return err
	})
	return blocked, err
}

func (l *legacy) leftovers(p plan, table string) []Leftover {
	return p.leftovers(Leftover{Backend: IPTablesLegacy, Family: l.family.name, Table: table}, l.tool())
}

// each calls f for each of the tables that exist, and goes on after errors.
func (l *legacy) each(f func(s xtables.Socket, table string) error) error {
	present, err := l.present()
	if err != nil || len(present) == 0 {
		return err
	}
	if bits.UintSize != 64 {
		return fmt.Errorf("%s: on a machine of 32 bits this is left to kube-proxy: run kube-proxy --cleanup", l.tool())
	}
	s, err := xtables.Open(l.family.v6)
	if err != nil {
		return fmt.Errorf("%s: %w", l.tool(), err)
	}
	defer func() { _ = s.Close() }()
	var errs []error
	for _, table := range present {
		if err := f(s, table); err != nil {
			errs = append(errs, fmt.Errorf("%s, table %s: %w", l.tool(), table, err))
		}
	}
	return errors.Join(errs...)
}

// remove replaces each table by one without kube-proxy's part, which is how the kernel changes these
// tables. Others who do the same at the same time must wait.
func (l *legacy) remove(ctx context.Context) error {
	found, err := l.find(ctx)
	if err != nil || len(found) == 0 {
		return err
	}
	lock, err := xtables.Lock(ctx, l.log)
	if err != nil {
		return fmt.Errorf("%s: %w", l.tool(), err)
	}
	defer lock.Close()
	return l.each(func(s xtables.Socket, table string) error {
		blob, err := readXT(s, l.family.v6, table)
		if err != nil {
			return err
		}
		p := l.plan(blob, table)
		if p.empty() || defect.Is(defect.TakeoverChains) {
			return nil
		}
		return replaceXT(s, table, blob, blob.without(p))
	})
}
