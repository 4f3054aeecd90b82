// Package localport tells which ports the kernel gives to sockets that ask for none. Planes that have sockets, or
// flows, in the place of clients take others, so as not to meet what the kernel has given away.
package localport

import (
	"fmt"
	"os"
	"strings"
)

const (
	file     = "/proc/sys/net/ipv4/ip_local_port_range"
	reserved = "/proc/sys/net/ipv4/ip_local_reserved_ports"
)

// Range is the first and the last of these ports, in the calling thread's network namespace, for both families.
func Range() (first, last uint16, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil {
		return 0, 0, fmt.Errorf("%s: %q: %w", file, strings.TrimSpace(string(text)), err)
	}
	return first, last, nil
}

// Above are the ports above the range, without those that the administrator has reserved for programs that ask for them
// by number.
func Above() (ports []uint16, err error) {
	_, last, err := Range()
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(reserved)
	if err != nil {
		return nil, err
	}
	taken := map[int]bool{}
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
		var from, to int
		n, _ := fmt.Sscanf(part, "%d-%d", &from, &to) // one number is a port, none is an empty list
		if n == 1 {
			to = from
		}
		for port := from; n > 0 && port <= to; port++ {
			taken[port] = true
		}
	}
	for port := int(last) + 1; port <= 65535; port++ {
		if !taken[port] {
			ports = append(ports, uint16(port))
		}
	}
	return ports, nil
}
