package localhost

import (
	"maps"
	"slices"

	"fairlead.dev/fairlead/model"
)

// view is the State of the wrapped plane: without the frontends that are served here, and without the
// pools that only those use.
type view struct {
	*model.State
	ours  ours
	users map[model.PoolID]int // how many of its frontends forward to a pool
}

func newView(s *model.State, ours ours) *view {
	v := &view{model.NewState(), ours, map[model.PoolID]int{}}
	v.change(s, model.Diff(v.State, s))
	return v
}

// of is v's State; without a view, the wrapped plane has all.
func (v *view) of(s *model.State) *model.State {
	if v == nil {
		return s
	}
	return v.State
}

// pass is the row that the wrapped plane gets; ok is false if it gets none.
func (v *view) pass(key model.Key, f model.Frontend) (row model.Frontend, ok bool) {
	switch {
	case !v.ours(key) || f.Verdict != model.Forward || !f.Allows(key.Addr):
		return f, true
	case key.Protocol == model.SCTP:
		return model.Frontend{Service: f.Service, Verdict: model.Reject}, true
	}
	return model.Frontend{}, false
}

// ours tells the frontends that are served here.
type ours func(model.Key) bool

func onLoopback(key model.Key) bool     { return key.Addr.IsLoopback() }
func onIPv6Loopback(key model.Key) bool { return key.Addr.Is6() && onLoopback(key) }

// change performs a change that leads to s, and returns what is left of it for the wrapped plane.
func (v *view) change(s *model.State, c model.Change) model.Change {
	var affected []model.PoolID // some more than once
	affected = slices.AppendSeq(affected, c.Pools.Set.Keys())
	replace := func(key model.Key, row model.Frontend) {
		old := v.Frontends[key]
		v.users[old.Pool]--
		v.users[row.Pool]++
		affected = append(affected, old.Pool, row.Pool)
	}
	var rows model.Delta[model.Key, model.Frontend]
	remove := func(key model.Key) {
		if _, has := v.Frontends[key]; has {
			rows.Delete = append(rows.Delete, key)
			replace(key, model.Frontend{})
		}
	}
	for key, f := range c.Frontends.Set.All() {
		if row, ok := v.pass(key, f); ok {
			rows.Set = append(rows.Set, model.Row[model.Key, model.Frontend]{Key: key, Value: row})
			replace(key, row)
		} else {
			remove(key)
		}
	}
	for _, key := range c.Frontends.Delete {
		remove(key)
	}
	c.Frontends, c.Pools = rows, v.pools(s, c.Pools.Set, affected)
	v.Apply(c)
	return c
}

// pools is the change of pools when that of the frontends has been counted.
func (v *view) pools(
	s *model.State, rows model.Rows[model.PoolID, model.Pool], affected []model.PoolID,
) (d model.Delta[model.PoolID, model.Pool]) {
	changed := maps.Collect(rows.All())
	slices.SortFunc(affected, model.PoolID.Compare)
	for _, id := range slices.Compact(affected) {
		pool, exists := s.Pools[id]
		_, has := v.Pools[id]
		_, differs := changed[id]
		switch used := exists && v.users[id] > 0; {
		case used && (differs || !has):
			d.Set = append(d.Set, model.Row[model.PoolID, model.Pool]{Key: id, Value: pool})
		case !used && has:
			d.Delete = append(d.Delete, id)
		}
		if v.users[id] == 0 {
			delete(v.users, id)
		}
	}
	return d
}
