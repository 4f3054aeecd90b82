package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// leftover is what neither sockets nor the programs for packets can do, which the plane behind does. That one has
// nothing in the kernel while there is no such row, so that no packet pays for it.
//
// It is about connections of the node itself: its packets do not arrive at any device. Sockets translate those of TCP
// and UDP, but do not know which source address they will have, and SCTP has no hook. Where a row allows every address
// of the node, or none, that does not matter.
type leftover struct {
	node   ownAddrs
	behind dataplane.Dataplane // nil: there is none
	state  *model.State        // its rows; nil: not known
	users  map[model.PoolID]int
}

// isLeft reports whether a row that the node itself meets is left.
func (l *leftover) isLeft(key model.Key, f model.Frontend) bool {
	return key.Protocol == model.SCTP || f.Allow != nil && l.node.flags(key, f) == 0
}

// forNode is the row of a key's address, port and protocol that the node itself meets.
func forNode(s *model.State, key model.Key) (model.Key, model.Frontend, bool) {
	for _, key.Scope = range []model.Scope{model.Internal, model.Any} {
		if f, ok := s.Frontends[key]; ok {
			return key, f, true
		}
	}
	return key, model.Frontend{}, false
}

// of makes the State of the rows that are left, and of the guards if there are any.
func (l *leftover) of(s *model.State) *model.State {
	out := model.NewState()
	for key, f := range s.Frontends {
		if mine, _, _ := forNode(s, key); mine != key || !l.isLeft(key, f) {
			continue
		}
		out.Frontends[key] = f
		if f.Verdict == model.Forward {
			out.Pools[f.Pool] = s.Pools[f.Pool]
		}
	}
	out.Pods = s.Pods
	if len(out.Frontends) > 0 {
		out.Guards = maps.Clone(s.Guards)
	}
	return out
}

// sync makes the plane behind hold the rows that are left, or nothing.
func (l *leftover) sync(ctx context.Context, s *model.State) error {
	if l.behind == nil {
		return nil
	}
	l.state = nil
	rows := l.of(s)
	if len(rows.Frontends) == 0 {
		if err := l.behind.Remove(ctx); err != nil {
			return err
		}
		l.set(rows)
		return nil
	}
	err := l.behind.Sync(ctx, rows)
	if err == nil || errors.Is(err, dataplane.ErrPartial) {
		l.set(rows)
	}
	return err
}

func (l *leftover) set(rows *model.State) {
	l.state, l.users = rows, map[model.PoolID]int{}
	for _, f := range rows.Frontends {
		l.users[f.Pool]++
	}
}

// apply follows a change that leads to s.
func (l *leftover) apply(ctx context.Context, s *model.State, c model.Change) error {
	if l.behind == nil {
		return nil
	}
	if l.state == nil {
		return errors.New("what the plane behind holds is not known; Sync first")
	}
	had := len(l.state.Frontends)
	change := l.change(s, c)
	l.state.Apply(change)
	has := len(l.state.Frontends)
	switch {
	case had == 0 && has == 0:
		return nil
	case had == 0 || has == 0:
		return l.sync(ctx, s)
	}
	err := l.behind.Apply(ctx, l.state, change)
	if err != nil && !errors.Is(err, dataplane.ErrPartial) {
		l.state = nil
		err = fmt.Errorf("rows that are left: %w", err)
	}
	return err
}

// change is the part of a change that is about rows that are left.
func (l *leftover) change(s *model.State, c model.Change) model.Change {
	out := model.Change{Guards: c.Guards, Pods: c.Pods}
	touched := map[model.Key]struct{}{}
	for key, f := range c.Frontends.Set.All() {
		if len(l.state.Frontends) > 0 || l.isLeft(key, f) { // else nothing is left of it, before and after
			key.Scope = model.Any
			touched[key] = struct{}{}
		}
	}
	for _, key := range c.Frontends.Delete {
		key.Scope = model.Any
		touched[key] = struct{}{}
	}
	before := map[model.PoolID]int{} // of pools whose number of users may change
	for key := range touched {
		l.frontend(s, key, &out, before)
	}
	for id, had := range before {
		switch has := l.users[id]; {
		case had == 0 && has > 0:
			out.Pools.Set = append(out.Pools.Set, model.Row[model.PoolID, model.Pool]{Key: id, Value: s.Pools[id]})
		case had > 0 && has == 0:
			out.Pools.Delete = append(out.Pools.Delete, id)
		}
		if l.users[id] == 0 {
			delete(l.users, id)
		}
	}
	for _, pool := range c.Pools.Set {
		had, counted := before[pool.Key]
		if l.users[pool.Key] > 0 && (!counted || had > 0) { // else it is set already
			out.Pools.Set = append(out.Pools.Set, pool)
		}
	}
	return out
}

// frontend adds what changes for both scopes of a key.
func (l *leftover) frontend(s *model.State, key model.Key, out *model.Change, before map[model.PoolID]int) {
	count := func(id model.PoolID, more int) {
		if id == (model.PoolID{}) {
			return
		}
		if _, known := before[id]; !known {
			before[id] = l.users[id]
		}
		l.users[id] += more
	}
	mine, f, ok := forNode(s, key)
	ok = ok && l.isLeft(mine, f)
	for _, key.Scope = range []model.Scope{model.Any, model.Internal} {
		had, has := l.state.Frontends[key]
		if has {
			count(had.Pool, -1)
		}
		switch {
		case ok && key == mine:
			count(f.Pool, 1)
			out.Frontends.Set = append(out.Frontends.Set, model.Row[model.Key, model.Frontend]{Key: key, Value: f})
		case has:
			out.Frontends.Delete = append(out.Frontends.Delete, key)
		}
	}
}

// audit compares the plane behind with the rows that are left.
func (l *leftover) audit(ctx context.Context, s *model.State) ([]dataplane.Drift, error) {
	if l.behind == nil {
		return nil, nil
	}
	rows := l.state
	if rows == nil {
		rows = l.of(s)
	}
	if len(rows.Frontends) == 0 {
		return nil, nil
	}
	return l.behind.Audit(ctx, rows)
}
