package ebpf

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// whole is a listing of the kernel, which repeats it if something changed meanwhile: then some of it may be missing,
// although it was there all the time. On a machine on which that never ends it is an error.
func whole[T any](list func() ([]T, error)) (all []T, err error) {
	const tries = 100
	for range tries {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, err
}

// links are the devices of the node.
func (d *devices) links() ([]netlink.Link, error) { return whole(d.netlink.LinkList) }

// addrs are the addresses of the node, of one family or all.
func (d *devices) addrs(family int) ([]netlink.Addr, error) {
	return whole(func() ([]netlink.Addr, error) { return d.netlink.AddrList(nil, family) })
}
