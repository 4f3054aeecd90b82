package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// packets are the programs for packets, and what only they read of the rows: who is a pod, and who may use frontends
// that allow some sources only.
type packets struct {
	*ebpf.Collection                  // for Ethernet
	bare             *ebpf.Collection // for devices without a link layer; nil: there was none yet
	loadBare         func() (*ebpf.Collection, error)
	pods             model.Pods
	node             nodeAddrs // what clients are hidden behind
	sources          map[objectsFrontendKey][]packetsSourceKey
	fault            func(operation string) error
}

// newPackets makes programs that read tables, which are filled.
func (p *Plane) newPackets(t *tables, s *model.State) (*packets, error) {
	if err := p.fault("ebpf load"); err != nil {
		return nil, err
	}
	own := packets{pods: s.Pods, fault: p.fault, sources: map[objectsFrontendKey][]packetsSourceKey{}}
	o := packetOptions{
		Anywhere: len(s.Pods.Interfaces) == 0, Fast: p.devices.drivers.mode.wanted(), Maps: map[string]*ebpf.Map{},
	}
	for _, name := range flowMaps() {
		o.Maps[name] = p.memory[name]
	}
	err := p.devices.namespace.Do(func() (err error) {
		if p.direct {
			if o.DirectMTU, err = p.devices.direct(); err != nil {
				return err
			}
		}
		o.Ports, err = p.portsForClients()
		return err
	})
	if err != nil {
		return nil, err
	}
	if own.Collection, err = newPackets(t.Maps, s, o); err != nil {
		return nil, fmt.Errorf("load programs for packets: %w", err)
	}
	for key := range s.Frontends {
		if keys := bothSources(s, key); len(keys) > 0 {
			own.sources[frontendKey(key)] = keys
		}
	}
	o.Bare, o.Fast = true, false
	for _, name := range []string{packetsMapPods, packetsMapSources, packetsMapNodeAddrs, packetsMapAnswers} {
		o.Maps[name] = own.Maps[name]
	}
	own.loadBare = func() (*ebpf.Collection, error) { return newPackets(t.Maps, s, o) }
	return &own, nil
}

// portsForClients are those of freePorts. That sockets share them is told once.
func (p *Plane) portsForClients() (portRange, error) {
	ports, shared, err := freePorts()
	if shared && !p.sharesPorts && p.config.Log != nil {
		p.config.Log.Warn("net.ipv4.ip_local_port_range leaves few ports to stand for clients, so ports of sockets do; "+
			"leave some thousands on one side of the range, or the node's own connections to backends may fail now and then",
			"enough", enoughPorts)
	}
	p.sharesPorts = shared
	return ports, err
}

// collection has the programs for a kind of device.
func (p *packets) collection(bare bool) (*ebpf.Collection, error) {
	if !bare {
		return p.Collection, nil
	}
	if p.bare == nil {
		c, err := p.loadBare()
		if err != nil {
			return nil, err
		}
		p.bare = c
	}
	return p.bare, nil
}

// at is the program for one side of a device.
func (p *packets) at(dev device, at side) (*ebpf.Program, error) {
	c, err := p.collection(dev.bare)
	if err != nil {
		return nil, err
	}
	switch {
	case at == egress():
		return c.Programs[packetsProgLeave], nil
	case p.pods.Contain(netip.Addr{}, dev.name):
		return c.Programs[packetsProgFromPods], nil
	}
	return c.Programs[packetsProgFromAnywhere], nil
}

func (p *packets) close() {
	p.Close()
	if p.bare != nil {
		p.bare.Close()
	}
}

// allow lets the programs know the sources that frontends allow, before they know that there are such. It returns what
// is to go when they do.
func (p *packets) allow(s *model.State, c model.Change) (gone []packetsSourceKey, err error) {
	if p == nil {
		return nil, nil
	}
	touched := map[objectsFrontendKey]model.Key{} // most frontends allow everyone: then there is nothing to look at
	touch := func(key model.Key) {
		if at := frontendKey(key); len(p.sources[at]) > 0 || limited(s, key) {
			touched[at] = key
		}
	}
	for key := range c.Frontends.Set {
		touch(key)
	}
	for _, key := range c.Frontends.Delete {
		touch(key)
	}
	for at, key := range touched {
		had, want := p.sources[at], bothSources(s, key)
		if len(had) == 0 && len(want) == 0 {
			continue
		}
		if err := p.fault("ebpf allow"); err != nil {
			return nil, err
		}
		if err := putAll(p.Maps[packetsMapSources], without(want, had)); err != nil {
			return nil, fmt.Errorf("frontend %s: %w", key, err)
		}
		gone = append(gone, without(had, want)...)
		if p.sources[at] = want; len(want) == 0 {
			delete(p.sources, at)
		}
	}
	return gone, nil
}

// limited reports whether one of both scopes of a key allows some sources only.
func limited(s *model.State, key model.Key) bool {
	for _, key.Scope = range []model.Scope{model.Any, model.Internal} {
		if s.Frontends[key].Allow != nil {
			return true
		}
	}
	return false
}

// disallow removes sources.
func (p *packets) disallow(gone []packetsSourceKey) error {
	for _, key := range gone {
		if err := p.Maps[packetsMapSources].Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("allowed sources: %w", err)
		}
	}
	return nil
}

func without(keys, others []packetsSourceKey) (out []packetsSourceKey) {
	for _, key := range keys {
		if !slices.Contains(others, key) {
			out = append(out, key)
		}
	}
	return out
}

func putAll(m *ebpf.Map, keys []packetsSourceKey) error {
	for _, key := range keys {
		err := insist(func() error { return m.Put(key, uint32(1)) })
		if errors.Is(err, unix.ENOSPC) {
			return errFull
		}
		if err != nil {
			return fmt.Errorf("allowed sources: %w", err)
		}
	}
	return nil
}

func fillPods(m *ebpf.Map, pods model.Pods) error {
	for _, prefix := range pods.Prefixes {
		if err := insist(func() error { return m.Put(guardKey(prefix), uint32(1)) }); err != nil {
			return fmt.Errorf("pods %s: %w", prefix, err)
		}
	}
	return nil
}

// bothSources are those of both scopes of a key.
func bothSources(s *model.State, key model.Key) (keys []packetsSourceKey) {
	for _, key.Scope = range []model.Scope{model.Any, model.Internal} {
		keys = append(keys, sourcesOf(s, key)...)
	}
	return keys
}

// sourcesOf are the elements that say who may use a frontend: as the programs ask, a row for any client that no
// internal one stands beside counts for the node and its pods as well.
func sourcesOf(s *model.State, key model.Key) (keys []packetsSourceKey) {
	f, internal := s.Frontends[key], key
	internal.Scope = model.Internal
	scopes := []model.Scope{key.Scope}
	if _, both := s.Frontends[internal]; !both {
		scopes = append(scopes, model.Internal)
	}
	for _, scope := range scopes {
		for _, prefix := range f.Allow {
			keys = append(keys, sourceKey(key, scope, prefix))
		}
	}
	return keys
}

func countSources(s *model.State) (n int) {
	for key := range s.Frontends {
		n += len(sourcesOf(s, key))
	}
	return n
}
