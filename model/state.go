package model

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/internal/defect"
)

// State is the whole desired state of a node. The callee may read it until the call returns, and may keep the rows
// (which are values) but not the maps.
type State struct {
	Frontends map[Key]Frontend
	Pools     map[PoolID]Pool          // only those to which a Frontend forwards
	Guards    map[netip.Prefix]Verdict // packets that no Frontend takes: Reject or Drop; longest prefix wins
	Health    map[netip.AddrPort]Health
	Pods      Pods
}

// NewState is a State without rows.
func NewState() *State {
	return &State{
		Frontends: map[Key]Frontend{},
		Pools:     map[PoolID]Pool{},
		Guards:    map[netip.Prefix]Verdict{},
		Health:    map[netip.AddrPort]Health{},
	}
}

// Rows is how many rows there are that say what becomes of packets, backends included.
func (s *State) Rows() int {
	n := len(s.Frontends) + len(s.Pools) + len(s.Guards)
	for _, p := range s.Pools {
		n += len(p.Backends)
	}
	return n
}

// Health is what the health check server on one of the node's addresses and ports answers.
type Health struct {
	Service string // namespace/name
	Local   int    // ready endpoints on this node
}

// Pods tells packets of this node's pods from all others.
type Pods struct {
	Prefixes   []netip.Prefix // of their source address; sorted, disjoint
	Interfaces []string       // on which they arrive; sorted; a trailing * stands for any ending
}

// Contain reports whether a packet from that source, arrived on that interface, comes from a pod.
// A process of the node itself has the empty interface.
func (p Pods) Contain(source netip.Addr, iface string) bool {
	return contains(p.Prefixes, source) || iface != "" && slices.ContainsFunc(p.Interfaces, func(name string) bool {
		prefix, wild := strings.CutSuffix(name, "*")
		return iface == name || wild && strings.HasPrefix(iface, prefix)
	})
}

// Equal reports whether both recognise the same packets.
func (p Pods) Equal(o Pods) bool {
	return slices.Equal(p.Prefixes, o.Prefixes) && slices.Equal(p.Interfaces, o.Interfaces)
}

// Row is one row of a table.
type Row[K comparable, V any] struct {
	Key   K
	Value V
}

// Rows are rows with different keys. To gather many takes a fraction of what putting them into a map does.
type Rows[K comparable, V any] []Row[K, V]

// RowsOf are all rows of a table.
func RowsOf[K comparable, V any](table map[K]V) Rows[K, V] {
	rows := make(Rows[K, V], 0, len(table))
	for k, v := range table {
		rows = append(rows, Row[K, V]{k, v})
	}
	return rows
}

// All are the keys, each with what belongs to it.
func (r Rows[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for i := range r {
			if !yield(r[i].Key, r[i].Value) {
				return
			}
		}
	}
}

// Keys are the keys.
func (r Rows[K, V]) Keys() iter.Seq[K] {
	return func(yield func(K) bool) {
		for i := range r {
			if !yield(r[i].Key) {
				return
			}
		}
	}
}

// Delta is the difference between two tables: rows that are new or differ, and keys that are gone.
type Delta[K comparable, V any] struct {
	Set    Rows[K, V]
	Delete []K
}

// Empty reports whether there is no difference.
func (d Delta[K, V]) Empty() bool { return len(d.Set) == 0 && len(d.Delete) == 0 }

// Keys are those of all rows that it sets or deletes.
func (d Delta[K, V]) Keys() iter.Seq[K] {
	return func(yield func(K) bool) {
		for k := range d.Set.Keys() {
			if !yield(k) {
				return
			}
		}
		for _, k := range d.Delete {
			if !yield(k) {
				return
			}
		}
	}
}

// Change is the difference between two States.
type Change struct {
	Frontends Delta[Key, Frontend]
	Pools     Delta[PoolID, Pool]
	Guards    Delta[netip.Prefix, Verdict]
	Health    Delta[netip.AddrPort, Health]
	Pods      *Pods // nil: unchanged
	// PoolsBefore are what the pools were that differ or are gone; nil: they are new, or it is not known.
	PoolsBefore map[PoolID]*Pool
}

// Empty reports whether there is no difference.
func (c Change) Empty() bool {
	return c.Frontends.Empty() && c.Pools.Empty() && c.Guards.Empty() && c.Health.Empty() && c.Pods == nil
}

// Lost are the backends that pools had before the change, and have no more; once for each pool.
func (c Change) Lost() (all []netip.AddrPort) {
	lose := func(id PoolID, now Pool) {
		was := c.PoolsBefore[id]
		for i := 0; was != nil && i < len(was.Backends); i++ {
			b := was.Backends[i].AddrPort()
			if _, stays := now.At(b); !stays {
				all = append(all, b)
			}
		}
	}
	for id, now := range c.Pools.Set.All() {
		lose(id, now)
	}
	for _, id := range c.Pools.Delete {
		lose(id, Pool{})
	}
	return all
}

// PoolsAt are those to which connections to an address and port go: those of clients elsewhere, and of the node itself.
func (s *State) PoolsAt(p Protocol, to netip.AddrPort) (pools []PoolID) {
	key := Key{Addr: to.Addr(), Port: to.Port(), Protocol: p}
	for _, key.Scope = range []Scope{Any, Internal} {
		if f := s.Frontends[key]; f.Verdict == Forward {
			pools = append(pools, f.Pool)
		}
	}
	return pools
}

// Whole is the change that leads to s from a State without rows.
func (s *State) Whole() Change {
	return Change{
		Frontends: Delta[Key, Frontend]{Set: RowsOf(s.Frontends)},
		Pools:     Delta[PoolID, Pool]{Set: RowsOf(s.Pools)},
		Guards:    Delta[netip.Prefix, Verdict]{Set: RowsOf(s.Guards)},
		Health:    Delta[netip.AddrPort, Health]{Set: RowsOf(s.Health)},
		Pods:      &s.Pods,
	}
}

