package ebpf

import (
	"fmt"
	"net"
)

// Forwarding says what becomes of clients from outside whose backend is on another node, if answers are to find back.
type Forwarding string

const (
	// ForwardingSNAT hides them behind this node, which answers pass. So does the empty one.
	ForwardingSNAT Forwarding = "snat"
	// ForwardingDSR keeps their address. The backend's node answers as the Service: the first packets tell it for which
	// one they are, in an option of IP (bpf/dsr.h). All nodes must have it.
	ForwardingDSR Forwarding = "dsr"
)

// direct is how large packets with that option may be: what each device takes that has programs. A client whose first
// packet is too large is hidden.
func (d *devices) direct() (mtu uint32, err error) {
	links, err := d.links()
	if err != nil {
		return 0, fmt.Errorf("find the MTU for direct answers: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		if a.Flags&net.FlagUp == 0 || a.Flags&net.FlagLoopback != 0 || a.MTU <= 0 {
			continue
		}
		if size := uint32(a.MTU); mtu == 0 || size < mtu {
			mtu = size
		}
	}
	return mtu, nil
}
