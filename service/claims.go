package service

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// claim is what only one Service can have: an address, port and protocol. A health check server
// needs it for TCP.
type claim struct {
	netip.AddrPort
	protocol model.Protocol
}

func (c claim) compare(o claim) int {
	return cmp.Or(c.Compare(o.AddrPort), cmp.Compare(c.protocol, o.protocol))
}

func (c claim) String() string { return fmt.Sprintf("%s/%s", c.AddrPort, c.protocol) }

func (c claim) key(s model.Scope) model.Key {
	return model.Key{Addr: c.Addr(), Port: c.Port(), Protocol: c.protocol, Scope: s}
}

// claims are all that the rows need; sorted.
func (r *Rows) claims() []claim {
	all := make([]claim, 0, len(r.Frontends)+len(r.Health))
	for i := range r.Frontends {
		k := &r.Frontends[i].Key
		all = append(all, claim{k.AddrPort(), k.Protocol})
	}
	for _, h := range r.Health {
		all = append(all, claim{h.Key, model.TCP})
	}
	slices.SortFunc(all, claim.compare)
	return slices.Compact(all)
}

// claim brings up to date what a Service wants, and sets the rows that nobody else wants.
func (t *Table) claim(e *entry, rows *Rows) {
	old := e.claims
	e.claims = rows.claims()
	for _, c := range old {
		if _, kept := slices.BinarySearchFunc(e.claims, c, claim.compare); !kept {
			t.release(c, e)
		}
	}
	for _, c := range e.claims {
		wanted := t.claims[c]
		if !slices.Contains(wanted, e) {
			wanted = append(wanted, e)
			t.claims[c] = wanted
		}
		if len(wanted) == 1 {
			t.grant(c, rows)
			continue
		}
		t.contested[c] = struct{}{}
		t.compiled[e] = rows
	}
}

func (t *Table) release(c claim, e *entry) {
	i := slices.Index(t.claims[c], e)
	if t.claims[c] = slices.Delete(t.claims[c], i, i+1); len(t.claims[c]) > 0 {
		t.contested[c] = struct{}{}
		return
	}
	delete(t.claims, c)
	t.grant(c, &Rows{})
}

// grant gives the claim to the rows of one Service; what was there before goes.
func (t *Table) grant(c claim, rows *Rows) {
	for _, scope := range []model.Scope{model.Any, model.Internal} {
		key := c.key(scope)
		i, ok := slices.BinarySearchFunc(rows.Frontends, key, func(r Row[model.Key, model.Frontend], k model.Key) int {
			return r.Key.Compare(k)
		})
		if ok {
			t.frontends.set(key, rows.Frontends[i].Value)
		} else {
			t.frontends.remove(key)
		}
	}
	if c.protocol != model.TCP {
		return
	}
	i := slices.IndexFunc(rows.Health, func(r Row[netip.AddrPort, model.Health]) bool { return r.Key == c.AddrPort })
	if i >= 0 {
		t.health.set(c.AddrPort, rows.Health[i].Value)
	} else {
		t.health.remove(c.AddrPort)
	}
}

// settle gives a contested claim to the Service that came first, and says so to the others.
func (t *Table) settle(c claim) {
	entries := t.claims[c]
	if len(entries) == 0 {
		delete(t.lost, c)
		return
	}
	winner := slices.MinFunc(entries, (*entry).compare)
	var lost []Problem
	for _, e := range entries {
		if t.compiled[e] == nil {
			t.compiled[e] = t.rows(e)
		}
		if e == winner {
			t.grant(c, t.compiled[e])
		} else {
			lost = append(lost, t.loss(c, e, winner))
		}
	}
	for _, p := range lost {
		if !slices.Contains(t.lost[c], p) {
			t.problems = append(t.problems, p)
		}
	}
	if t.lost[c] = lost; lost == nil {
		delete(t.lost, c)
	}
}

// compare orders Services by their right to an address: the older one first.
func (e *entry) compare(o *entry) int {
	return cmp.Or(e.service.Created.Compare(o.service.Created),
		cmp.Compare(e.name.Namespace, o.name.Namespace), cmp.Compare(e.name.Name, o.name.Name))
}

// loss is what a Service is told that wants what another one has. It is the same for all of the
// node's addresses.
func (t *Table) loss(c claim, loser, winner *entry) Problem {
	x := t.view.find(loser.service, c)
	what := fmt.Sprintf("%s %s", x.kind, c)
	if x.kind == atNodePort || x.kind == atHealthCheck {
		what = fmt.Sprintf("%s %d/%s", x.kind, c.Port(), c.protocol)
	}
	return Problem{"Service " + loser.name.String(), what,
		fmt.Sprintf("belongs to Service %s, which came first; this one is not reached there", winner.name)}
}
