package ebpf

import (
	"fmt"
	"maps"

	"github.com/cilium/ebpf"
)

// packets are the programs for packets. Most devices have the same; others are loaded when there is such a device.
type packets struct {
	*ebpf.Collection       // for Ethernet
	tables           *sets // that they read
	options          packetOptions
	others           map[kind]*ebpf.Collection
	node             nodeAddrs // what clients are hidden behind
	reserved         reservedPorts
	identities       identities
}

// kind is what matters to programs of a device.
type kind struct {
	bare bool // packets begin with the header of IP
	pods bool // it leads to pods, and to nothing else
}

// loadPackets loads the programs for packets, unless there are some that know the same of the node.
func (p *Plane) loadPackets(sets *sets) error {
	o := packetOptions{
		Maps:     map[string]*ebpf.Map{},
		Secret:   p.secret,
		Programs: []string{packetsProgFromAnywhere, packetsProgLeave},
	}
	if p.devices.drivers.mode.wanted() {
		o.Programs = append(o.Programs, packetsProgFromOutside)
	}
	shared := append(flowMaps(), objectsMapAffinities, objectsMapRefusals, objectsMapShares, objectsMapSockets,
		objectsMapLoads)
	for _, name := range shared {
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
		return err
	}
	if had := p.packets; had != nil && had.options.Ports == o.Ports && had.options.DirectMTU == o.DirectMTU {
		return nil
	}
	c, err := newPackets(sets, o)
	if err != nil {
		return fmt.Errorf("load programs for packets: %w", err)
	}
	p.closePackets()
	p.packets = &packets{Collection: c, tables: sets, options: o, others: map[kind]*ebpf.Collection{}}
	return nil
}

// portsForClients are those of freePorts. That sockets share them is told once.
func (p *Plane) portsForClients() (portRange, error) {
	ports, shared, err := freePorts()
	if shared && !p.sharesPorts {
		p.config.Logger().Warn("net.ipv4.ip_local_port_range leaves few ports for source NAT, so the node's own connections "+
			"to backends may fail now and then; leave some thousands of ports below or above the range",
			"limit", enoughPorts)
	}
	p.sharesPorts = shared
	return ports, err
}

// closePackets leaves the programs to the devices that have them. None gets them any more.
func (p *Plane) closePackets() {
	if p.packets == nil {
		return
	}
	p.devices.forget()
	p.packets.close()
	p.packets = nil
}

// at is the program for one side of a kind of device.
func (p *packets) at(k kind, at side) (*ebpf.Program, error) {
	program := packetsProgFromAnywhere
	switch {
	case at == egress():
		program, k.pods = packetsProgLeave, false
	case k.pods:
		program = packetsProgFromPods
	}
	c, err := p.collection(k, program)
	if err != nil {
		return nil, err
	}
	return c.Programs[program], nil
}

// collection has the programs for a kind of device, which use the same tables as all others.
func (p *packets) collection(k kind, program string) (*ebpf.Collection, error) {
	if k == (kind{}) {
		return p.Collection, nil
	}
	if c := p.others[k]; c != nil {
		return c, nil
	}
	o := p.options
	o.Bare, o.Programs = k.bare, []string{program}
	if !k.pods {
		o.Programs = []string{packetsProgFromAnywhere, packetsProgLeave}
	}
	o.Maps = maps.Clone(o.Maps)
	for _, name := range []string{packetsMapNodeAddrs, packetsMapAnswers, packetsMapTaken} {
		o.Maps[name] = p.Maps[name]
	}
	c, err := newPackets(p.tables, o)
	if err == nil {
		p.others[k] = c
	}
	return c, err
}

func (p *packets) close() {
	p.Close()
	for _, c := range p.others {
		c.Close()
	}
}
