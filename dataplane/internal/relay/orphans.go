package relay

import (
	"net/netip"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/socket"
)

// leg is a connection to a backend, for a client.
type leg struct {
	*socket.Conn
	to, service netip.AddrPort
	client      *socket.Conn
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

// CloseIdle closes connections as dataplane.Observed says. Both sides see an end, as if the other had closed.
func (p *Proxy) CloseIdle(of *dataplane.Idle) (n int) {
	var open []dataplane.Open
	var connections []any
	for c, l := range p.legs.Range {
		if l := l.(leg); of.Backends[l.to] {
			idle := time.Since(time.Unix(0, c.(*connection).Used()))
			open = append(open, dataplane.Open{Service: l.service, Backend: l.to, Idle: idle})
			connections = append(connections, c)
		}
	}
	for _, i := range of.Choose(open) {
		if l, ok := p.legs.LoadAndDelete(connections[i]); ok {
			l.(leg).client.CloseRead()
			l.(leg).CloseRead()
			n++
		}
	}
	return n
}
