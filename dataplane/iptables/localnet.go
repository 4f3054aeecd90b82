package iptables

import (
	"fmt"
	"net/netip"
	"os"
)

// localnet is the sysctl without which the kernel does not route what comes back from a backend to a
// process of this node that asked 127.0.0.1. It is set when a frontend on such an address appears, once the
// rule is there that drops packets from elsewhere to these addresses. A chain records that we have set it.
type localnet struct {
	file *os.File // nil: there is none
	err  error    // why it cannot be set; nil: it can
}

const localnetFile = "/proc/sys/net/ipv4/conf/all/route_localnet"

// openLocalnet opens the sysctl of the calling thread's network namespace. In a container that is not
// privileged it can be read only.
func openLocalnet() localnet {
	f, err := os.OpenFile(localnetFile, os.O_RDWR, 0)
	if err != nil {
		f, _ = os.Open(localnetFile) // what is missing is told by err
	}
	return localnet{f, err}
}

func (l localnet) on() bool {
	var b [1]byte
	if l.file != nil {
		_, _ = l.file.ReadAt(b[:], 0) // what cannot be read is taken to be off
	}
	return b[0] == '1'
}

func (l localnet) set(value string) error {
	if l.err != nil {
		return fmt.Errorf("NodePorts on 127.0.0.1: %w: set %s to 1", l.err, localnetFile)
	}
	if _, err := l.file.WriteAt([]byte(value), 0); err != nil {
		return fmt.Errorf("NodePorts on 127.0.0.1: %w", err)
	}
	return nil
}

func (l localnet) close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

func isLocalnet(a netip.Addr) bool { return a.Is4() && a.IsLoopback() }
