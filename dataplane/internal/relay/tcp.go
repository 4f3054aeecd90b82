package relay

import (
	"errors"
	"net/netip"
	"os"
	"time"

	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/model"
)

//	accept ─► enter: a row? a place? ─► gate ─► serve: reach a backend ─► copy, until both sides have ended
//	              └─ no: reset                              └─ none: reset

// A Locator tells where a client comes from that was accepted, and where it was going.
type Locator func(fd int, client netip.AddrPort) (Packet, error)

// Accept takes connections in a goroutine, until the proxy ends, or the socket is closed. All that wait are taken
// before any of them is served.
func (p *Proxy) Accept(l *socket.Conn, protocol model.Protocol, locate Locator) {
	p.group.Go(func() { p.accept(l, protocol, locate) })
}

func (p *Proxy) accept(l *socket.Conn, protocol model.Protocol, locate Locator) {
	for p.context.Err() == nil {
		err := l.Accept(func(fd int, client netip.AddrPort) {
			at, err := locate(fd, client)
			if err != nil { // a client has connected to this socket's own address
				socket.Accepted{FD: fd}.Reset()
				return
			}
			at.Protocol = protocol
			p.enter(at, socket.Accepted{FD: fd})
		})
		switch {
		case err == nil:
			continue
		case errors.Is(err, os.ErrClosed):
			return
		case isExhausted(err):
			p.shed(l)
		}
		p.pause()
	}
}

// shed refuses connections that wait while the process can open no more files.
func (p *Proxy) shed(l *socket.Conn) {
	for range p.files.shed(l) {
		p.turned.count(nil, tooManyFiles)
	}
}

// serve finds a backend for a client and copies what they say until both have ended.
func (p *Proxy) serve(at Packet, d decision, conn *connection) {
	client := conn.Open()
	if client == nil {
		return
	}
	setups := setupsTCP
	if at.Protocol == model.SCTP {
		setups = setupsSCTP(client)
	}
	var backend *socket.Conn
	to := Call{d, at.Client, conn}
	b, err := p.reach(to, nil, func(b model.Backend, patience time.Duration) (err error) {
		backend, err = p.connect(to, b, patience, setups)
		return err
	})
	if err != nil {
		p.undialed(&d, err)
		client.Reset()
		return
	}
	d.pool.answered(at.Client.Addr(), b, time.Now())
	carried := d.pool.carriedBy(b)
	carried.Open.Add(1)
	defer carried.Open.Add(-1)
	if at.Protocol == model.SCTP {
		p.copyBothSCTP(client, backend, conn, carried)
		return
	}
	p.legs.Store(conn, leg{backend, b, d.key.AddrPort(), client})
	defer p.legs.Delete(conn)
	p.copier.Copy(&socket.Link{
		Activity: &conn.Activity, Client: client, Backend: backend, Carried: carried, Borrow: conn.borrow,
	})
}

var setupsTCP = []socket.Setup{socket.Lively, socket.Abortive}
