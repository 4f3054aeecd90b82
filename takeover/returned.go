package takeover

import (
	"context"
	"errors"

	"fairlead.dev/fairlead/internal/xt"
)

// signs are the chains to look for, by their table. kube-proxy translates nothing without the first. The second may
// have stayed, and become unnecessary. By the third kube-proxy notices that another program has removed its rules; it
// counts where chains with the first names are the caller's.
var signs = map[string]string{"nat": "KUBE-SERVICES", filterTable: forwardChain, "mangle": "KUBE-PROXY-CANARY"}

// quickLeftover is a kind of leftover that can be sought without looking at everything.
type quickLeftover interface {
	returned(seen map[string]xt.Info) (bool, error)
}

// Returned reports whether a kube-proxy has made something since Remove has removed everything. It is far cheaper than
// Find where other programs have many chains, and sees what matters: rules that translate. A table of iptables-legacy
// that looks as it did last time is not read.
func (t *Takeover) Returned(context.Context) (bool, error) {
	seen := false
	err := t.here.Do(func() error {
		var errs []error
		for _, x := range t.leftoverKinds() {
			if g, ok := x.(quickLeftover); ok {
				yes, err := g.returned(t.seen)
				seen, errs = seen || yes, append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
	return seen, err
}

// returned reads only tables that have changed since they were found free of kube-proxy's chains: reading one with many
// rules takes long.
func (l *legacy) returned(seen map[string]xt.Info) (bool, error) {
	found := false
	err := l.each(func(s xt.Socket, table string) error {
		key := l.String() + " " + table
		info, err := s.Info(table)
		if err != nil || seen[key] == info {
			return err
		}
		read, err := s.Read(table, nil)
		if err != nil {
			return err
		}
		if p := l.plan(read); !p.empty() {
			found = true
			return nil
		}
		seen[key] = info
		return nil
	})
	return found, err
}

// returned looks for one chain in each table. KUBE-FORWARD does not count while FORWARD still needs it: Remove has left
// it there.
func (x *compat) returned(map[string]xt.Info) (bool, error) {
	if err := x.open(); err != nil {
		return false, err
	}
	defer x.close()
	for _, table := range x.tables {
		exists, err := x.chain(table, signs[table], func([]byte) {})
		if err != nil {
			return false, err
		}
		if !exists {
			continue
		}
		if stays, err := x.keepsForward(table); !stays || err != nil {
			return err == nil, err
		}
	}
	return false, nil
}

func (n *native) returned(map[string]xt.Info) (bool, error) {
	found, err := n.find(context.Background())
	return len(found) > 0, err
}

func (v *virtualServers) returned(map[string]xt.Info) (bool, error) {
	dummy, err := findDummy(v.OwnAlias)
	return dummy != nil, err
}
