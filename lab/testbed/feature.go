package testbed

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Feature is something that a device does with packets and that can be turned off: the command of linux/ethtool.h that
// does it.
type Feature uint32

const (
	// TXChecksums leaves checksums to be computed by the device. A cable computes none: what comes out of it has the
	// sum of the pseudo-header alone, as long as no receiver needs more.
	TXChecksums Feature = unix.ETHTOOL_STXCSUM
	// GRO makes one packet of several that came. An end of a cable that has it takes what XDP programs at the other
	// end send, as hardware does.
	GRO Feature = unix.ETHTOOL_SGRO
)

// SetFeature turns a feature of a device on or off. That of a machine is eth0; on the LAN there is the other end of its
// cable, which is called like the machine.
func (b *Bed) SetFeature(at Place, device string, f Feature, on bool) error {
	err := b.Do(at, func() error { return setFeature(device, f, on) })
	if err != nil {
		return fmt.Errorf("testbed: feature 0x%x of device %s of %s: %w", uint32(f), device, at, err)
	}
	return nil
}

func setFeature(device string, f Feature, on bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	setting := struct { // struct ethtool_value
		command Feature
		on      uint32
	}{command: f}
	if on {
		setting.on = 1
	}
	request := struct { // struct ifreq
		name    [unix.IFNAMSIZ]byte
		setting unsafe.Pointer
		_       [16]byte
	}{setting: unsafe.Pointer(&setting)}
	copy(request.name[:len(request.name)-1], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return errno
	}
	return nil
}
