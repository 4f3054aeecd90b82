package userspace

import (
	"fmt"
	"os"
	"strings"
)

// sparePorts are those above the range from which the kernel gives ports to sockets that ask for none, but for those
// that somebody has reserved (net.ipv4.ip_local_port_range and ip_local_reserved_ports, which are for IPv6, too). Where
// these cannot be read there are none.
func sparePorts() (ports []uint16) {
	const directory = "/proc/sys/net/ipv4/"
	var low, high int
	text, err := os.ReadFile(directory + "ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(text), &low, &high)
	}
	if err != nil {
		return nil
	}
	text, err = os.ReadFile(directory + "ip_local_reserved_ports")
	if err != nil {
		return nil
	}
	reserved := map[int]bool{}
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
		var first, last int
		n, _ := fmt.Sscanf(part, "%d-%d", &first, &last)
		if n == 1 {
			last = first
		}
		for port := first; n > 0 && port <= last; port++ {
			reserved[port] = true
		}
	}
	for port := high + 1; port <= 65535; port++ {
		if !reserved[port] {
			ports = append(ports, uint16(port))
		}
	}
	return ports
}
