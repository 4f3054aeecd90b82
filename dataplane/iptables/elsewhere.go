package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/localnet"
)

// place is a back end in which there may be something of ours, from an earlier process or from one with other
// Options. Looking there makes no table and loads no module.
type place struct {
	backend
	kind Backend
}

// openPlace looks at the network namespace of the calling thread.
func openPlace(kind Backend, p *Plane) (*place, error) {
	b, err := openBackend(kind, p)
	if err != nil {
		return nil, err
	}
	return &place{b, kind}, nil
}

func openBackend(kind Backend, p *Plane) (backend, error) {
	switch kind {
	case Legacy:
		return openLegacy(p.config.Inject, p.config.Log)
	case NFTables:
		return openNFT(p.config.Inject)
	}
	return nil, fmt.Errorf("back end %q: want %s or %s", kind, Legacy, NFTables)
}

// find are the tables with something of ours, and what that is.
func (l *place) find() (map[tableID]*content, error) {
	found := map[tableID]*content{}
	for _, v6 := range []bool{false, true} {
		present, err := l.present(v6)
		if err != nil {
			return nil, fmt.Errorf("back end %s: %w", l.kind, err)
		}
		for _, name := range tableNames {
			id := tableID{v6, name}
			if !slices.Contains(present, name) {
				continue
			}
			have, err := l.load(id)
			if l.kind == NFTables && errors.Is(err, unix.EINVAL) { // a kernel without nf_tables
				return nil, nil
			}
			if err != nil {
				return nil, fmt.Errorf("back end %s: %w", l.kind, err)
			}
			if have = have.own(); len(have.chains) > 0 {
				found[id] = have
			}
		}
	}
	return found, nil
}

func recorded(found map[tableID]*content) bool {
	nats := found[tableID{name: tableNames[nat]}]
	if nats == nil {
		return false
	}
	_, ok := nats.chains[chainLocalnet]
	return ok
}

// clear deletes what find has found, and what has come to the same tables since.
func (l *place) clear(ctx context.Context, found map[tableID]*content) error {
	if len(found) == 0 {
		return nil
	}
	if err := l.begin(ctx); err != nil {
		return err
	}
	defer l.end()
	var changes []*change
	for id := range found {
		have, err := l.load(id) // as it is now, while no other program changes it
		if err != nil {
			return fmt.Errorf("back end %s: %w", l.kind, err)
		}
		have = have.own()
		c, _ := wanted{}.difference(l.backend, id, have)
		if c.baseRules(l.backend, have, false); !c.empty() {
			changes = append(changes, c)
		}
	}
	// First filter and then nat, so that no rule refuses what another plane translates, and nat does not any more.
	slices.SortFunc(changes, func(a, b *change) int { return strings.Compare(a.table.String(), b.table.String()) })
	if err := l.write(changes); err != nil {
		return fmt.Errorf("back end %s: %w", l.kind, err)
	}
	for id := range found {
		if err := l.tidy(id); err != nil {
			return fmt.Errorf("back end %s: %w", l.kind, err)
		}
	}
	return nil
}

// own leaves kube-proxy's out. If there is a chain that only kube-proxy makes, kube-proxy has also written the shared
// ones. If there is none that only Fairlead makes, the chains are all of others.
func (c *content) own() *content {
	there := func(kind func(string) bool) bool {
		for name := range c.chains {
			if name != chainCanary && name != chainKubePost && kind(name) {
				return true
			}
		}
		return false
	}
	mine := &content{chains: map[string][]uint64{}}
	if !there(onlyOurs) {
		return mine
	}
	kubeProxy := there(kubeProxys)
	isMine := func(name string) bool { return onlyOurs(name) || shared(name) && !kubeProxy }
	for name, marks := range c.chains {
		if isMine(name) {
			mine.chains[name] = marks
		}
	}
	for _, f := range c.base {
		if isMine(f.to) {
			mine.base = append(mine.base, f)
		}
	}
	return mine
}

// openElsewhere looks at the back end that is not in use.
func (p *Plane) openElsewhere() (err error) {
	kind := Legacy
	if p.options.Backend == Legacy {
		kind = NFTables
	}
	if p.elsewhere, err = openPlace(kind, p); errors.Is(err, dataplane.ErrUnsupported) {
		return nil // so there is nothing of ours
	}
	return err
}

// leftElsewhere is what is left there, before the first Sync.
func (p *Plane) leftElsewhere() (found map[tableID]*content, err error) {
	p.wasOff = false
	if p.elsewhere != nil {
		found, err = p.elsewhere.find()
		p.wasOff = recorded(found)
	}
	return found, err
}

// leave deletes what is left in the back end that is not in use.
func (p *Plane) leave(ctx context.Context, found map[tableID]*content) error {
	if p.elsewhere == nil {
		return nil
	}
	if err := p.elsewhere.clear(ctx, found); err != nil {
		return err
	}
	if len(found) > 0 {
		p.config.Log.Info("removed what was left in the other back end of iptables", "variant", p.elsewhere.kind)
	}
	err := p.elsewhere.close()
	p.elsewhere = nil
	return err
}

// inspect tells what this data plane, with whatever Options, has left in the network namespace of the calling thread.
func inspect() (dataplane.Leftover, error) {
	var t dataplane.Leftover
	err := eachPlace(&Plane{}, func(l *place) error {
		found, err := l.find()
		t.Rules = t.Rules || len(found) > 0
		t.LocalnetWasOff = t.LocalnetWasOff || recorded(found)
		return err
	})
	return t, err
}

// removeLeft deletes that.
func removeLeft(ctx context.Context, c dataplane.Config) (err error) {
	p := &Plane{config: c}
	if p.config.Log == nil {
		p.config.Log = slog.New(slog.DiscardHandler)
	}
	if p.ipsets, err = openIPSets(p.config.Inject); err != nil {
		return err
	}
	p.localnet = localnet.Open()
	defer func() { err = errors.Join(err, p.Close()) }()
	err = eachPlace(p, func(l *place) error {
		found, err := l.find()
		if err != nil {
			return err
		}
		if recorded(found) && !c.KeepLocalnet {
			if err := p.localnet.Set("0"); err != nil {
				return err
			}
		}
		return l.clear(ctx, found)
	})
	if err != nil {
		return fmt.Errorf("iptables: %w", err)
	}
	sets, err := p.ipsets.list()
	if err != nil {
		return err
	}
	return p.ipsets.drop(sets)
}

func eachPlace(p *Plane, f func(*place) error) error {
	var errs []error
	for _, kind := range []Backend{Legacy, NFTables} {
		l, err := openPlace(kind, p)
		if errors.Is(err, dataplane.ErrUnsupported) {
			continue // so there is nothing of ours
		}
		if err == nil {
			err = errors.Join(f(l), l.close())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
