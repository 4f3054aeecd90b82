package service

import (
	"maps"

	"fairlead.dev/fairlead/model"
)

// changeTracker patches one table of a State and gathers the Change.
type changeTracker[K comparable, V any] struct {
	rows   *map[K]V // which the State has
	same   func(a, b V) bool
	puts   model.Rows[K, V] // since the last call of close
	before map[K]*V         // what rows were then that differ, or are gone; nil: they were not there
	noted  int              // so many of puts are in before
	fresh  int              // so many rows will probably be new
}

func newChangeTracker[K comparable, V any](rows *map[K]V, same func(a, b V) bool) changeTracker[K, V] {
	return changeTracker[K, V]{rows: rows, same: same, before: map[K]*V{}}
}

// expect makes room for so many new rows, and for so many at all in the end.
func (l *changeTracker[K, V]) expect(fresh, all int) {
	*l.rows = roomy(*l.rows, fresh, all)
	l.fresh = fresh
}

// roomy is m with room for more rows, or for all in the end. It moves the present rows once if that is cheaper than to
// have the map grow by itself, again and again.
func roomy[K comparable, V any](m map[K]V, more, all int) map[K]V {
	if more <= len(m) {
		return m
	}
	larger := make(map[K]V, max(len(m)+more, all))
	maps.Copy(larger, m)
	return larger
}

// put sets a row, and returns what it was.
func (l *changeTracker[K, V]) put(k K, v V) (old V) {
	old, ok := (*l.rows)[k]
	if ok && l.same(old, v) {
		return old
	}
	if ok {
		l.remember(k, old)
	}
	(*l.rows)[k] = v
	if l.puts == nil {
		l.puts = make(model.Rows[K, V], 0, l.fresh)
	}
	l.puts = append(l.puts, model.Row[K, V]{Key: k, Value: v})
	return old
}

// remove removes a row, and returns what it was.
func (l *changeTracker[K, V]) remove(k K) (old V) {
	old, ok := (*l.rows)[k]
	if ok {
		l.remember(k, old)
		delete(*l.rows, k)
	}
	return old
}

// remember keeps what a row was at the last call of close. Most rows are put once, into a table that has none of that
// key: of these nothing is noted before a row is put, or removed, that was there.
func (l *changeTracker[K, V]) remember(k K, old V) {
	l.noteNew()
	if _, ok := l.before[k]; !ok {
		was := old // old itself would be allocated for rows that are new too
		l.before[k] = &was
	}
}

// noteNew notes of what was put that it was not there; of what was there, remember knows it already.
func (l *changeTracker[K, V]) noteNew() {
	for _, r := range l.puts[l.noted:] {
		if _, ok := l.before[r.Key]; !ok {
			l.before[r.Key] = nil
		}
	}
	l.noted = len(l.puts)
}

// close returns the difference since the last call. Rows that went away and came back are not in it.
func (l *changeTracker[K, V]) close() (d model.Delta[K, V]) {
	defer func() { l.puts, l.noted, l.fresh = nil, 0, 0 }()
	if len(l.before) == 0 { // what was put is new, and nothing is gone
		d.Set = l.puts
		return d
	}
	l.noteNew()
	for k, was := range l.before {
		now, ok := (*l.rows)[k]
		switch {
		case ok && (was == nil || !l.same(*was, now)):
			d.Set = append(d.Set, model.Row[K, V]{Key: k, Value: now})
		case !ok && was != nil:
			d.Delete = append(d.Delete, k)
		}
	}
	l.before = map[K]*V{} // not cleared: it may be as large as the State
	return d
}
