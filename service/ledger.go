package service

import "fairlead.dev/fairlead/model"

// ledger patches one table of a State and remembers what its rows were, for the Change.
type ledger[K comparable, V any] struct {
	rows   map[K]V
	same   func(a, b V) bool
	before map[K]former[V]
}

// former is what a row was before: absent, if ok is false.
type former[V any] struct {
	value V
	ok    bool
}

func newLedger[K comparable, V any](rows map[K]V, same func(a, b V) bool) ledger[K, V] {
	return ledger[K, V]{rows, same, map[K]former[V]{}}
}

func (l *ledger[K, V]) set(k K, v V) {
	if old, ok := l.rows[k]; !ok || !l.same(old, v) {
		l.remember(k)
		l.rows[k] = v
	}
}

func (l *ledger[K, V]) remove(k K) {
	if _, ok := l.rows[k]; ok {
		l.remember(k)
		delete(l.rows, k)
	}
}

func (l *ledger[K, V]) remember(k K) {
	if _, ok := l.before[k]; !ok {
		v, ok := l.rows[k]
		l.before[k] = former[V]{v, ok}
	}
}

// close returns the difference since the last call. Rows that went away and came back are not in it.
func (l *ledger[K, V]) close() model.Delta[K, V] {
	d := model.Delta[K, V]{Set: map[K]V{}}
	for k, old := range l.before {
		switch now, ok := l.rows[k]; {
		case ok && (!old.ok || !l.same(old.value, now)):
			d.Set[k] = now
		case !ok && old.ok:
			d.Delete = append(d.Delete, k)
		}
	}
	if len(d.Set) == 0 {
		d.Set = nil
	}
	l.before = map[K]former[V]{} // not cleared: the first one is as large as the State
	return d
}
