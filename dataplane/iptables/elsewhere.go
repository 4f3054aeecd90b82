package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane"
)

// place is a back end in which there may be something of ours, from this process, an earlier one or one with other
// Options. Looking there makes no table and loads no module.
type place struct {
	backend
	kind Backend
}

// openPlace looks at the network namespace of the calling thread.
func openPlace(kind Backend, c dataplane.Config) (*place, error) {
	var b backend
	var err error
	switch kind {
	case Legacy:
		b, err = openLegacy(c.Inject, c.Log)
	case NFTables:
		b, err = openNFT(c.Inject, c.Counters != dataplane.NoDetail)
	default:
		err = fmt.Errorf("back end %q: want %s or %s", kind, Legacy, NFTables)
	}
	if err != nil {
		return nil, err
	}
	return &place{b, kind}, nil
}

// openPlaces opens both back ends. That the kernel lacks the one that is not in use is no error: there is nothing of
// ours.
func (p *Plane) openPlaces() (err error) {
	other := Legacy
	if p.options.Backend == Legacy {
		other = NFTables
	}
	if p.ipsets, err = openIPSets(p.config.Inject); err != nil {
		return err
	}
	if p.elsewhere, err = openPlace(other, p.config); err != nil && !errors.Is(err, dataplane.ErrUnsupported) {
		return err
	}
	p.backend, err = openPlace(p.options.Backend, p.config)
	return err
}

// find are the tables with something of ours, and what that is.
func (l *place) find() (map[tableID]*content, error) {
	found := map[tableID]*content{}
	for _, id := range tablesOf(false, true) {
		present, err := l.present(id.v6)
		if err == nil && slices.Contains(present, id.name) {
			found[id], err = l.loadOwn(id)
		}
		if err != nil {
			return nil, fmt.Errorf("back end %s: %w", l.kind, err)
		}
	}
	maps.DeleteFunc(found, func(_ tableID, have *content) bool { return len(have.chains) == 0 })
	return found, nil
}

// loadOwn reads what is ours of a table.
func (l *place) loadOwn(id tableID) (*content, error) {
	have, err := l.load(id)
	if err != nil {
		return nil, err
	}
	return have.own(), nil
}

// recorded reports whether there is the chain that says that route_localnet was off before. The record is a chain so
// that it stays and goes with the rules, whatever process finds them.
func recorded(found map[tableID]*content) bool {
	nats := found[tableID{name: tableNames[nat]}]
	if nats == nil {
		return false
	}
	_, ok := nats.chains[chainLocalnet]
	return ok
}

// clear deletes what find has found, and what has come to the same tables since. Where there is nothing it does not
// take the lock, which only root may open.
func (l *place) clear(ctx context.Context, found map[tableID]*content) (err error) {
	if len(found) > 0 {
		err = l.deleteOwn(ctx, found)
	}
	for _, id := range tablesOf(false, true) {
		if err == nil {
			err = l.tidy(id)
		}
	}
	if err != nil {
		err = fmt.Errorf("back end %s: %w", l.kind, err)
	}
	return err
}

func (l *place) deleteOwn(ctx context.Context, found map[tableID]*content) error {
	if err := l.begin(ctx); err != nil {
		return err
	}
	defer l.end()
	var changes []*change
	for id := range found {
		have, err := l.loadOwn(id) // as it is now, while no other program changes it
		if err != nil {
			return err
		}
		c, _ := wanted{}.difference(l.backend, id, have)
		if c.baseRules(l.backend, have, false); !c.empty() {
			changes = append(changes, c)
		}
	}
	// First filter and then nat, so that no rule refuses what another plane translates, and nat does not any more.
	slices.SortFunc(changes, func(a, b *change) int { return strings.Compare(a.table.String(), b.table.String()) })
	return l.write(changes)
}

// own leaves kube-proxy's out: a removal must not break a kube-proxy that has come back while this process was away. If
// there is a chain that only kube-proxy makes, kube-proxy has also written the shared ones. If there is none that only
// Fairlead makes, the chains are all of others.
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

// leftElsewhere is what is left there, before the first Sync.
func (p *Plane) leftElsewhere() (found map[tableID]*content, err error) {
	if p.elsewhere != nil {
		found, err = p.elsewhere.find()
		p.config.LocalnetWasOff = p.config.LocalnetWasOff || recorded(found)
	}
	return found, err
}

// leave deletes what is left in the back end that is not in use.
func (p *Plane) leave(ctx context.Context, found map[tableID]*content) error {
	if p.elsewhere == nil {
		return nil
	}
	if len(found) > 0 {
		if err := p.elsewhere.clear(ctx, found); err != nil {
			return err
		}
		p.config.Log.Info("removed leftovers in the other variant of iptables", "variant", p.elsewhere.kind)
	}
	err := p.elsewhere.close()
	p.elsewhere = nil
	return err
}

// look makes a plane that is not asked to program anything. It sees both back ends, those that the kernel has.
func look(c dataplane.Config) (*Plane, error) {
	p := unopened(Options{Backend: NFTables}, c)
	if err := p.openPlaces(); err != nil && !errors.Is(err, dataplane.ErrUnsupported) {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// places are the back ends in which there may be something of ours.
func (p *Plane) places() []*place {
	return slices.DeleteFunc([]*place{p.backend, p.elsewhere}, func(l *place) bool { return l == nil })
}

// inspect tells what this data plane, with whatever Options, has left in the network namespace of the calling thread.
func inspect() (t dataplane.Leftover, err error) {
	p, err := look(dataplane.Config{})
	if err != nil {
		return t, err
	}
	for _, l := range p.places() {
		found, failed := l.find()
		t.Rules = t.Rules || len(found) > 0
		t.LocalnetWasOff = t.LocalnetWasOff || recorded(found)
		err = errors.Join(err, failed)
	}
	return t, errors.Join(err, p.Close())
}

// removeFrom deletes the chains of a back end. It switches route_localnet off first, if that was off before and is not
// to be kept.
func (p *Plane) removeFrom(ctx context.Context, l *place) error {
	found, err := l.find()
	if err != nil {
		return err
	}
	if recorded(found) && !p.config.KeepLocalnet {
		if err := p.localnet.Set("0"); err != nil {
			return err
		}
	}
	return l.clear(ctx, found)
}
