// Package xtables reads and replaces tables of iptables-legacy as the kernel hands them out: as a whole, entries
// one after the other. It needs no program, and does not interpret what matches and targets say.
//
//	Lock ─► Open ─► Info, Read ─► entries: Layout ─► Replace ─► counters of the old ones ─► AddCounters
//
// To ask for a table that does not exist makes it, with its hooks, and loads modules: Present knows those that do.
package xtables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
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
	// CountersSize is that of struct xt_counters.
	CountersSize = 16
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
type Socket struct{ fd, level int }

// Present are the tables of a family that exist, in the network namespace of the calling thread.
func Present(v6 bool) ([]string, error) {
	file := "/proc/thread-self/net/ip_tables_names"
	if v6 {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return strings.Fields(string(names)), err
}

// Open opens a socket in the network namespace of the calling thread.
func Open(v6 bool) (s Socket, err error) {
	domain := unix.AF_INET
	s.level = unix.SOL_IP
	if v6 {
		domain, s.level = unix.AF_INET6, unix.SOL_IPV6
	}
	s.fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	return s, err
}

// Close may be repeated.
func (s *Socket) Close() error {
	fd := s.fd
	if s.fd = -1; fd < 0 {
		return nil
	}
	return unix.Close(fd)
}

// GetOption is getsockopt with a structure of any length.
func GetOption(fd, level, name int, value []byte) error {
	return Socket{fd, level}.get(name, value, uint32(len(value)))
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

// readTries are enough: only somebody who changes the table without the lock makes a second necessary.
const readTries = 5

// Read reads a table. In front of its entries there is room for a Header.
func (s Socket) Read(table string) (info Info, raw []byte, err error) {
	for range readTries {
		if info, err = s.Info(table); err != nil {
			return info, nil, err
		}
		raw = make([]byte, Header+int(info.Size))
		err = s.entries(table, info.Size, raw[Header-getEntriesHeader:])
		switch {
		case err == nil:
			return info, raw, nil
		case !errors.Is(err, unix.EAGAIN):
			return info, nil, fmt.Errorf("read its rules: %w", err)
		}
	}
	return info, nil, fmt.Errorf("it changes all the time: %w", err)
}

// entries asks for struct ipt_get_entries, of which all or the beginning fits into the answer.
func (s Socket) entries(table string, size uint32, answer []byte) error {
	copy(answer, table)
	binary.NativeEndian.PutUint32(answer[nameSize:], size)
	return s.get(getEntries, answer, getEntriesHeader+size)
}

// Peek calls look with the first n bytes of a table's entries, which last as long as the call, or not at all if
// the table has another size by now. The kernel hands out the rest only to those who take it: what is behind is
// memory that there is not.
func (s Socket) Peek(table string, size uint32, n int, look func(entries []byte)) error {
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

// Replace puts a table in the place of one with so many entries, at once for packets. It fills in the Header in
// front of the new entries. The kernel hands back what the old ones had counted to the last packet.
func (s Socket) Replace(table string, old uint32, info Info, raw []byte) (counters []byte, err error) {
	counters = make([]byte, CountersSize*old)
	var pinned runtime.Pinner // the message has the address as a number
	pinned.Pin(&counters[0])
	defer pinned.Unpin()
	clear(raw[:nameSize])
	copy(raw, table)
	_, err = binary.Encode(raw[nameSize:Header], binary.NativeEndian, replacement{
		ValidHooks: info.ValidHooks, Number: info.Number, Size: info.Size,
		Hooks: info.Hooks, Underflows: info.Underflows,
		OldNumber: old, Counters: uint64(uintptr(unsafe.Pointer(&counters[0]))),
	})
	if err != nil {
		return nil, err
	}
	return counters, s.set(setReplace, raw)
}

// AddCounters adds to the counters of a table of so many entries those that old ones had. Kept has the numbers of
// an entry and of the old one.
func (s Socket) AddCounters(table string, n uint32, kept iter.Seq2[int, int], counters []byte) error {
	message := make([]byte, countersHeader+CountersSize*n)
	copy(message, table)
	binary.NativeEndian.PutUint32(message[nameSize:], n)
	for to, from := range kept {
		copy(message[countersHeader+CountersSize*to:], counters[CountersSize*from:][:CountersSize])
	}
	if err := s.set(setAddCounters, message); err != nil {
		return fmt.Errorf("put the counters of its other rules back: %w", err)
	}
	return nil
}
