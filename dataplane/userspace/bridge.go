package userspace

import (
	"os"
	"strings"
)

// bridgeSysctls hand what passes a bridge to netfilter, before it is received. (The module br_netfilter has them.)
func bridgeSysctls() []string {
	return []string{"net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"}
}

// warnOfBridges says where packets are that the plane cannot have: the socket that a rule finds for one at a bridge is
// forgotten when the bridge gives the packet to the node (ip_rcv_core in the kernel's net/ipv4/ip_input.c).
func (p *Plane) warnOfBridges() {
	if p.config.Log == nil {
		return
	}
	links, err := p.routes.handle.LinkList()
	if err != nil {
		return // it is a warning only
	}
	for _, link := range links {
		if link.Type() != "bridge" {
			continue
		}
		for _, name := range bridgeSysctls() {
			if value, err := os.ReadFile("/proc/sys/" + name); err == nil && strings.TrimSpace(string(value)) == "1" {
				p.config.Log.Warn("mode userspace does not serve clients on a bridge while this sysctl is 1; set it to 0",
					"bridge", link.Attrs().Name, "sysctl", strings.ReplaceAll(name, "/", "."))
			}
		}
	}
}
