// Package xt is the client of the kernel's x_tables, the tables that iptables-legacy shows. The kernel hands out a
// table as a whole and takes it back as a whole. A Table has its entries as chains, and Apply makes a Change of them.
// The contents of matches and targets are not interpreted. No program is needed.
//
//	Lock ─► Open ─► Read ─► Table: Chains ─► Each Entry
//	                          │
//	                Rules ─► Change ─► Apply ─► Replace ─► counters of the old entries ─► AddCounters
//
// The first request for a table creates it, with its hooks, and loads modules. Present tells which tables exist.
package xt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket options (include/uapi/linux/netfilter_ipv4/ip_tables.h), the same for both families. They need
// CAP_NET_ADMIN.
const (
	setReplace     = 64
	setAddCounters = 65
	getInfo        = 64
	getEntries     = 65
)

const (
	nameSize         = 32 // of a table, at the beginning of all structs
	sizeofInfo       = nameSize + 52
	getEntriesHeader = 40 // struct ipt_get_entries: name, size
	countersHeader   = 40 // struct xt_counters_info: name, number

	// Header is room for struct ipt_replace in front of a table's entries.
	Header = 96

	countersSize = 16 // struct xt_counters
)

// NumHooks are prerouting, input, forward, output and postrouting.
const NumHooks = 5

// HookNames are the chains of a table.
var HookNames = [NumHooks]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// Info is struct ipt_getinfo behind the name: a table's shape.
type Info struct {
	ValidHooks uint32           // a bit for each that the table has
	Hooks      [NumHooks]uint32 // where their chains begin
	Underflows [NumHooks]uint32 // where their policies are
	Number     uint32           // of entries
	Size       uint32           // of all of them, in bytes
}

// replacement is struct ipt_replace behind the name.
type replacement struct {
	ValidHooks, Number, Size uint32
	Hooks, Underflows        [NumHooks]uint32
	OldNumber                uint32
	Counters                 uint64 // an address
}

// Socket is where the tables of a family are asked for.
type Socket struct {
	fd, level  int
	names      *os.File // of the tables that exist; nil: the kernel has no x_tables for the family
	unreadable error    // or they may not be read
}

// Open opens a socket in the network namespace of the calling thread.
func Open(v6 bool) (s Socket, err error) {
	domain, names := unix.AF_INET, "/proc/thread-self/net/ip_tables_names"
	s.level = unix.SOL_IP
	if v6 {
		domain, s.level, names = unix.AF_INET6, unix.SOL_IPV6, "/proc/thread-self/net/ip6_tables_names"
	}
	if s.fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return s, err
	}
	if s.names, s.unreadable = os.Open(names); errors.Is(s.unreadable, os.ErrNotExist) {
		s.unreadable = nil
	}
	return s, nil
}

// Close may be repeated.
func (s *Socket) Close() error {
	fd := s.fd
	if s.fd = -1; fd < 0 {
		return nil
	}
	if s.names != nil {
		_ = s.names.Close() // it was only read
	}
	return unix.Close(fd)
}

// Present are the tables of the family that exist. To ask for another one would make it, with its hooks.
func (s Socket) Present() ([]string, error) {
	if s.names == nil {
		return nil, s.unreadable
	}
	text := make([]byte, os.Getpagesize())
	n, err := s.names.ReadAt(text, 0)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return strings.Fields(string(text[:n])), err
}

