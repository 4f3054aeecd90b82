package ebpf

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"

	mdnetlink "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// spaces are the network namespaces of this machine, by their cookies and their addresses.
type spaces struct {
	addrs   map[uint64][]netip.Addr
	cookies map[netip.Addr][]uint64
}

// maxAddresses bounds those of a namespace that are looked at. No client is known to use more of them.
const maxAddresses = 64

// findSpaces looks at all that this process may enter.
func (p *Plane) findSpaces() (spaces, error) {
	found := spaces{map[uint64][]netip.Addr{}, map[netip.Addr][]uint64{}}
	files, err := allNamespaces()
	if err != nil {
		return found, err
	}
	node := p.node
	if node == "" {
		if node, err = ownNode(); err != nil {
			return found, err
		}
	}
	for _, ns := range files {
		own := namespaceName(ns) == node
		if cookie, addrs, err := spaceOf(ns); err == nil && cookie != 0 { // else it has ended, or may not be entered
			found.add(cookie, own, addrs)
		}
		ns.Close()
	}
	return found, nil
}

// allNamespaces are those of namespaces, and those that single threads of other processes are in.
func allNamespaces() ([]*os.File, error) {
	files, err := namespaces()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, ns := range files {
		seen[namespaceName(ns)] = true
	}
	threads, err := filepath.Glob("/proc/[0-9]*/task/[0-9]*/ns/net")
	for _, path := range threads {
		name, err := os.Readlink(path)
		if err != nil || seen[name] {
			continue
		}
		if ns, err := os.Open(path); err == nil { // else it has ended
			seen[name] = true
			files = append(files, ns)
		}
	}
	return files, err
}

// add notes the addresses by which others may know the clients of a namespace. Those of the loopback interface only the
// node's own mean.
func (s spaces) add(cookie uint64, node bool, addrs []netip.Addr) {
	for _, a := range addrs {
		if a.IsLinkLocalUnicast() || a.IsLoopback() && !node || len(s.addrs[cookie]) == maxAddresses {
			continue
		}
		s.addrs[cookie] = append(s.addrs[cookie], a)
		s.cookies[a] = append(s.cookies[a], cookie)
	}
}

// spaceOf is the cookie of a network namespace, and its addresses.
func spaceOf(ns *os.File) (cookie uint64, addrs []netip.Addr, err error) {
	h, conn, err := enter(ns)
	if err != nil {
		return 0, nil, err
	}
	defer h.Close()
	defer conn.Close()
	cookie, known := netnsCookie(conn)
	if !known {
		return 0, nil, errors.ErrUnsupported
	}
	list, err := whole(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	for _, a := range list {
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			addrs = append(addrs, addr.Unmap())
		}
	}
	return cookie, addrs, err
}

// enter opens sockets in a namespace. Where this process is it needs no rights to go.
func enter(ns *os.File) (h *netlink.Handle, conn *mdnetlink.Conn, err error) {
	c := &mdnetlink.Config{NetNS: int(ns.Fd())}
	if here, err := ownNode(); err == nil && namespaceName(ns) == here {
		c.NetNS = 0
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return nil, nil, err
		}
	} else if h, err = netlink.NewHandleAt(netns.NsHandle(ns.Fd()), unix.NETLINK_ROUTE); err != nil {
		return nil, nil, err
	}
	if conn, err = mdnetlink.Dial(unix.NETLINK_ROUTE, c); err != nil {
		h.Close()
		return nil, nil, err
	}
	return h, conn, nil
}
