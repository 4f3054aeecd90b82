package relay

import (
	"net/netip"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/socket"
)

// leg is a connection to a backend.
type leg struct {
	*socket.Conn
	to netip.AddrPort
}

// ResetOrphans resets connections whose backend is gone and does not acknowledge what it was sent. It returns how many.
func (p *Proxy) ResetOrphans(gone dataplane.Gone) (n int) {
	for c, l := range p.legs.Range {
		if _, is := gone[l.(leg).to]; is && l.(leg).Unheard() {
			c.(*connection).Reset()
			n++
		}
	}
	return n
}
