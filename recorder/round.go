package recorder

import (
	"fmt"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// maxBackends is how many backends an Event names.
const maxBackends = 5

// Round is told of each round of the engine. Programming everything is one event, a line of the log, however many rows
// differ.
func (r *Recorder) Round(x engine.Round) {
	if x.Err != nil { // the log has it
		return
	}
	if n := len(x.Drifts); n > 0 {
		e := Event{Kind: Repair, Count: n, Message: said.Brief(fmt.Sprintf("repaired %s, such as %s",
			said.Count(n, "difference"), x.Drifts[0]))}
		if by := dataplane.Authors(x.ExternalChanges); by != "" {
			e.Details = map[string]string{"by": by}
		}
		r.Record(e)
	}
	if x.Change == nil {
		return
	}
	for id, pool := range x.Change.Pools.Set.All() {
		r.members(&x, id, pool)
	}
	for _, id := range x.Change.Pools.Delete {
		r.members(&x, id, model.Pool{})
	}
}

// members tells which backends a pool has gained and lost. If a Service port has a pool of all backends, that of the
// backends on this node is passed over.
func (r *Recorder) members(x *engine.Round, id model.PoolID, now model.Pool) {
	all := id
	all.Local = false
	_, is := x.State.Pools[all]
	if before := x.Before[all]; id.Local && (is || before != nil) {
		return
	}
	var before model.Pool
	if p := x.Before[id]; p != nil {
		before = *p
	}
	r.tell(Joined, id, without(now, before))
	r.tell(Left, id, without(before, now))
}

// tell records one Event for the backends of a pool.
func (r *Recorder) tell(k Kind, id model.PoolID, all []string) {
	if len(all) == 0 {
		return
	}
	e := Event{Kind: k, Service: id.Service, Count: len(all), Backends: all[:min(len(all), maxBackends)]}
	e.Message = said.List(all)
	r.Record(e)
}

// without are the serving backends of a pool that another one lacks. Both are sorted.
func without(a, b model.Pool) (names []string) {
	others := b.Serving()
	for _, x := range a.Serving() {
		for len(others) > 0 && others[0].Compare(x) < 0 {
			others = others[1:]
		}
		if len(others) == 0 || others[0].Compare(x) != 0 {
			names = append(names, x.AddrPort().String())
		}
	}
	return names
}
