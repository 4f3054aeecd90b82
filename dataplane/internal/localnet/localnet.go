// Package localnet switches the sysctl without which the kernel does not route what comes back from a backend
// to a process of this node that asked 127.0.0.1. A plane switches it on when a frontend on such an address
// appears, once the rule is there that drops packets from elsewhere to these addresses. So that it does not stay
// behind without that rule, the plane keeps a record in the kernel that it has done so.
//
//	Open ─► On? ─► record and rule in the kernel ─► Set("1") … Drift … Set("0")
package localnet

import (
	"fmt"
	"net/netip"
	"os"

	"fairlead.dev/fairlead/dataplane"
)

// File is the sysctl.
const File = "/proc/sys/net/ipv4/conf/all/route_localnet"

// Sysctl is that of one network namespace.
type Sysctl struct {
	file *os.File // nil: there is none
	err  error    // why it cannot be set; nil: it can
}

// Open opens that of the calling thread's network namespace. In a container that is not privileged it can be
// read only; then the plane's Prepare must have set it.
func Open() Sysctl {
	f, err := os.OpenFile(File, os.O_RDWR, 0)
	if err != nil {
		f, _ = os.Open(File) // what is missing is told by err
	}
	return Sysctl{f, err}
}

// On reports whether it is set.
func (s Sysctl) On() bool {
	var b [1]byte
	if s.file != nil {
		_, _ = s.file.ReadAt(b[:], 0) // what cannot be read is taken to be off
	}
	return b[0] == '1'
}

// Set sets it to "1" or "0".
func (s Sysctl) Set(value string) error {
	if s.err != nil {
		return fmt.Errorf("NodePorts on 127.0.0.1: %w: set it to 1, or run once with --init-only in a privileged container",
			s.err)
	}
	if _, err := s.file.WriteAt([]byte(value), 0); err != nil {
		return fmt.Errorf("NodePorts on 127.0.0.1: %w", err)
	}
	return nil
}

// Drift reports route_localnet if it was switched off. It reports nothing where this process cannot set it.
func (s Sysctl) Drift() []dataplane.Drift {
	if s.err != nil || s.On() {
		return nil
	}
	return []dataplane.Drift{{Class: "sysctl", Object: File, Want: "1", Have: "0"}}
}

// Close may be called where Open was not.
func (s Sysctl) Close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// Contains reports whether the kernel routes packets to an address only with the sysctl.
func Contains(a netip.Addr) bool { return a.Is4() && a.IsLoopback() }
