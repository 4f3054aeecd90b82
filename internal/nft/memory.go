package nft

import "math/bits"

// A pool with affinity has maps of its own that its rules fill with clients. So the clients of one Service, whose
// addresses may be forged, push no other Service's clients out. When a map is full, new clients of that pool are not
// remembered, and are served.
const (
	// maxClients bounds the clients that are remembered in each family, as long as few pools have affinity, and so the
	// kernel's memory (some 120 bytes for each).
	maxClients = 1 << 20
	// mostClients is the bound that the kernel itself puts to a map that rules fill; only without a bound of ours such a
	// map begins small.
	mostClients = 1<<16 - 1
	// leastClients is the bound of a map however many there are.
	leastClients = 1 << 10
)

// ClientsOf is the Maximum of one more map, where there are so many. The sizes of maps stay as they are made. The more
// pools have one, the smaller the next ones are, so that the sum grows with the logarithm of their number.
func ClientsOf(pools int) uint32 {
	if fair := maxClients >> bits.Len(uint(pools)); fair <= mostClients {
		return uint32(max(fair, leastClients))
	}
	return 0
}
