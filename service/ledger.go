package service

import (
	"maps"

	"fairlead.dev/fairlead/model"
)

// ledger patches one table of a State and gathers the Change.
type ledger[K comparable, V any] struct {
	rows   *map[K]V // which the State has
	same   func(a, b V) bool
	set    map[K]V  // rows that are new or differ since the last call of close
	before map[K]*V // what rows were that differ, or are gone
	fresh  int      // so many rows will probably be new
}

func newLedger[K comparable, V any](rows *map[K]V, same func(a, b V) bool) ledger[K, V] {
	return ledger[K, V]{rows: rows, same: same, before: map[K]*V{}}
}

// expect makes room for so many new rows, and for so many at all in the end.
func (l *ledger[K, V]) expect(fresh, all int) {
	*l.rows = roomy(*l.rows, fresh, all)
	l.fresh = fresh
}

// roomy is m with room for as many more rows, and for all in the end, if they are so many that it is cheaper to move
// those that are there once than to have the map grow by itself, again and again.
func roomy[K comparable, V any](m map[K]V, more, all int) map[K]V {
	if more <= len(m) {
		return m
	}
	larger := make(map[K]V, max(len(m)+more, all))
	maps.Copy(larger, m)
	return larger
}

// put sets a row, and returns what it was.
func (l *ledger[K, V]) put(k K, v V) (old V) {
	old, ok := (*l.rows)[k]
	if ok && l.same(old, v) {
		return old
	}
	if ok {
		l.remember(k, old)
	}
	(*l.rows)[k] = v
	if was := l.before[k]; was != nil && l.same(*was, v) {
		delete(l.set, k)
		return old
	}
	if l.set == nil {
		l.set = make(map[K]V, l.fresh)
	}
	l.set[k] = v
	return old
}

// remove removes a row, and returns what it was.
func (l *ledger[K, V]) remove(k K) (old V) {
	old, ok := (*l.rows)[k]
	if ok {
		l.remember(k, old)
		delete(*l.rows, k)
		delete(l.set, k)
	}
	return old
}

// remember keeps what a row was at the last call of close, if there was one.
func (l *ledger[K, V]) remember(k K, old V) {
	if _, fresh := l.set[k]; fresh {
		return // it is new, or was remembered before
	}
	if _, ok := l.before[k]; !ok {
		was := old // old itself would be allocated for rows that are new too
		l.before[k] = &was
	}
}

// close returns the difference since the last call. Rows that went away and came back are not in it.
func (l *ledger[K, V]) close() (d model.Delta[K, V]) {
	if len(l.set) > 0 {
		d.Set = l.set
	}
	for k := range l.before {
		if _, ok := (*l.rows)[k]; !ok {
			d.Delete = append(d.Delete, k)
		}
	}
	l.set, l.fresh = nil, 0
	if len(l.before) > 0 { // not cleared: it may be as large as the State
		l.before = map[K]*V{}
	}
	return d
}
