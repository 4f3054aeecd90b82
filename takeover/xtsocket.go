package takeover

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket options of x_tables (include/uapi/linux/netfilter_ipv4/ip_tables.h), the same for both
// families. A program that sets them needs CAP_NET_ADMIN.
const (
	xtSetReplace     = 64
	xtSetAddCounters = 65
	xtGetInfo        = 64
	xtGetEntries     = 65
)

// Where struct ipt_getinfo has its parts …
const (
	tableName      = 32 // bytes, in all structs
	infoHooks      = 36
	infoUnderflows = 56
	infoNumber     = 76
	infoSize       = 80
	sizeofInfo     = 84
)

// … and ipt_get_entries, ipt_replace and xt_counters_info.
const (
	getEntriesHeader  = 40
	replaceNumber     = 36
	replaceSize       = 40
	replaceHooks      = 44
	replaceUnderflows = 64
	replaceOldNumber  = 84
	replaceCounters   = 88
	replaceHeader     = 96
	countersNumber    = 32
	countersHeader    = 40
)

// xtSocket is how x_tables are read and replaced.
type xtSocket struct {
	fd     int
	level  int
	layout xtLayout
}

func openXT(f family) (*xtSocket, error) {
	if bits.UintSize != 64 {
		return nil, errors.New("on a machine of 32 bits this is left to kube-proxy: run kube-proxy --cleanup")
	}
	s := &xtSocket{level: unix.SOL_IP, layout: layoutV4}
	domain := unix.AF_INET
	if f.v6 {
		s.level, s.layout, domain = unix.SOL_IPV6, layoutV6, unix.AF_INET6
	}
	var err error
	s.fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	return s, err
}

func (s *xtSocket) close() { _ = unix.Close(s.fd) }

func (s *xtSocket) option(call uintptr, name int, value []byte, length unsafe.Pointer) error {
	_, _, errno := unix.Syscall6(call, uintptr(s.fd), uintptr(s.level), uintptr(name),
		uintptr(unsafe.Pointer(&value[0])), uintptr(length), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func (s *xtSocket) get(name int, value []byte) error {
	length := uint32(len(value))
	return s.option(unix.SYS_GETSOCKOPT, name, value, unsafe.Pointer(&length))
}

func (s *xtSocket) set(name int, value []byte) error {
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(s.fd), uintptr(s.level), uintptr(name),
		uintptr(unsafe.Pointer(&value[0])), uintptr(len(value)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// readTries are enough: only somebody who changes the table without the lock makes a second necessary.
const readTries = 5

// read reads a table, which must exist.
func (s *xtSocket) read(table string) (*xtBlob, error) {
	var err error
	for range readTries {
		var b *xtBlob
		if b, err = s.tryRead(table); !errors.Is(err, unix.EAGAIN) {
			return b, err
		}
	}
	return nil, fmt.Errorf("it changes all the time: %w", err)
}

// xtInfo is what the kernel tells of a table's shape.
type xtInfo [sizeofInfo]byte

func (s *xtSocket) info(table string) (xtInfo, error) {
	var info xtInfo
	copy(info[:], table)
	if err := s.get(xtGetInfo, info[:]); err != nil {
		return info, fmt.Errorf("read its size: %w", err)
	}
	return info, nil
}

func (s *xtSocket) tryRead(table string) (*xtBlob, error) {
	info, err := s.info(table)
	if err != nil {
		return nil, err
	}
	b := &xtBlob{table: table, validHooks: binary.NativeEndian.Uint32(info[tableName:])}
	for h := range numHooks {
		b.hooks[h] = binary.NativeEndian.Uint32(info[infoHooks+4*h:])
		b.underflows[h] = binary.NativeEndian.Uint32(info[infoUnderflows+4*h:])
	}
	size := binary.NativeEndian.Uint32(info[infoSize:])
	entries := make([]byte, getEntriesHeader+int(size))
	copy(entries, table)
	binary.NativeEndian.PutUint32(entries[tableName:], size)
	if err := s.get(xtGetEntries, entries); err != nil {
		return nil, fmt.Errorf("read its rules: %w", err)
	}
	if err := newXTBlob(entries[getEntriesHeader:], s.layout, b); err != nil {
		return nil, fmt.Errorf("read its rules: %w", err)
	}
	return b, nil
}

// replace puts the rest in the table's place, at once for packets. The kernel hands back what the old
// rules had counted to the last packet, and adds it to the new ones.
func (s *xtSocket) replace(old *xtBlob, rest xtRest) error {
	counters := make([]byte, xtCounters*len(old.entries))
	message := make([]byte, replaceHeader, replaceHeader+len(rest.raw))
	copy(message, old.table)
	native := binary.NativeEndian
	native.PutUint32(message[tableName:], old.validHooks)
	native.PutUint32(message[replaceNumber:], uint32(len(rest.kept)))
	native.PutUint32(message[replaceSize:], uint32(len(rest.raw)))
	native.PutUint32(message[replaceOldNumber:], uint32(len(old.entries)))
	for h := range numHooks {
		if old.validHooks&(1<<h) != 0 {
			native.PutUint32(message[replaceHooks+4*h:], uint32(rest.newOffset[int(old.hooks[h])]))
			native.PutUint32(message[replaceUnderflows+4*h:], uint32(rest.newOffset[int(old.underflows[h])]))
		}
	}
	var pinned runtime.Pinner // the message has the address as a number
	pinned.Pin(&counters[0])
	defer pinned.Unpin()
	native.PutUint64(message[replaceCounters:], uint64(uintptr(unsafe.Pointer(&counters[0]))))
	if err := s.set(xtSetReplace, append(message, rest.raw...)); err != nil {
		return fmt.Errorf("replace it: %w", err)
	}
	return s.addCounters(old.table, rest.kept, counters)
}

func (s *xtSocket) addCounters(table string, kept []int, counters []byte) error {
	message := make([]byte, countersHeader, countersHeader+xtCounters*len(kept))
	copy(message, table)
	binary.NativeEndian.PutUint32(message[countersNumber:], uint32(len(kept)))
	for _, i := range kept {
		message = append(message, counters[xtCounters*i:][:xtCounters]...)
	}
	if err := s.set(xtSetAddCounters, message); err != nil {
		return fmt.Errorf("put the counters of its other rules back: %w", err)
	}
	return nil
}