// Diff is the Change that leads from one State to another.
func Diff(from, to *State) Change {
	c := Change{
		Frontends: diff(from.Frontends, to.Frontends, Frontend.Equal),
		Pools:     diff(from.Pools, to.Pools, Pool.Equal),
		Guards:    diff(from.Guards, to.Guards, equal[Verdict]),
		Health:    diff(from.Health, to.Health, equal[Health]),
	}
	c.PoolsBefore = map[PoolID]*Pool{}
	for id := range c.Pools.Keys() {
		if was, ok := from.Pools[id]; ok {
			c.PoolsBefore[id] = &was
		}
	}
	if !from.Pods.Equal(to.Pods) {
		c.Pods = &to.Pods
	}
	if defect.Is(defect.ModelDiff) {
		c.Pools = Delta[PoolID, Pool]{}
	}
	return c
}

func equal[V comparable](a, b V) bool { return a == b }

func diff[K comparable, V any](from, to map[K]V, same func(a, b V) bool) Delta[K, V] {
	var d Delta[K, V]
	for k, v := range to {
		if old, ok := from[k]; !ok || !same(old, v) {
			d.Set = append(d.Set, Row[K, V]{k, v})
		}
	}
	for k := range from {
		if _, ok := to[k]; !ok {
			d.Delete = append(d.Delete, k)
		}
	}
	return d
}

// Apply performs a Change on the State.
func (s *State) Apply(c Change) {
	apply(s.Frontends, c.Frontends)
	apply(s.Pools, c.Pools)
	apply(s.Guards, c.Guards)
	apply(s.Health, c.Health)
	if c.Pods != nil {
		s.Pods = *c.Pods
	}
}

func apply[K comparable, V any](rows map[K]V, d Delta[K, V]) {
	maps.Insert(rows, d.Set.All())
	for _, k := range d.Delete {
		delete(rows, k)
	}
}

// Clone is a copy with maps of its own.
func (s *State) Clone() *State {
	return &State{
		Frontends: maps.Clone(s.Frontends),
		Pools:     maps.Clone(s.Pools),
		Guards:    maps.Clone(s.Guards),
		Health:    maps.Clone(s.Health),
		Pods:      s.Pods,
	}
}

// Validate reports every row that breaks the promises written beside the types. A State that
// service.Table made never does; planes rely on it.
func (s *State) Validate() error {
	var errs []error
	bad := func(row any, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%v: %s", row, fmt.Sprintf(format, args...)))
	}
	used := map[PoolID]bool{}
	for k, f := range s.Frontends {
		used[f.Pool] = true
		switch _, ok := s.Pools[f.Pool]; {
		case !k.Addr.IsValid() || k.Addr.Is4In6() || k.Addr.Zone() != "" || k.Port == 0:
			bad(k, "not an address and port")
		case protocolNames[k.Protocol] == "":
			bad(k, "unknown protocol %d", k.Protocol)
		case f.Verdict == Pass || f.Verdict > Drop || f.SNAT > Always || k.Scope > Internal:
			bad(k, "unknown verdict, scope or SNAT")
		case f.Verdict != Forward && (f.Pool != PoolID{} || f.SNAT != Never || f.Hooked):
			bad(k, "has a pool, SNAT or is hooked, but its verdict is %s", f.Verdict)
		case f.Verdict == Forward && !ok:
			bad(k, "no pool %s", f.Pool)
		case f.Verdict == Forward && f.Pool.V6 != k.Addr.Is6():
			bad(k, "pool %s is of the other address family", f.Pool)
		case !disjoint(f.Allow):
			bad(k, "allowed sources are not sorted and disjoint: %v", f.Allow)
		}
	}
	for id, p := range s.Pools {
		switch {
		case len(p.Serving()) == 0:
			bad(id, "no backend takes connections")
		case !used[id]:
			bad(id, "no frontend forwards to it")
		case p.Scheduler != "" && !slices.Contains(Schedulers(), p.Scheduler):
			bad(id, "there is no scheduler %q", p.Scheduler)
		}
		for i, b := range p.Backends {
			if !b.Addr.IsValid() || b.Port == 0 || b.Addr.Is6() != id.V6 ||
				i > 0 && p.Backends[i-1].Compare(b) >= 0 {
				bad(id, "backend %s: invalid, twice, unsorted or of another address family", b)
			}
		}
	}
	for p, v := range s.Guards {
		if p != p.Masked() || v != Reject && v != Drop {
			bad(p, "guard of verdict %s", v)
		}
	}
	if !disjoint(s.Pods.Prefixes) {
		bad("pods", "prefixes are not sorted and disjoint: %v", s.Pods.Prefixes)
	}
	return errors.Join(errs...)
}

func disjoint(prefixes []netip.Prefix) bool {
	for i, p := range prefixes {
		if p != p.Masked() || i > 0 && (prefixes[i-1].Overlaps(p) || !prefixes[i-1].Addr().Less(p.Addr())) {
			return false
		}
	}
	return true
}

// Disjoint sorts prefixes and leaves out those that another one contains.
func Disjoint(prefixes []netip.Prefix) []netip.Prefix {
	sorted := slices.SortedFunc(slices.Values(prefixes), func(a, b netip.Prefix) int {
		if c := a.Masked().Addr().Compare(b.Masked().Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	out := prefixes[:0:0]
	for _, p := range sorted {
		if n := len(out); n == 0 || !out[n-1].Overlaps(p) {
			out = append(out, p.Masked())
		}
	}
	return out
}
