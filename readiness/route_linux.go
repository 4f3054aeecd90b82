package readiness

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// refused is the error of a connection that was answered by a reset.
const refused = unix.ECONNREFUSED

// findRoute returns nil if the kernel has a route to an address that is not the default one.
func findRoute(a netip.Addr) error {
	routes, err := netlink.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil {
		return fmt.Errorf("route to %s: %w", a, err)
	}
	if slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst != nil && !r.Dst.IP.IsUnspecified() }) {
		return nil
	}
	return fmt.Errorf("%s has no route but the default one", a)
}
