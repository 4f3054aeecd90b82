package dataplane

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/model"
)

// A Session is which backend a client's connections to a pool with affinity go to.
type Session struct {
	Pool    model.PoolID
	Client  netip.Addr // a client known otherwise, as by its network namespace, has one Session for each of its addresses
	Backend netip.AddrPort
	Until   time.Time // when that is forgotten, unless the client comes again; the precision is a second
}

// maxSessions bounds those that one plane hands to another, and what that takes: some 60 bytes each.
const maxSessions = 1 << 20

// Sessions are what clients of pools remember, each client once for each pool. There may be a million, so they are kept
// in few bytes.
type Sessions struct {
	pools []affinityPool
	known map[model.PoolID]uint32 // their indexes
	began time.Time
	all   map[sessionKey]session
	// Lost is how many were one too many.
	Lost int
}

// stickyPool is a pool with affinity.
type affinityPool struct {
	id       model.PoolID
	lasts    time.Duration
	backends []netip.AddrPort // that serve
	indexes  map[netip.AddrPort]uint32
}

type sessionKey struct {
	client [16]byte
	pool   uint32
}

type session struct {
	backend uint32
	left    uint32 // milliseconds from began on
}

// NewSessions is about the pools of s that have affinity.
func NewSessions(s *model.State) *Sessions {
	m := &Sessions{known: map[model.PoolID]uint32{}, began: time.Now(), all: map[sessionKey]session{}}
	for id, p := range s.Pools {
		if p.Affinity <= 0 {
			continue
		}
		one := affinityPool{id: id, lasts: p.Affinity, indexes: map[netip.AddrPort]uint32{}}
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
func (m *Sessions) Add(others iter.Seq2[Session, error]) error {
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
		case !had && len(m.all) >= maxSessions:
			m.Lost++
		default:
			m.all[key] = value
		}
	}
	return nil
}

// Supersedes reports whether a plane should give up what it remembers itself of a client. If that is as good, what is
// here about the client is forgotten.
func (m *Sessions) Supersedes(own Session) bool {
	const slack = 2000 // milliseconds: who writes and reads whole seconds finds up to one and a half less
	pool, ok := m.known[own.Pool]
	if !ok {
		return false
	}
	key := sessionKey{own.Client.As16(), pool}
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

// Serves reports whether the backend of a session serves its pool.
func (m *Sessions) Serves(one Session) bool {
	pool, ok := m.known[one.Pool]
	if ok {
		_, ok = m.pools[pool].indexes[one.Backend]
	}
	return ok
}

func (m *Sessions) encode(one Session) (key sessionKey, value session, ok bool) {
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
	return sessionKey{one.Client.As16(), pool}, session{backend, uint32(left)}, true
}

// Lasts is for how long a pool remembers clients.
func (m *Sessions) Lasts(id model.PoolID) time.Duration {
	if pool, ok := m.known[id]; ok {
		return m.pools[pool].lasts
	}
	return 0
}

// Len is how many there are.
func (m *Sessions) Len() int { return len(m.all) }

// All are those that are not over yet, in no order.
func (m *Sessions) All() iter.Seq[Session] {
	return func(yield func(Session) bool) {
		now := time.Now()
		for key, value := range m.all {
			p := &m.pools[key.pool]
			one := Session{
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
type Taker func(*Sessions) (int, error)

// Take has what others remember taken in, if there is anything of use: Remember, where a plane has a Taker.
func Take(s *model.State, others iter.Seq2[Session, error], take Taker) (int, error) {
	m := NewSessions(s)
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

// Learned are the sessions that a plane has been told of before it has rows; Sync takes them in.
type Learned struct{ others *Sessions }

// Keep is Learn before the first Sync.
func (l *Learned) Keep(s *model.State, others iter.Seq2[Session, error]) (int, error) {
	l.others = NewSessions(s)
	err := l.others.Add(others)
	return l.others.Len(), err
}

// None reports whether there are none.
func (l *Learned) None() bool { return l.others == nil || l.others.Len() == 0 }

// TakeIn is for Sync. Sessions that cannot be learned are logged; the rows are served without them.
func (l *Learned) TakeIn(log *slog.Logger, take Taker) {
	if l.None() {
		return
	}
	n, err := take(l.others)
	l.others = nil
	switch {
	case log == nil:
	case err != nil:
		log.Warn("session affinity: some clients of another data plane may get other endpoints",
			"clients", n, "error", err)
	case n > 0:
		log.Info("session affinity: clients of another data plane keep their endpoints", "clients", n)
	}
}

// Find completes a session of which pool and client are given, if the plane has it.
func (one *Session) Find(ctx context.Context, p Handover, s *model.State) (ok bool, err error) {
	only, pool := model.NewState(), s.Pools[one.Pool]
	only.Pools[one.Pool] = pool
	for key, f := range s.Frontends {
		if f.Pool == one.Pool {
			only.Frontends[key] = f
		}
	}
	for found, err := range p.Sessions(ctx, only) {
		if err != nil {
			return false, err
		}
		if found.Pool == one.Pool && found.Client == one.Client && found.Until.After(one.Until) {
			*one = found
		}
	}
	_, ok = pool.At(one.Backend)
	return ok && time.Now().Before(one.Until), nil
}

// ListSessions is what Handover.Sessions returns of a plane whose list calls f with each session.
func ListSessions(plane string, list func(f func(Session)) error) iter.Seq2[Session, error] {
	return func(yield func(Session, error) bool) {
		wanted := true
		err := list(func(s Session) { wanted = wanted && yield(s, nil) })
		if err != nil && wanted {
			yield(Session{}, fmt.Errorf("%s: list sessions: %w", plane, err))
		}
	}
}
