package ebpf

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"sync/atomic"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// regions have a bit for each region of addresses, set if there may be a row or a guard about an address there: see
// is_about in bpf/balance.h. They are memory that programs read, of a set of tables:
//
//	a row comes ─► its bit is set ─► the table has the row
//	rows go ─► the table has them no more ─► tidy, when many have gone: bits that no row needs are cleared
type regions []uint64

// regionOf is the place of an address's bit.
func regionOf(a objectsAddr) uint32 {
	low := ntohl(a.Word[3])
	high := a.Word[0]*31 + a.Word[1]*37 + a.Word[2]*41 + low>>24
	return (low>>packetsRegionREGION_BITS ^ high*0x9e3779b1>>16) % uint32(packetsRegionREGIONS)
}

// ntohl turns a word of an address around, as the kernel's function of that name does, or back.
func ntohl(word uint32) uint32 {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], word)
	return binary.BigEndian.Uint32(b[:])
}

func (r regions) has(a objectsAddr) bool {
	at := regionOf(a)
	return atomic.LoadUint64(&r[at/64])>>(at%64)&1 != 0
}

func (r regions) set(a objectsAddr) {
	if !r.has(a) {
		at := regionOf(a)
		atomic.OrUint64(&r[at/64], 1<<(at%64))
	}
}

// add sets the bits of all addresses of a prefix.
func (r regions) add(p netip.Prefix) {
	a := address(p.Masked().Addr())
	width := max(p.Addr().BitLen()-p.Bits()-int(packetsRegionREGION_BITS), 0) // bits that tell its regions apart
	if width >= bits.Len32(uint32(packetsRegionREGIONS-1)) {
		for i := range r {
			atomic.StoreUint64(&r[i], ^uint64(0))
		}
		return
	}
	first := ntohl(a.Word[3])
	for i := range uint32(1) << width {
		a.Word[3] = ntohl(first + i<<packetsRegionREGION_BITS)
		r.set(a)
	}
}

// keep clears the bits that no row of s needs. A row that is not in s is in no table.
func (r regions) keep(s *model.State) {
	needed := make(regions, len(r))
	for key := range s.Frontends {
		needed.set(address(key.Addr))
	}
	for prefix := range s.Guards {
		needed.add(prefix)
	}
	for i := range r {
		atomic.StoreUint64(&r[i], needed[i])
	}
}

// tidy does so when as many rows have gone as there are.
func (t *tables) tidy(s *model.State) {
	if t.deleted > len(s.Frontends)+len(s.Guards) {
		t.regions.keep(s)
		t.deleted = 0
	}
}

// passedBy is a drift: programs look for no row about an address, and there is one.
func passedBy(a objectsAddr) dataplane.Drift {
	return dataplane.Drift{
		Class: "programs", Object: "address " + a.addr().String(), Want: "in use", Have: "skipped",
	}
}
