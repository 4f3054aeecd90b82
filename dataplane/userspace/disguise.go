package userspace

import (
	"errors"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/nf"
	"fairlead.dev/fairlead/dataplane/internal/nfnetlink"
	"fairlead.dev/fairlead/model"
)

// disguise has connections from the own address leave as their clients: an element of a map says as whom, from before
// the first packet until connection tracking knows. Goroutines of connections share it.
type disguise struct {
	mu     sync.Mutex
	conn   *nfnetlink.Socket
	tables [2]*table // of both families; they hold no more than the name of the map

	transactions atomic.Uint32 // of nf_tables, that were done
}

// bindOwn binds a socket to the own address.
func bindOwn(fd int, v6 bool) (at netip.AddrPort, err error) {
	if err := freeBind(fd, v6); err != nil {
		return at, err
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(ownAddress(v6), 0))); err != nil {
		return at, os.NewSyscallError("bind", err)
	}
	name, err := unix.Getsockname(fd)
	return addrPortOf(name), os.NewSyscallError("getsockname", err)
}

// disguised connects a socket that is bound to the own address to a backend, as the client unless that is to be hidden.
func (p *proxy) disguised(c call, b model.Backend, own netip.AddrPort, connect func() error) error {
	if c.hidden(b) || c.client.Addr().Is6() != own.Addr().Is6() {
		return connect()
	}
	key := model.Key{Addr: own.Addr(), Port: own.Port(), Protocol: c.key.Protocol}
	if err := p.disguise.put(key, c.client.Addr()); err != nil {
		return err
	}
	return errors.Join(connect(), p.disguise.drop(key))
}

// put enters a socket. What an earlier one has left in its place goes.
func (d *disguise) put(key model.Key, client netip.Addr) error {
	err := d.step(unix.NFT_MSG_NEWSETELEM, key, client)
	if errors.Is(err, unix.EEXIST) {
		err = errors.Join(d.drop(key), d.step(unix.NFT_MSG_NEWSETELEM, key, client))
	}
	return err
}

func (d *disguise) drop(key model.Key) error {
	err := d.step(unix.NFT_MSG_DELSETELEM, key, netip.Addr{})
	if errors.Is(err, unix.ENOENT) { // somebody else was quicker
		return nil
	}
	return err
}

func (d *disguise) step(verb uint16, key model.Key, client netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.tables[0]
	if key.Addr.Is6() {
		t = d.tables[1]
	}
	t.Tx = &nf.Transaction{}
	t.Element(verb, disguises, nf.EncodeKey(key), client.AsSlice())
	err := t.Tx.Send(d.conn, t.Tx.Steps)
	if err == nil {
		d.transactions.Add(1)
	}
	return err
}

func (d *disguise) close() {
	if d.conn != nil {
		_ = d.conn.Close() // nothing waits in it
	}
}
