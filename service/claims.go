package service

import (
	"cmp"
	"fmt"
	"maps"
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

// claimed is a claim of one Service, and what it is for it. There are many: its fields leave no gaps, as they would
// with a claim in it.
type claimed struct {
	addr     netip.Addr
	port     uint16
	protocol model.Protocol
	at       model.Kind
}

func (c *claimed) claim() claim { return claim{c.addr, c.port, c.protocol} }

// contest is a claim of several Services.
type contest struct {
	members map[*entry]model.Kind
	winner  *entry     // when it was settled last; nil: it was not yet
	at      model.Kind // what the claim is for the winner
}

// claim brings up to date what a Service wants, and sets the rows that no other Service wants.
func (t *Table) claim(e *entry, rows *Rows) {
	old := e.claims
	e.claims = slices.Clone(rows.claims)
	for i := range old {
		c := old[i].claim()
		if _, kept := e.wants(c); !kept {
			t.release(c, e)
		}
	}
	for i := range e.claims {
		c, now := e.claims[i].claim(), e.claims[i].at
		x := t.contests[c]
		if x == nil {
			switch owner := t.owner(c); owner {
			case e:
				t.grant(c, rows)
				continue
			case nil:
				t.grantFree(c, rows)
				continue
			default:
				at, _ := owner.wants(c)
				x = &contest{members: map[*entry]model.Kind{owner: at}}
				t.contests[c] = x
			}
		}
		at, known := x.members[e]
		x.members[e] = now
		t.contest(c)
		if !known || at != now {
			t.contested[c] = append(t.contested[c], e)
		}
		t.compiled[e] = rows
	}
}

// wants is what a claim is for a Service that has it.
func (e *entry) wants(c claim) (model.Kind, bool) {
	i, ok := slices.BinarySearchFunc(e.claims, c, func(a claimed, b claim) int { return a.claim().compare(b) })
	if !ok {
		return 0, false
	}
	return e.claims[i].at, true
}

// contest has a claim settled.
func (t *Table) contest(c claim) {
	if _, ok := t.contested[c]; !ok {
		t.contested[c] = nil
	}
}

// owner is the Service that has a claim, by the rows in force; nil: no Service has it.
func (t *Table) owner(c claim) *entry {
	name := (*t.frontends.rows)[c.key(model.Any)].Service
	if name == "" {
		name = (*t.frontends.rows)[c.key(model.Internal)].Service
	}
	if name == "" && c.protocol == model.TCP {
		name = (*t.health.rows)[c.addrPort()].Service
	}
	if name == "" {
		return t.rowless[c]
	}
	return t.entries[rowOwner(name)]
}

// wanted are all Services that want a claim, the one that has it first.
func (t *Table) wanted(c claim) []*entry {
	if x := t.contests[c]; x != nil {
		return slices.SortedFunc(maps.Keys(x.members), x.order)
	}
	if e := t.owner(c); e != nil {
		return []*entry{e}
	}
	return nil
}

func (t *Table) release(c claim, e *entry) {
	if x := t.contests[c]; x != nil {
		delete(x.members, e)
		t.contest(c)
		if len(x.members) > 0 {
			return
		}
		delete(t.contests, c)
	}
	t.grant(c, &Rows{})
}

// grant gives the claim to the rows of one Service; the rows before go.
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

// grantFree gives a free claim to the rows of one Service.
func (t *Table) grantFree(c claim, rows *Rows) {
	rowless := true
	for _, scope := range []model.Scope{model.Any, model.Internal} {
		key := c.key(scope)
		if f := rows.frontend(key); f != nil {
			t.leave(t.frontends.put(key, *f), f.Pool)
			rowless = false
		}
	}
	if c.protocol == model.TCP {
		if h := rows.healthOf(c); h != nil {
			t.health.put(c.addrPort(), *h)
			rowless = false
		}
	}
	if delete(t.rowless, c); rowless && rows.of != nil {
		t.rowless[c] = rows.of
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

// settle gives a contested claim to the Service with the best right. It reports a Problem for the new ones among the
// others, and for all of them if the winner has changed.
func (t *Table) settle(c claim, fresh []*entry) {
	x := t.contests[c]
	if x == nil {
		return
	}
	winner, had := slices.MinFunc(slices.Collect(maps.Keys(x.members)), x.order), t.owner(c)
	if t.compiled[winner] == nil && winner != had {
		t.compiled[winner] = t.rows(winner, &compiler{})
	}
	if rows := t.compiled[winner]; rows != nil { // else its rows are in force
		t.grant(c, rows)
	}
	if x.winner != winner || x.at != x.members[winner] {
		fresh = slices.Collect(maps.Keys(x.members))
	}
	for _, e := range fresh {
		if at, wants := x.members[e]; wants && e != winner && !(at == model.HealthCheckNodePort && t.same(c, winner)) {
			t.problems = append(t.problems, x.loss(c, e, winner))
		}
	}
	if x.winner != nil && x.winner != winner {
		t.ceased = append(t.ceased, "Service "+winner.service.Name.String())
	}
	if x.winner, x.at = winner, x.members[winner]; len(x.members) < 2 {
		delete(t.contests, c)
	}
}

// same reports whether a claim is of a row that says the same for whichever Service: where a load balancer of several
// asks for the health of the node.
func (t *Table) same(c claim, winner *entry) bool {
	at, _ := winner.wants(c)
	return t.view.HNS != nil && at == model.HealthCheckNodePort && c.port == t.view.HNS.Healthz
}

// compare orders Services of the same right: the older one first.
func (e *entry) compare(o *entry) int {
	return cmp.Or(cmp.Compare(e.service.Created, o.service.Created), compareNames(e.service.Name, o.service.Name))
}
