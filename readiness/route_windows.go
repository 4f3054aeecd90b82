package readiness

import (
	"net/netip"

	"golang.org/x/sys/windows"
)

// refused is the error of a connection that was answered by a reset.
const refused = windows.WSAECONNREFUSED

// findRoute finds one: HNS has them in switches of its own.
func findRoute(netip.Addr) error { return nil }
