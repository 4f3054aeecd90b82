package service

import "fairlead.dev/fairlead/model"

// ledger patches one table of a State and remembers what its rows were, for the Change.
type ledger[K comparable, V any] struct {
	rows   map[K]V
	same   func(a, b V) bool
	before map[K]*V // nil: there was no row
}

func newLedger[K comparable, V any](rows map[K]V, same func(a, b V) bool) ledger[K, V] {
	return ledger[K, V]{rows, same, map[K]*V{}}
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
	if _, ok := l.before[k]; ok {
		return
	}
	v, ok := l.rows[k]
	if !ok {
		l.before[k] = nil
		return
	}
	old := v // v itself would be allocated for rows that did not exist too
	l.before[k] = &old
}

// close returns the difference since the last call. Rows that went away and came back are not in it.
func (l *ledger[K, V]) close() (d model.Delta[K, V]) {
	for k, old := range l.before {
		switch now, ok := l.rows[k]; {
		case ok && (old == nil || !l.same(*old, now)):
			if d.Set == nil {
				d.Set = make(map[K]V, len(l.before))
			}
			d.Set[k] = now
		case !ok && old != nil:
			d.Delete = append(d.Delete, k)
		}
	}
	l.before = map[K]*V{} // not cleared: the first one is as large as the State
	return d
}
