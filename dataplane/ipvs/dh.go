package ipvs

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/internal/ipvs"
)

// Destination hashing (ip_vs_dh.c) takes the real servers in turn for its buckets, whatever their weight. It refuses
// all clients while the real server that it finds takes no connections. Failover (ip_vs_fo.c) looks for the real server
// with the greatest weight. So while a real server takes none, fo stands in for dh. The greatest weight goes to the
// real server that dh finds when the other one has gone. For an address, which is one destination, that is always the
// same: clients move once, when the backend begins to drain. A virtual server of a mark can be several destinations,
// which meet at one real server meanwhile.

// shaped is how a virtual server is to be made for what a pool wants.
func (s *servers) shaped(key ipvs.Key, held, want *server) *server {
	const standIn = "fo"
	if want.scheduler != "dh" || !held.takesNone(key, want) {
		return want
	}
	made := &server{scheduler: s.client.instead(standIn, ""), destinations: want.destinations}
	if made.scheduler != standIn { // the kernel lacks it
		return made
	}
	if found, ok := held.hashed(key, want); ok {
		made.destinations = maps.Clone(want.destinations)
		made.destinations[found] = 1 + slices.Max(slices.Collect(maps.Values(want.destinations)))
	}
	return made
}

// hashed is the real server that dh will find among those that take connections, if the kernel has as many buckets
// as it has by default (CONFIG_IP_VS_DH_TAB_BITS).
func (held *server) hashed(key ipvs.Key, want *server) (found netip.AddrPort, ok bool) {
	if key.Mark != 0 || held != nil && !held.ordered {
		return found, false
	}
	var order []netip.AddrPort
	for _, addr := range slices.SortedFunc(maps.Keys(want.destinations), netip.AddrPort.Compare) {
		if held == nil || held.destinations[addr] == 0 && !slices.Contains(held.order, addr) {
			order = slices.Insert(order, 0, addr)
		}
	}
	if held != nil {
		order = append(order, held.order...)
	}
	order = slices.DeleteFunc(order, func(a netip.AddrPort) bool { return want.destinations[a] == 0 })
	if len(order) == 0 {
		return found, false
	}
	return order[destinationHash(key.Addr)%len(order)], true
}

// destinationHash is the bucket of an address: hash_32 of include/linux/hash.h.
func destinationHash(a netip.Addr) int {
	const goldenRatio, bits = 0x61c88647, 8
	folded := uint32(0)
	for b := a.AsSlice(); len(b) > 0; b = b[4:] {
		folded ^= binary.BigEndian.Uint32(b)
	}
	return int(folded * goldenRatio >> (32 - bits))
}

// added notes a real server that the kernel has put before the others.
func (held *server) added(addr netip.AddrPort) {
	if held.ordered && !slices.Contains(held.order, addr) {
		held.order = slices.Insert(held.order, 0, addr)
	}
}
