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
	addr     netip.Addr
	port     uint16
	protocol model.Protocol
}

func (c claim) addrPort() netip.AddrPort { return netip.AddrPortFrom(c.addr, c.port) }

func (c claim) compare(o claim) int {
	return cmp.Or(c.addr.Compare(o.addr), cmp.Compare(c.port, o.port), cmp.Compare(c.protocol, o.protocol))
}

func (c claim) String() string { return fmt.Sprintf("%s/%s", c.addrPort(), c.protocol) }

func (c claim) key(s model.Scope) model.Key {
	return model.Key{Addr: c.addr, Port: c.port, Protocol: c.protocol, Scope: s}
}

// claims are all that the rows need; sorted.
func (r *Rows) claims() []claim {
	all := make([]claim, 0, len(r.Frontends)+len(r.Health))
	for i := range r.Frontends {
		k := &r.Frontends[i].Key
		all = append(all, claim{k.Addr, k.Port, k.Protocol})
	}
	for _, h := range r.Health {
		all = append(all, claim{h.Key.Addr(), h.Key.Port(), model.TCP})
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
		rivals, owner := t.rivals[c], (*entry)(nil)
		if rivals == nil {
			owner = t.owner(c)
		}
		switch {
		case owner == e:
			t.grant(c, rows)
			continue
		case owner != nil:
			rivals = []*entry{owner, e}
		case rivals == nil:
			t.grantFree(c, rows)
			continue
		case !slices.Contains(rivals, e):
			rivals = append(rivals, e)
		}
		t.rivals[c] = rivals
		t.contested[c] = struct{}{}
		t.compiled[e] = rows
	}
}

// owner is the Service that has a claim, by the rows in force; nil: nobody has it.
func (t *Table) owner(c claim) *entry {
	scope := model.Any
	if c.addr.IsLoopback() { // clients from elsewhere have no row there; on all others they have one
		scope = model.Internal
	}
	name := (*t.frontends.rows)[c.key(scope)].Service
	if name == "" && c.protocol == model.TCP {
		name = (*t.health.rows)[c.addrPort()].Service
	}
	if name == "" {
		return nil
	}
	return t.entries[rowOwner(name)]
}

// wanted are all Services that want a claim, those that have not got it among them.
func (t *Table) wanted(c claim) []*entry {
	if rivals := t.rivals[c]; rivals != nil {
		return rivals
	}
	if e := t.owner(c); e != nil {
		return []*entry{e}
	}
	return nil
}

func (t *Table) release(c claim, e *entry) {
	rivals := t.rivals[c]
	if i := slices.Index(rivals, e); i >= 0 {
		rivals = slices.Delete(rivals, i, i+1)
		t.contested[c] = struct{}{}
	}
	if len(rivals) > 0 {
		t.rivals[c] = rivals
		return
	}
	delete(t.rivals, c)
	t.grant(c, &Rows{})
}

// grant gives the claim to the rows of one Service; what was there before goes.
func (t *Table) grant(c claim, rows *Rows) {
	for _, scope := range []model.Scope{model.Any, model.Internal} {
		if key := c.key(scope); rows.frontend(key) == nil {
			t.leave(t.frontends.remove(key), model.PoolID{})
		}
	}
	if c.protocol == model.TCP && rows.healthOf(c) == nil {
		t.health.remove(c.addrPort())
	}
	t.grantFree(c, rows)
}

// grantFree gives a claim that nobody has to the rows of one Service.
func (t *Table) grantFree(c claim, rows *Rows) {
	for _, scope := range []model.Scope{model.Any, model.Internal} {
		key := c.key(scope)
		if f := rows.frontend(key); f != nil {
			t.leave(t.frontends.put(key, *f), f.Pool)
		}
	}
	if c.protocol == model.TCP {
		if h := rows.healthOf(c); h != nil {
			t.health.put(c.addrPort(), *h)
		}
	}
}

// leave notes that a Frontend does not lead any more to the pool that it led to.
func (t *Table) leave(old model.Frontend, pool model.PoolID) {
	if old.Verdict == model.Forward && old.Pool != pool {
		t.left = append(t.left, old.Pool)
	}
}

// frontend is nil if there is none.
func (r *Rows) frontend(key model.Key) *model.Frontend {
	i, ok := slices.BinarySearchFunc(r.Frontends, key, func(r model.Row[model.Key, model.Frontend], k model.Key) int {
		return r.Key.Compare(k)
	})
	if !ok {
		return nil
	}
	return &r.Frontends[i].Value
}

// healthOf is nil if there is none.
func (r *Rows) healthOf(c claim) *model.Health {
	i := slices.IndexFunc(r.Health, func(r model.Row[netip.AddrPort, model.Health]) bool { return r.Key == c.addrPort() })
	if i < 0 {
		return nil
	}
	return &r.Health[i].Value
}

// settle gives a contested claim to the Service that came first, and says so to the others.
func (t *Table) settle(c claim) {
	entries := t.rivals[c]
	if len(entries) < 2 {
		delete(t.rivals, c)
	}
	if len(entries) == 0 {
		delete(t.lost, c)
		return
	}
	winner := slices.MinFunc(entries, (*entry).compare)
	var lost []Problem
	for _, e := range entries {
		if t.compiled[e] == nil {
			t.compiled[e] = t.rows(e, &compiler{})
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
	return cmp.Or(cmp.Compare(e.service.Created, o.service.Created),
		cmp.Compare(e.service.Name.Namespace, o.service.Name.Namespace),
		cmp.Compare(e.service.Name.Name, o.service.Name.Name))
}

// loss is what a Service is told that wants what another one has. It is the same for all of the
// node's addresses.
func (t *Table) loss(c claim, loser, winner *entry) Problem {
	x := t.view.find(loser.service, c)
	what := fmt.Sprintf("%s %s", x.kind, c)
	if x.kind == atNodePort || x.kind == atHealthCheck {
		what = fmt.Sprintf("%s %d/%s", x.kind, c.port, c.protocol)
	}
	return Problem{"Service " + loser.service.Name.String(), what,
		fmt.Sprintf("belongs to Service %s, which came first; this one is not reached there", winner.service.Name)}
}
