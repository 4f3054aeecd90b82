package ebpf

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
)

// The programs do not delete remembered clients. The agent does, when their time is over:
//
//	Audit, once a minute ─► all elements: is its time over? ─► it goes, and its owner has room for another one

// attachedInterval is the time between two looks.
const attachedInterval = time.Minute

// attached says when to look at clients that have backends, and whose they are.
type attached struct {
	pacer
	short map[uint32]uint // see shares
	named map[uint32]bool // owners that had no places left at any time since the last look
}

// auditAttached looks if it is time.
func (p *Plane) auditAttached() error {
	if !p.attached.due() {
		return nil
	}
	return p.detach()
}

// detach forgets clients whose time is over.
func (p *Plane) detach() error {
	p.attached.wait(attachedInterval, attachedInterval)
	m := p.memory[objectsMapAffinities]
	s, unmap, err := p.clientShares()
	if err != nil {
		return err
	}
	defer unmap()
	if p.attached.short == nil {
		p.attached.short = s.short
	}
	s.short = p.attached.short
	clock, err := readClock()
	if err != nil {
		return err
	}
	seen := s.begin()
	err = each(m, func(key objectsAffinityKey, a objectsAffinity) error {
		owner := uint32(a.Owner) % numOwners
		seen.add(owner, 1)
		lasts := time.Duration(a.Lasts) * 2 * time.Second >> s.short[owner]
		if clock.wall.Sub(clock.time(a.Last)) < lasts {
			return nil
		}
		if err := m.Delete(key); err != nil {
			return ignoreMissing(err)
		}
		s.giveBack(owner, 1)
		return nil
	})
	if err != nil {
		return fmt.Errorf("sessions: %w", err)
	}
	s.settle(seen)
	p.attached.named = map[uint32]bool{}
	return nil
}

// nameShort names the owners that have no places left for clients, also between two looks.
func (p *Plane) nameShort() (map[uint32]bool, error) {
	s, unmap, err := p.clientShares()
	if err != nil {
		return nil, err
	}
	defer unmap()
	if p.attached.named == nil {
		p.attached.named = map[uint32]bool{}
	}
	for owner := range p.attached.short {
		p.attached.named[owner] = true
	}
	if !s.mayBeShort() {
		return p.attached.named, nil
	}
	for owner := range numOwners {
		if s.held(owner) > 0 && s.isShort(owner) {
			p.attached.named[owner] = true
		}
	}
	return p.attached.named, nil
}

// attachedClients is how many there are, if that is known.
func (p *Plane) attachedClients() (n uint32, known bool) {
	s, unmap, err := p.clientShares()
	if err != nil {
		return 0, false
	}
	defer unmap()
	return uint32(max(s.held(everybody), 0)), true
}

func (p *Plane) clientShares() (shares, func(), error) {
	room := p.memory[objectsMapAffinities].MaxEntries()
	s, unmap, err := mapShares(p.memory[objectsMapShares], objectsSharedOF_AFFINITIES, room, 1)
	if err != nil {
		return s, nil, fmt.Errorf("sessions: %w", err)
	}
	return s, unmap, nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}
