package relay

import (
	"fmt"
	"io"
	"net/netip"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/model"
)

// Listen serves the destination of a row by a socket there. The caller is in the right namespace; from says what it
// knows of a client at an address.
func (p *Proxy) Listen(e Endpoint, from func(netip.Addr) Packet, setups ...socket.Setup) (io.Closer, error) {
	first := func(client netip.AddrPort) Packet {
		at := from(client.Addr())
		at.Client, at.Destination = client, e.AddrPort
		return at
	}
	if e.Protocol == model.UDP {
		conn, err := socket.ListenUDP(e.AddrPort, setups...)
		if err != nil {
			return nil, err
		}
		answers := &Answers{UDPConn: conn, At: e.AddrPort}
		p.Receive(conn, func(client netip.AddrPort, _ []byte) (Packet, bool) {
			at := first(client)
			at.From = answers
			return at, true
		})
		return conn, nil
	}
	listen := socket.ListenTCP
	if e.Protocol == model.SCTP {
		listen = ListenSCTP
	}
	conn, err := listen(e.AddrPort, setups...)
	if err != nil {
		return nil, fmt.Errorf("listen %s %s: %w", e.Protocol, e.AddrPort, err)
	}
	p.Accept(conn, e.Protocol, func(_ int, client netip.AddrPort) (Packet, error) { return first(client), nil })
	return conn, nil
}
