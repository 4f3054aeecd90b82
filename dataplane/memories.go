package dataplane

import (
	"iter"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/model"
)

// maxMemories bounds those that one plane hands to another, and what that takes: some 40 bytes each.
const maxMemories = 1 << 20

// Memories are what clients of pools remember, each client once for each pool. There may be a million, so they are kept
// in few bytes.
type Memories struct {
	pools []memorable
	known map[model.PoolID]uint32 // their indexes
	began time.Time
	all   map[memoryKey]memory
	// Lost is how many were one too many.
	Lost int
}

// memorable is a pool with affinity.
type memorable struct {
	id       model.PoolID
	lasts    time.Duration
	backends []netip.AddrPort // that serve
	indexes  map[netip.AddrPort]uint32
}

type memoryKey struct {
	client [16]byte
	pool   uint32
}

type memory struct {
	backend uint32
	left    uint32 // milliseconds from began on
}

// NewMemories is about the pools of s that have affinity.
func NewMemories(s *model.State) *Memories {
	m := &Memories{known: map[model.PoolID]uint32{}, began: time.Now(), all: map[memoryKey]memory{}}
	for id, p := range s.Pools {
		if p.Affinity <= 0 {
			continue
		}
		one := memorable{id: id, lasts: p.Affinity, indexes: map[netip.AddrPort]uint32{}}
		for _, b := range p.Serving() {
			one.indexes[b.AddrPort] = uint32(len(one.backends))
			one.backends = append(one.backends, b.AddrPort)
		}
		m.known[id] = uint32(len(m.pools))
		m.pools = append(m.pools, one)
	}
	return m
}

// Add gathers what is of use: whose pool has affinity, whose backend serves, and whose time is not over. Of two about
// the same client that which lasts longer stays, as the client has come later. It ends with the first error.
func (m *Memories) Add(others iter.Seq2[Memory, error]) error {
	for one, err := range others {
		if err != nil {
			return err
		}
		key, value, ok := m.encode(one)
		if !ok {
			continue
		}
		known, had := m.all[key]
		switch {
		case had && known.left >= value.left:
		case !had && len(m.all) >= maxMemories:
			m.Lost++
		default:
			m.all[key] = value
		}
	}
	return nil
}

// Drop forgets what others know for as long, or longer.
func (m *Memories) Drop(others iter.Seq2[Memory, error]) error {
	const slack = 1000 // milliseconds: what is as precise as a second is as old
	for one, err := range others {
		if err != nil {
			return err
		}
		key, value, ok := m.encode(one)
		if !ok {
			continue
		}
		known, had := m.all[key]
		if had && (known.left <= value.left || known.backend == value.backend && known.left <= value.left+slack) {
			delete(m.all, key)
		}
	}
	return nil
}

func (m *Memories) encode(one Memory) (key memoryKey, value memory, ok bool) {
	pool, ok := m.known[one.Pool]
	if !ok || one.Client.Is6() != one.Pool.V6 {
		return key, value, false
	}
	p := &m.pools[pool]
	backend, ok := p.indexes[one.Backend]
	left := min(one.Until.Sub(m.began), p.lasts)
	if !ok || left <= 0 {
		return key, value, false
	}
	return memoryKey{one.Client.As16(), pool}, memory{backend, uint32(left / time.Millisecond)}, true
}

// Len is how many there are.
func (m *Memories) Len() int { return len(m.all) }

// All are those that are not over yet, in no order.
func (m *Memories) All() iter.Seq[Memory] {
	return func(yield func(Memory) bool) {
		now := time.Now()
		for key, value := range m.all {
			p := &m.pools[key.pool]
			one := Memory{
				Pool: p.id, Client: netip.AddrFrom16(key.client).Unmap(), Backend: p.backends[value.backend],
				Until: m.began.Add(time.Duration(value.left) * time.Millisecond),
			}
			if one.Until.After(now) && !yield(one) {
				return
			}
		}
	}
}