// get may tell the kernel that the value is longer than it is.
func (s Socket) get(name int, value []byte, length uint32) error {
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), uintptr(s.level), uintptr(name),
		uintptr(unsafe.Pointer(&value[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func (s Socket) set(name int, value []byte) error {
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(s.fd), uintptr(s.level), uintptr(name),
		uintptr(unsafe.Pointer(&value[0])), uintptr(len(value)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// Info reads how large a table is and where its hooks are.
func (s Socket) Info(table string) (info Info, err error) {
	b := make([]byte, sizeofInfo)
	copy(b, table)
	if err := s.get(getInfo, b, sizeofInfo); err != nil {
		return info, fmt.Errorf("read its size: %w", err)
	}
	_, err = binary.Decode(b[nameSize:], binary.NativeEndian, &info)
	return info, err
}

// readTries are enough: only a program that changes the table without the lock makes a second try necessary.
const readTries = 5

// Read reads a table. Own reports which chains are the caller's.
func (s Socket) Read(table string, own func(chain string) bool) (*Table, error) {
	for range readTries {
		info, err := s.Info(table)
		if err != nil {
			return nil, err
		}
		raw := make([]byte, Header+int(info.Size))
		err = s.entries(table, info.Size, raw[Header-getEntriesHeader:])
		if errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read its rules: %w", err)
		}
		t, err := Parse(LayoutOf(s.level == unix.SOL_IPV6), info, raw, own)
		if err != nil {
			return nil, err
		}
		t.Name = table
		return t, nil
	}
	return nil, errors.New("another program changes it all the time")
}

// entries asks for struct ipt_get_entries, of which all or the beginning fits into the answer.
func (s Socket) entries(table string, size uint32, answer []byte) error {
	copy(answer, table)
	binary.NativeEndian.PutUint32(answer[nameSize:], size)
	return s.get(getEntries, answer, getEntriesHeader+size)
}

// Same reports whether the kernel holds the table that was read or written last. Up to an offset the entries are
// compared; behind it only their number and size are.
func (s Socket) Same(t *Table, end int) (same bool, err error) {
	info, err := s.Info(t.Name)
	if err != nil || info != t.Info || end == 0 {
		return err == nil && info == t.Info, err
	}
	err = s.peek(t.Name, info.Size, end, func(entries []byte) { same = t.sameUpTo(end, entries) })
	return same, err
}

// peek calls look with the first n bytes of a table's entries, which are valid during the call. It does not call look
// if the table has another size by now. The kernel copies entries until it meets unmapped memory, so the rest is never
// copied.
func (s Socket) peek(table string, size uint32, n int, look func(entries []byte)) error {
	page := os.Getpagesize()
	head := getEntriesHeader + n
	whole := (head + page - 1) / page * page
	memory, err := unix.Mmap(-1, 0, whole+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return fmt.Errorf("map memory: %w", err)
	}
	defer func() { _ = unix.Munmap(memory) }()
	if err := unix.Mprotect(memory[whole:], unix.PROT_NONE); err != nil {
		return fmt.Errorf("protect memory: %w", err)
	}
	answer := memory[whole-head : whole]
	if err := s.entries(table, size, answer); err == nil || errors.Is(err, unix.EFAULT) {
		look(answer[getEntriesHeader:])
	}
	return nil
}

// Replace puts a table in the place of the one of which it was made, at once for packets. The kernel returns what the
// old entries have counted, to the last packet.
func (s Socket) Replace(t *Table) (counters []byte, err error) {
	counters = make([]byte, countersSize*t.replaces)
	var pinned runtime.Pinner // the message has the address as a number
	pinned.Pin(&counters[0])
	defer pinned.Unpin()
	clear(t.raw[:nameSize])
	copy(t.raw, t.Name)
	_, err = binary.Encode(t.raw[nameSize:Header], binary.NativeEndian, replacement{
		ValidHooks: t.ValidHooks, Number: t.Number, Size: t.Size,
		Hooks: t.Hooks, Underflows: t.Underflows,
		OldNumber: t.replaces, Counters: uint64(uintptr(unsafe.Pointer(&counters[0]))),
	})
	if err != nil {
		return nil, err
	}
	if err := s.set(setReplace, t.raw); err != nil {
		return nil, err
	}
	t.replaces = t.Number
	return counters, nil
}

// AddCounters adds what Replace returned to the counters of those entries that were not replaced.
func (s Socket) AddCounters(t *Table, counters []byte) error {
	message := make([]byte, countersHeader+countersSize*t.Number)
	copy(message, t.Name)
	binary.NativeEndian.PutUint32(message[nameSize:], t.Number)
	for i, from := range t.kept {
		if from != added {
			copy(message[countersHeader+countersSize*i:], counters[countersSize*from:][:countersSize])
		}
	}
	if err := s.set(setAddCounters, message); err != nil {
		return fmt.Errorf("put the counters of its rules back: %w", err)
	}
	return nil
}

// SetIndex asks for the number of an ipset, by which entries name it (struct ip_set_req_get_set in the kernel's
// ip_set.h).
func (s Socket) SetIndex(set string) (uint16, error) {
	const soIPSet, byName, version, request = 83, 6, 7, 40
	b := make([]byte, request)
	binary.NativeEndian.PutUint32(b, byName)
	binary.NativeEndian.PutUint32(b[4:], version)
	copy(b[8:39], set)
	if err := s.get(soIPSet, b, request); err != nil {
		return 0, fmt.Errorf("ask for its number: %w", err)
	}
	return binary.NativeEndian.Uint16(b[8:]), nil
}
