package ebpf

import (
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// The programs remember a socket in a slot of the table `sockets` (struct place in bpf/maps.h). A program gives the
// slot back when the socket closes. Sockets of the kernel's own (of NFS, or what MPTCP has beneath a socket) get a slot
// in connect() as all do, but no hook sees them close. So from time to time the agent frees slots whose socket has
// gone:
//
//	had the slot the last time, too ─► in its namespace, twice: is there such a socket? ─ no ─► the slot is free
//
// A socket that is not connected at that moment may not be listed. It has no peer whose name a process could ask for,
// and it gets another slot when it connects.

// socketSlotsInterval is the time between two looks. To lose a slot costs no more than time in connect().
const socketSlotsInterval = 5 * time.Minute

// socketPlaces are the memory of places, and that of claims: 0 where a place is free.
func (p *Plane) socketPlaces() (places []objectsPlace, claims []uint64, unmap func(), err error) {
	places, unmapPlaces, err := mapped[objectsPlace](p.memory[objectsMapSockets])
	if err != nil {
		return nil, nil, nil, fmt.Errorf("sockets: %w", err)
	}
	claims, unmapClaims, err := mapped[uint64](p.memory[objectsMapClaims])
	if err != nil {
		unmapPlaces()
		return nil, nil, nil, fmt.Errorf("claims: %w", err)
	}
	return places, claims, func() { unmapPlaces(); unmapClaims() }, nil
}

// holders are the sockets that have slots, by the slot.
type holders map[int]objectsPlace

// auditSocketSlots looks whether that is so, when it is time.
func (p *Plane) auditSocketSlots() error {
	if !p.socketSlots.due() {
		return nil
	}
	p.socketSlots.wait(socketSlotsInterval, socketSlotsInterval)
	return p.freeSocketSlots()
}

// freeSocketSlots frees the slots of sockets that are gone. It leaves those that have come since it
// was called before.
func (p *Plane) freeSocketSlots() error {
	places, claims, unmap, err := p.socketPlaces()
	if err != nil {
		return err
	}
	defer unmap()
	old, held := holders{}, holders{}
	for i := range places {
		at := objectsPlace{Cookie: atomic.LoadUint64(&places[i].Cookie), Netns: places[i].Netns}
		if at.Cookie == 0 || atomic.LoadUint64(&claims[i]) == 0 {
			continue
		}
		held[i] = at
		if p.holders[i] == at {
			old[i] = at
		}
	}
	p.holders = held
	for range 2 { // a listing may miss one while others around it come and go
		if err := old.dropLiving(); err != nil {
			return err
		}
	}
	for i, at := range old {
		if atomic.CompareAndSwapUint64(&places[i].Cookie, at.Cookie, 0) {
			atomic.CompareAndSwapUint64(&claims[i], 1, 0) // unless it has been closed meanwhile, after all
		}
	}
	return nil
}

// dropLiving leaves those whose socket is not found, and whose namespace was looked through.
func (h holders) dropLiving() error {
	if len(h) == 0 {
		return nil
	}
	wanted := map[uint64]bool{}
	for _, at := range h {
		wanted[at.Netns] = true
	}
	spaces, err := namespaces()
	if err != nil {
		return err
	}
	living, listed := map[uint64]bool{}, map[uint64]bool{}
	for _, ns := range spaces {
		cookies, netns, ok := socketsIn(ns, wanted)
		ns.Close()
		if !ok {
			continue
		}
		listed[netns] = true
		for _, cookie := range cookies {
			living[cookie] = true
		}
	}
	for _, at := range h { // before Linux 5.14 it is only from their sockets that namespaces are known
		listed[at.Netns] = listed[at.Netns] || living[at.Cookie]
	}
	for i, at := range h {
		if living[at.Cookie] || !listed[at.Netns] {
			delete(h, i)
		}
	}
	return nil
}

// socketsIn lists the sockets of a namespace, by their cookies, if it is wanted. ok is false of one that has ended, or
// that this process may not enter.
func socketsIn(ns *os.File, wanted map[uint64]bool) (cookies []uint64, netns uint64, ok bool) {
	conn, err := openDiag(ns)
	if err != nil {
		return nil, 0, false
	}
	defer conn.Close()
	netns, known := netnsCookie(conn)
	if known && !wanted[netns] {
		return nil, 0, false
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
			sockets, err := listSockets(conn, diagSocket{family: family, protocol: protocol, states: statesHeld})
			if err != nil {
				return nil, 0, false
			}
			for _, s := range sockets {
				cookies = append(cookies, s.cookie())
			}
		}
	}
	return cookies, netns, true
}
