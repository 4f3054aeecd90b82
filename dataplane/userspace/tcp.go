package userspace

import (
	"errors"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/carry"
	"fairlead.dev/fairlead/model"
)

// whence tells where a client comes from that was accepted, and where it was going.
type whence func(fd int, client netip.AddrPort) (packet, error)

// accept takes connections until the proxy ends, or the socket is closed. All that wait are taken before any of them is
// served.
func (p *proxy) accept(l *carry.Conn, protocol model.Protocol, locate whence) {
	serve := p.serve
	if protocol == model.SCTP {
		serve = p.serveSCTP
	}
	for p.context.Err() == nil {
		err := l.Accept(func(fd int, client netip.AddrPort) {
			c := caller{Accepted: carry.Accepted{FD: fd}}
			at, err := locate(fd, client)
			if err != nil { // somebody asks us directly
				c.Reset()
				return
			}
			at.protocol = protocol
			c.serve = func(conn *connection, d decision) { serve(at, d, conn) }
			p.enter(at, c)
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

// shed keeps those out who wait while the process can open no more files.
func (p *proxy) shed(l *carry.Conn) {
	for range p.files.shed(l) {
		p.turned.count(nil, tooManyFiles)
	}
}

// brought is a client that TPROXY has brought.
func (o origin) brought(fd int, client netip.AddrPort) (packet, error) {
	to, err := unix.Getsockname(fd)
	return packet{origin: o, client: client, destination: carry.AddrPort(to)}, os.NewSyscallError("getsockname", err)
}

// serve finds a backend for a client and carries what they say until both have ended.
func (p *proxy) serve(at packet, d decision, conn *connection) {
	client := conn.Open()
	if client == nil {
		return
	}
	var backend *carry.Conn
	to := call{d, at.client, conn}
	b, err := p.reach(to, nil, func(b model.Backend, patience time.Duration) (err error) {
		backend, err = p.connectTCP(to, b, patience)
		return err
	})
	if err != nil {
		p.undialed(&d, err)
		client.Reset()
		return
	}
	d.pool.answered(at.client.Addr(), b, time.Now())
	p.carrier.Carry(&carry.Link{Activity: &conn.Activity, Client: client, Backend: backend, Borrow: conn.borrow})
}
