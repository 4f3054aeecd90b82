// Package subset derives the State of a plane that serves some rows of another plane's State, and follows changes.
//
//	frontends of the whole ── Row ─► frontends of the part
//	pools of the whole ──────────► those to which a frontend of the part forwards
//	guards, health, pods ────────► the same
package subset

import (
	"iter"
	"maps"

	"fairlead.dev/fairlead/model"
)

// A Row maps a frontend of the whole, s, to the part's frontend; ok is false if the part has none. It may look at the
// frontend with the same address, port and protocol in the other scope, but at no other row.
type Row func(s *model.State, key model.Key, f model.Frontend) (row model.Frontend, ok bool)

// A Subset is the State of the part.
type Subset struct {
	*model.State
	row   Row
	users map[model.PoolID]int // how many frontends of the part forward to a pool
}

// Of makes the part of s.
func Of(s *model.State, row Row) *Subset {
	p := &Subset{State: model.NewState(), row: row, users: map[model.PoolID]int{}}
	p.Guards, p.Health, p.Pods = maps.Clone(s.Guards), maps.Clone(s.Health), s.Pods
	for key, f := range s.Frontends {
		if f, ok := row(s, key, f); ok {
			p.Frontends[key] = f
			p.count(f, 1)
		}
	}
	for id := range p.users {
		p.Pools[id] = s.Pools[id]
	}
	return p
}

func (p *Subset) count(f model.Frontend, more int) {
	if f.Verdict != model.Forward {
		return
	}
	if p.users[f.Pool] += more; p.users[f.Pool] == 0 {
		delete(p.users, f.Pool)
	}
}

// Change follows a change of the whole that leads to s, and returns the change of the part. Its cost depends on c only.
func (p *Subset) Change(s *model.State, c model.Change) model.Change {
	out := model.Change{Guards: c.Guards, Health: c.Health, Pods: c.Pods, PoolsBefore: c.PoolsBefore}
	pools := map[model.PoolID]bool{} // those that the part may get or lose; true: their backends have changed
	for key := range touched(c) {
		before, has := p.Frontends[key]
		f, ok := s.Frontends[key]
		if ok {
			f, ok = p.row(s, key, f)
		}
		switch {
		case ok && has && f.Equal(before), !ok && !has:
			continue
		case ok:
			out.Frontends.Set = append(out.Frontends.Set, model.Row[model.Key, model.Frontend]{Key: key, Value: f})
			p.Frontends[key] = f
			p.count(f, 1)
		default:
			out.Frontends.Delete = append(out.Frontends.Delete, key)
			delete(p.Frontends, key)
		}
		if has {
			p.count(before, -1)
		}
		pools[f.Pool], pools[before.Pool] = false, false
	}
	for id := range c.Pools.Set.Keys() {
		if p.users[id] > 0 {
			pools[id] = true
		}
	}
	for id, differs := range pools {
		_, has := p.Pools[id]
		switch used := p.users[id] > 0; {
		case used && (differs || !has):
			out.Pools.Set = append(out.Pools.Set, model.Row[model.PoolID, model.Pool]{Key: id, Value: s.Pools[id]})
		case !used && has:
			out.Pools.Delete = append(out.Pools.Delete, id)
		}
	}
	p.Apply(out)
	return out
}

// Touches reports whether the part gets a frontend by a change of the whole that leads to s.
func (row Row) Touches(s *model.State, c model.Change) bool {
	for key := range touched(c) {
		if f, ok := s.Frontends[key]; ok {
			if _, ok = row(s, key, f); ok {
				return true
			}
		}
	}
	return false
}

// touched are the keys of a change's frontends in both scopes, some of them twice.
func touched(c model.Change) iter.Seq[model.Key] {
	return func(yield func(model.Key) bool) {
		both := func(key model.Key) bool {
			key.Scope = model.Any
			if !yield(key) {
				return false
			}
			key.Scope = model.Internal
			return yield(key)
		}
		for key := range c.Frontends.Set.Keys() {
			if !both(key) {
				return
			}
		}
		for _, key := range c.Frontends.Delete {
			if !both(key) {
				return
			}
		}
	}
}
