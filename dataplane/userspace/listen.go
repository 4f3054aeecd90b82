package userspace

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/internal/relay"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/said"
)

// Without root there are no rules: the process listens at the destinations of rows themselves, as far as it may.
//
//	rows ─► bind ─► accept ─► the row ─► a backend, as this process
//	         └─ not this machine's address, or a port for root: named once

func compareEndpoints(a, b relay.Endpoint) int { return strings.Compare(a.String(), b.String()) }

// listeners are the sockets at destinations of rows.
type listeners struct {
	proxy    *proxy
	open     map[relay.Endpoint]io.Closer
	unserved map[relay.Endpoint]error
	reported map[relay.Endpoint]bool
	locals   atomic.Pointer[localities]
}

// localities tell who a client is.
type localities struct {
	pods []netip.Prefix
	own  map[netip.Addr]bool
}

func newListeners(p *proxy) *listeners {
	return &listeners{
		proxy: p, open: map[relay.Endpoint]io.Closer{}, unserved: map[relay.Endpoint]error{},
		reported: map[relay.Endpoint]bool{},
	}
}

// locate finds out which addresses are the node's.
func (l *listeners) locate(pods []netip.Prefix) {
	found := &localities{pods: slices.Clone(pods), own: map[netip.Addr]bool{}}
	addresses, _ := net.InterfaceAddrs() // without them clients are from elsewhere
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			found.own[p.Addr()] = true
		}
	}
	l.locals.Store(found)
}

// origin is where a client is from.
func (l *listeners) origin(client netip.Addr) origin {
	found := l.locals.Load()
	switch {
	case client.IsLoopback() || found.own[client.WithZone("")]:
		return fromNode
	case slices.ContainsFunc(found.pods, func(p netip.Prefix) bool { return p.Contains(client) }):
		return fromPod
	}
	return elsewhere
}

// serve has exactly the rows that forward served, as far as it may be.
func (l *listeners) serve(frontends map[model.Key]model.Frontend) {
	wanted := map[relay.Endpoint]bool{}
	for key, f := range frontends {
		if f.Verdict == model.Forward {
			wanted[relay.EndpointOf(key)] = true
		}
	}
	for e := range l.open {
		if !wanted[e] {
			l.close(e)
		}
	}
	clear(l.unserved)
	for e := range wanted {
		l.try(e)
	}
}

// change opens and closes what a change of rows asks for. There may be a row of another scope.
func (l *listeners) change(c model.Change, rows *relay.Directory) {
	for e := range relay.Touched(c) {
		if rows.Forwards(e) {
			l.try(e)
		} else {
			l.close(e)
		}
	}
}

// try listens, unless it does.
func (l *listeners) try(e relay.Endpoint) {
	if l.open[e] != nil {
		return
	}
	socket, err := l.proxy.Listen(e, func(client netip.Addr) relay.Packet { return l.origin(client).packet() })
	if err != nil {
		l.unserved[e] = err
		return
	}
	l.open[e] = socket
	delete(l.unserved, e)
	delete(l.reported, e)
}

func (l *listeners) close(e relay.Endpoint) {
	if socket := l.open[e]; socket != nil {
		socket.Close()
	}
	delete(l.open, e)
	delete(l.unserved, e)
	delete(l.reported, e)
}

func (l *listeners) closeAll() {
	for e := range l.open {
		l.close(e)
	}
}

// retry tries again what could not be served: the machine may have got the address.
func (l *listeners) retry() {
	for _, e := range slices.SortedFunc(maps.Keys(l.unserved), compareEndpoints) {
		l.try(e)
	}
}

// report names what is not served, once.
func (l *listeners) report(c dataplane.Config) {
	c.Log = c.Logger()
	var addresses, ports []string
	for _, e := range slices.SortedFunc(maps.Keys(l.unserved), compareEndpoints) {
		err := l.unserved[e]
		switch {
		case l.reported[e]:
			continue
		case errors.Is(err, unix.EADDRNOTAVAIL):
			addresses = append(addresses, e.String())
		case errors.Is(err, unix.EACCES):
			ports = append(ports, e.String())
		default:
			unserved(c.Log)(e, err)
		}
		l.reported[e] = true
	}
	if len(addresses) > 0 {
		c.Log.Warn("destinations are not served, as this machine lacks their addresses; add them (as root: ip address "+
			"add ADDRESS dev lo), or use a NodePort", "destination", said.List(addresses))
	}
	if len(ports) > 0 {
		c.Log.Warn("destinations are not served, as only root may listen on their ports; lower the sysctl "+
			"net.ipv4.ip_unprivileged_port_start, or give the program CAP_NET_BIND_SERVICE",
			"destination", said.List(ports))
	}
}

// unserved names a destination that is not served.
func unserved(log *slog.Logger) func(relay.Endpoint, error) {
	return func(e relay.Endpoint, err error) {
		log.Warn("cannot listen for a destination, which is not served", "destination", e.String(), "error", err)
	}
}

// listens reports whether there are no rules.
func (p *Plane) listens() bool { return p.options.Redirect == ByListening }

// syncListeners is Sync without rules.
func (p *Plane) syncListeners(_ context.Context, s *model.State) error {
	if err := p.config.Inject("userspace listen"); err != nil {
		return err
	}
	if p.proxy == nil {
		p.proxy = newProxy(p.options, p.namespace, p.config.Logger())
		p.proxy.listeners = newListeners(p.proxy)
	}
	p.proxy.Rows.Replace(s)
	return p.listen(s, func(l *listeners) {
		l.serve(s.Frontends)
		p.proxy.Expel(nil)
	})
}

// applyListeners is Apply without rules.
func (p *Plane) applyListeners(s *model.State, c model.Change) error {
	if p.proxy == nil {
		return errors.New("userspace: no socket listens; Sync first")
	}
	if err := p.config.Inject("userspace listen"); err != nil {
		return err
	}
	p.proxy.Rows.Change(c)
	return p.listen(s, func(l *listeners) {
		l.change(c, p.proxy.Rows)
		p.proxy.Expel(&c)
	})
}

func (p *Plane) listen(s *model.State, f func(*listeners)) error {
	return p.namespace.Do(func() error {
		p.proxy.listeners.locate(s.Pods.Prefixes)
		f(p.proxy.listeners)
		p.proxy.listeners.report(p.config)
		return nil
	})
}
