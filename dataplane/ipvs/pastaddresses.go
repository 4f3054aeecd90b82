package ipvs

import (
	"maps"
	"net/netip"

	"fairlead.dev/fairlead/internal/ipvs"
	"fairlead.dev/fairlead/model"
)

// pastAddresses are the addresses of former frontends of virtual servers of marks, which do not name them. Connections
// to them may go on for as long as the virtual server drains.
type pastAddresses map[ipvs.Key]map[netip.Addr]struct{}

func (f pastAddresses) add(server ipvs.Key, a netip.Addr) {
	if f[server] == nil {
		f[server] = map[netip.Addr]struct{}{}
	}
	f[server][a] = struct{}{}
}

// noteFormers notes all that is held, as a whole State takes its place.
func (p *Plane) notePastAddresses() {
	if p.held == nil {
		return
	}
	for key, f := range p.held.frontends {
		p.held.notePastAddress(key, f)
	}
}

// noteFormer notes that a frontend goes, or changes.
func (r *rows) notePastAddress(key model.Key, f model.Frontend) {
	if key.Scope == model.Internal && forwards(key, f) {
		r.pastAddresses.add(r.pools[f.Pool].server(key), key.Addr)
	}
}

// adoptPastAddresses is for what another process has left. The kernel does not tell which addresses its marks were for:
// any that no row needs now.
func (p *Plane) adoptPastAddresses(k *kernel) {
	if p.pastAddresses != nil {
		k.pastAddresses = p.pastAddresses
		return
	}
	p.pastAddresses = pastAddresses{}
	k.pastAddresses = p.pastAddresses
	for key := range k.servers.held {
		if key.Mark == 0 {
			continue
		}
		for _, there := range p.locals.surplus() {
			p.pastAddresses.add(key, there.Addr())
		}
		for there := range p.locals.otherHeld {
			p.pastAddresses.add(key, there.Addr())
		}
	}
}

// prune forgets what does not drain.
func (f pastAddresses) prune(d *drains) {
	maps.DeleteFunc(f, func(key ipvs.Key, _ map[netip.Addr]struct{}) bool {
		_, drains := d.looked[key]
		return !drains
	})
}

// ending finds the addresses to which connections may go on, when a caller asks for them.
type ending func() map[netip.Addr]struct{}

func (f pastAddresses) ending(d *drains) ending {
	var found map[netip.Addr]struct{}
	return func() map[netip.Addr]struct{} {
		if found != nil {
			return found
		}
		found = map[netip.Addr]struct{}{}
		for key := range d.looked {
			if key.Mark == 0 {
				found[key.Addr] = struct{}{}
			}
			maps.Copy(found, f[key])
		}
		return found
	}
}

// keep reports whether an address, or one of a range, is among them.
func (e ending) keep(p netip.Prefix) bool {
	addrs := e()
	if p.IsSingleIP() {
		_, ok := addrs[p.Addr()]
		return ok
	}
	for a := range addrs {
		if p.Contains(a) {
			return true
		}
	}
	return false
}
