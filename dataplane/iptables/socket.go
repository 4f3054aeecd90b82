package iptables

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// getOption and setOption are getsockopt and setsockopt with structures of any length.
func getOption(fd, level, name int, value []byte) error {
	length := uint32(len(value))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
		uintptr(unsafe.Pointer(&value[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func setOption(fd, level, name int, value []byte) error {
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
		uintptr(unsafe.Pointer(&value[0])), uintptr(len(value)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// setIndex asks for the number of an ipset (struct ip_set_req_get_set in the kernel's ip_set.h).
func setIndex(fd int, name string) (uint16, error) {
	const soIPSet, byName, version, request = 83, 6, 7, 40
	b := make([]byte, request)
	binary.NativeEndian.PutUint32(b, byName)
	binary.NativeEndian.PutUint32(b[4:], version)
	copy(b[8:39], name)
	if err := getOption(fd, unix.SOL_IP, soIPSet, b); err != nil {
		return 0, fmt.Errorf("ask for its number: %w", err)
	}
	return binary.NativeEndian.Uint16(b[8:]), nil
}

// pinned keeps memory in its place whose address a structure has as a number.
func pinned(p *runtime.Pinner, b []byte) uint64 {
	p.Pin(&b[0])
	return uint64(uintptr(unsafe.Pointer(&b[0])))
}

// longOption is memory for an option of which the kernel is told that it is longer.
type longOption struct {
	memory []byte
	length uint32
}

func getLongOption(fd, level, name int, o longOption) error {
	length := o.length
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
		uintptr(unsafe.Pointer(&o.memory[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
