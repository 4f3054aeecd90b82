package dataplane

import (
	"context"
	"errors"
	"iter"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/model"
)

// maxMemories bounds those that one plane hands to another, and what that takes: some 60 bytes each.
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
			one.indexes[b.AddrPort()] = uint32(len(one.backends))
			one.backends = append(one.backends, b.AddrPort())
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

// Supersedes reports whether a plane should give up what it remembers itself of a client. If that is as good, what is
// here about the client is forgotten.
func (m *Memories) Supersedes(own Memory) bool {
	const slack = 1000 // milliseconds: what is as precise as a second is as old
	pool, ok := m.known[own.Pool]
	if !ok {
		return false
	}
	key := memoryKey{own.Client.As16(), pool}
	known, had := m.all[key]
	if !had {
		return false
	}
	_, value, ok := m.encode(own)
	if ok && (known.left <= value.left || known.backend == value.backend && known.left <= value.left+slack) {
		delete(m.all, key)
		return false
	}
	return true
}

func (m *Memories) encode(one Memory) (key memoryKey, value memory, ok bool) {
	pool, ok := m.known[one.Pool]
	if !ok || one.Client.Is6() != one.Pool.V6 {
		return key, value, false
	}
	p := &m.pools[pool]
	backend, ok := p.indexes[one.Backend]
	left := min(one.Until.Sub(m.began), p.lasts).Milliseconds()
	if !ok || left <= 0 {
		return key, value, false
	}
	return memoryKey{one.Client.As16(), pool}, memory{backend, uint32(left)}, true
}

// Lasts is for how long a pool remembers clients.
func (m *Memories) Lasts(id model.PoolID) time.Duration {
	if pool, ok := m.known[id]; ok {
		return m.pools[pool].lasts
	}
	return 0
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

// A Taker has its pools remember what is not superseded by what they remember themselves, and returns how many that
// were.
type Taker func(*Memories) (int, error)

// Take has what others remember taken in, if there is anything of use: Remember, where a plane has a Taker.
func Take(s *model.State, others iter.Seq2[Memory, error], take Taker) (int, error) {
	m := NewMemories(s)
	if len(m.pools) == 0 {
		return 0, nil
	}
	err := m.Add(others)
	if m.Len() == 0 {
		return 0, err
	}
	n, failed := take(m)
	return n, errors.Join(err, failed)
}

// TakeIn does what Config says of Inherit.
func (c *Config) TakeIn(ctx context.Context, s *model.State, take Taker) {
	if c.Inherit == nil {
		return
	}
	n, err := Take(s, c.Inherit(ctx, s), take)
	c.Inherit = nil
	switch {
	case c.Log == nil:
	case err != nil:
		c.Log.Warn("session affinity: some clients may get other endpoints than before, by another data plane",
			"taken over", n, "error", err)
	case n > 0:
		c.Log.Info("session affinity: clients keep the endpoints that another data plane gave them", "clients", n)
	}
}
