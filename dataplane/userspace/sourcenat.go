package userspace

import (
	"errors"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/dataplane/internal/socket"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/model"
)

// sourceNAT has connections from the own address leave as their clients. An element of a map names the client, from
// before the first packet until connection tracking knows. If that may forget, the element stays as long as the flow
// lasts. Goroutines of connections share it.
type sourceNAT struct {
	ruleset *nft.Ruleset // that of the plane, which counts transactions
	conn    *nfnetlink.Socket
	tables  [2]*table // of both families; they hold no more than the name of the map

	mu      sync.Mutex
	waiting []*entry
	busy    bool // a goroutine does what waits, with conn and tables
}

// bindOwn binds a socket to the own address.
func bindOwn(fd int, v6 bool) (at netip.AddrPort, err error) {
	if err := socket.Free(fd, v6); err != nil {
		return at, err
	}
	if err := socket.Bind(netip.AddrPortFrom(ownAddress(v6), 0))(fd, v6); err != nil {
		return at, err
	}
	name, err := unix.Getsockname(fd)
	return socket.AddrPort(name), os.NewSyscallError("getsockname", err)
}

// enter has what a socket of the own address sends to a backend leave as the caller, unless that is to be hidden, until
// leave is called.
func (n *sourceNAT) enter(c relay.Call, b model.Backend, own netip.AddrPort) (leave func(), err error) {
	if c.Hidden(b) || c.Client().Addr().Is6() != own.Addr().Is6() {
		return func() {}, nil
	}
	key := model.Key{Addr: own.Addr(), Port: own.Port(), Protocol: c.Protocol()}
	if err := n.put(key, c.Client().Addr()); err != nil {
		return func() {}, err
	}
	return func() { _ = n.drop(key) }, nil // what stays is replaced by who has the port next
}

// present makes connection tracking forget an earlier flow from the port, and then has the socket leave as the caller.
// A new connection of TCP makes the kernel forget the earlier one (nf_conntrack_proto_tcp.c).
func (p *proxy) present(c relay.Call, b model.Backend, own netip.AddrPort) (leave func(), err error) {
	if c.Protocol() != model.TCP {
		if err := p.tracking.forget(c, own, b.AddrPort()); err != nil {
			return func() {}, err
		}
	}
	return p.sourceNAT.enter(c, b, own)
}

// connectOwn asks a backend by a socket of the own address.
func (p *proxy) connectOwn(c relay.Call, b model.Backend, setups ...socket.Setup) (*relay.Socket, error) {
	s := &relay.Socket{}
	present := func(fd int, v6 bool) error {
		own, err := bindOwn(fd, v6)
		if err == nil {
			s.Leave, err = p.present(c, b, own)
		}
		return err
	}
	conn, err := p.Connect(c, b, append(setups, present)...)
	if err != nil {
		if s.Leave != nil {
			s.Leave()
		}
		return nil, err
	}
	s.Conn = conn
	return s, nil
}

// put enters a socket. It replaces what an earlier one has left in its place.
func (n *sourceNAT) put(key model.Key, client netip.Addr) error {
	err := n.step(unix.NFT_MSG_NEWSETELEM, key, client)
	if errors.Is(err, unix.EEXIST) {
		err = errors.Join(n.drop(key), n.step(unix.NFT_MSG_NEWSETELEM, key, client))
	}
	return err
}

func (n *sourceNAT) drop(key model.Key) error {
	err := n.step(unix.NFT_MSG_DELSETELEM, key, netip.Addr{})
	if errors.Is(err, unix.ENOENT) { // another program was quicker
		return nil
	}
	return err
}

// entry is what is to be done for a socket.
type entry struct {
	verb   uint16
	key    model.Key
	client netip.Addr
	done   chan error
}

// step has an entry done. Entries that come while the kernel is busy are done together then: a transaction takes as
// long for one as for many.
func (n *sourceNAT) step(verb uint16, key model.Key, client netip.Addr) error {
	e := &entry{verb, key, client, make(chan error, 1)}
	n.mu.Lock()
	n.waiting = append(n.waiting, e)
	if !n.busy {
		n.busy = true
		go n.performAll()
	}
	n.mu.Unlock()
	return <-e.done
}

// performAll does what waits, until nothing does.
func (n *sourceNAT) performAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for len(n.waiting) > 0 {
		some := n.waiting
		n.waiting = nil
		n.mu.Unlock()
		n.perform(some)
		n.mu.Lock()
	}
	n.busy = false
}

// perform does entries together or, if the kernel refuses one of them, each for itself.
func (n *sourceNAT) perform(some []*entry) {
	err := n.send(some)
	for _, e := range some {
		if err != nil && len(some) > 1 {
			e.done <- n.send([]*entry{e})
		} else {
			e.done <- err
		}
	}
}

func (n *sourceNAT) send(some []*entry) error {
	tx := &nft.Transaction{}
	for _, e := range some {
		t := n.tables[0]
		if e.key.Addr.Is6() {
			t = n.tables[1]
		}
		t.Tx = tx
		t.Element(e.verb, sourceAddresses, nft.EncodeKey(e.key), e.client.AsSlice())
	}
	err := tx.Send(n.conn, tx.Steps)
	if err == nil {
		n.ruleset.Count()
	}
	return err
}

func (n *sourceNAT) close() {
	if n != nil && n.conn != nil {
		_ = n.conn.Close() // nothing waits in it
	}
}
