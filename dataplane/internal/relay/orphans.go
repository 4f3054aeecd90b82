package relay

import (
	"net/netip"
	"sync"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/socket"
)

// orphans finds connections of TCP by their backends.
type orphans struct {
	mu   sync.Mutex
	open map[*connection]leg
}

// leg is a connection to a backend.
type leg struct {
	*socket.Conn
	to netip.AddrPort
}

// add notes a connection until it is over.
func (o *orphans) add(c *connection, l leg) (over func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.open == nil {
		o.open = map[*connection]leg{}
	}
	o.open[c] = l
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.open, c)
	}
}

// ResetOrphans resets connections whose backend is gone and does not acknowledge what it was sent. It returns how many.
func (p *Proxy) ResetOrphans(gone dataplane.Gone) int {
	var dead []*connection
	p.orphans.mu.Lock()
	for c, l := range p.orphans.open {
		if _, is := gone[l.to]; is && l.Unheard() {
			dead = append(dead, c)
		}
	}
	p.orphans.mu.Unlock()
	for _, c := range dead {
		c.Reset()
	}
	return len(dead)
}
