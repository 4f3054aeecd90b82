package testbed

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// PodSpec describes a pod, or with Node: LAN a host on the LAN that is no part of the cluster.
type PodSpec struct {
	Name  string
	Node  Place        // Node, NodeB or LAN (with HostNetwork also Outside); empty: Node
	Addrs []netip.Addr // at most one of each family; empty: the node's next free pair
	Ports []PodPort    // on which it serves
	// HostNetwork puts the pod's servers into the namespace of its node, whose addresses it has.
	HostNetwork bool
}

// PodPort is a port on which a pod serves.
type PodPort struct {
	Protocol model.Protocol
	Port     uint16
}

func (p PodPort) String() string { return fmt.Sprintf("%d/%s", p.Port, p.Protocol) }

// Pod is a running pod.
type Pod struct {
	Name  string
	Node  Place
	Addrs []netip.Addr // IPv4 first
	// Interface is the one of the node on which the pod's packets arrive; empty with HostNetwork and
	// for hosts on the LAN.
	Interface string
}

// pod is a running pod and all that belongs to it.
type pod struct {
	Pod
	spec    PodSpec
	host    *host  // its namespace, or its node's with HostNetwork
	cable   string // name of its other end; empty: it has none
	routed  []port // behind which others find its addresses
	servers map[PodPort]*server
}

// AddPod starts a pod. It returns when the pod's addresses can be reached and its ports answer. An
// error leaves nothing behind.
func (b *Bed) AddPod(ctx context.Context, s PodSpec) (*Pod, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	p, err := b.newPod(s)
	if err != nil {
		return nil, fmt.Errorf("testbed: pod %q: %w", s.Name, err)
	}
	b.pods[s.Name], b.places[Place(s.Name)] = p, p.host
	if err = b.connect(p); err == nil {
		err = b.serve(p, s.Ports)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("testbed: pod %q: %w", s.Name, err), b.removePod(p))
	}
	return &p.Pod, nil
}

// newPod checks a PodSpec, fills its gaps and makes the namespace.
func (b *Bed) newPod(s PodSpec) (*pod, error) {
	if s.Node == "" {
		s.Node = Node
	}
	switch {
	case s.Name == "" || b.places[Place(s.Name)] != nil:
		return nil, errors.New("the name is empty or taken")
	case PodCIDRs(s.Node) == nil && s.Node != LAN && (s.Node != Outside || !s.HostNetwork):
		return nil, fmt.Errorf("%q is not a node (node, node-b or lan)", s.Node)
	case b.places[s.Node] == nil:
		return nil, errors.New("the testbed is closed")
	}
	p := &pod{Pod: Pod{Name: s.Name, Node: s.Node}, spec: s, servers: map[PodPort]*server{}}
	if s.HostNetwork {
		p.host = b.places[s.Node]
		p.Addrs = p.host.addrs
		return p, nil
	}
	addrs, err := b.podAddrs(s)
	if err != nil {
		return nil, err
	}
	n, err := b.newNetns(s.Node, hostSysctls())
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		b.used[a] = s.Name
	}
	p.Addrs = addrs
	p.host = &host{netns: n, addrs: addrs}
	return p, nil
}

func (b *Bed) podAddrs(s PodSpec) ([]netip.Addr, error) {
	if len(s.Addrs) == 0 {
		if s.Node == LAN {
			return nil, errors.New("a host on the LAN needs an address")
		}
		return freePodAddr(s.Node, b.used)
	}
	addrs := slices.SortedFunc(slices.Values(s.Addrs), netip.Addr.Compare)
	for i, a := range addrs {
		switch {
		case !a.IsValid() || a.Is4In6() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.Zone() != "":
			return nil, fmt.Errorf("%s cannot be its address", a)
		case i > 0 && a.Is4() == addrs[i-1].Is4():
			return nil, fmt.Errorf("%s and %s are of one family", addrs[i-1], a)
		case b.used[a] != "":
			return nil, fmt.Errorf("%s is the address of %s", a, b.used[a])
		}
	}
	return addrs, nil
}

// connect lays the pod's cable and makes its addresses known.
func (b *Bed) connect(p *pod) error {
	switch {
	case p.spec.HostNetwork:
		return nil
	case p.Node == LAN:
		return b.connectLAN(p)
	}
	return b.connectNode(p)
}

// connectNode hangs a pod on its node. It can reach nothing but by way of the node.
func (b *Bed) connectNode(p *pod) error {
	node := b.places[p.Node].netns
	p.cable = podInterface("cali", p.Name)
	p.Interface = p.cable
	cable := vethSpec{near: podGatewayMAC(), far: p.mac(), peer: p.host.netns}
	if b.bridged {
		bridge, err := node.link.LinkByName(podBridge)
		if err != nil {
			return err
		}
		p.cable, p.Interface = podInterface("veth", p.Name), podBridge
		cable.near, cable.master = nil, bridge.Attrs().Index
	}
	cable.name = p.cable
	near, far, err := node.addVeth(cable)
	if err != nil {
		return err
	}
	if b.bridged {
		near = cable.master
	}
	p.routed = []port{{node, near}}
	eth0 := port{p.host.netns, far}
	if err := eth0.setNeighbour(podGateway(), podGatewayMAC()); err != nil {
		return err
	}
	return p.configure(far, func(a netip.Addr) error { return eth0.routeDefault(a.Is6()) })
}

// connectLAN puts a host on the LAN, whatever its addresses are, and announces it there.
func (b *Bed) connectLAN(p *pod) error {
	p.cable = podInterface("host", p.Name)
	eth0, err := b.plug(p.host.netns, p.cable, p.mac())
	if err != nil {
		return err
	}
	for place, name := range map[Place]string{LAN: lanBridge, Node: "eth0", NodeB: "eth0", Outside: "eth0"} {
		n := b.places[place].netns
		link, err := n.link.LinkByName(name)
		if err != nil {
			return err
		}
		p.routed = append(p.routed, port{n, link.Attrs().Index})
	}
	if err := p.host.addAddr(eth0, linkLocal(p.Addrs[0])); err != nil {
		return err
	}
	return p.configure(eth0, func(a netip.Addr) error {
		if err := p.host.routeDirect(lanOf(a), eth0); err != nil {
			return err
		}
		return p.host.routeVia(anyPrefix(a.Is6()), b.places[LAN].addrs)
	})
}

// configure gives the pod's eth0 its addresses, calls route for each of them, and tells others.
func (p *pod) configure(eth0 int, route func(netip.Addr) error) error {
	for _, a := range p.Addrs {
		if err := p.host.addAddr(eth0, hostPrefix(a)); err != nil {
			return err
		}
		if err := route(a); err != nil {
			return err
		}
		for _, other := range p.routed {
			if err := other.reach(a, p.mac()); err != nil {
				return err
			}
		}
	}
	return nil
}

// mac is the hardware address of a pod, which belongs to its first address.
func (p *pod) mac() net.HardwareAddr {
	last := p.Addrs[0].As16()
	return append(net.HardwareAddr{0x0a, 0x58}, last[12:]...)
}

// podInterface is the name of the far end of a pod's cable. Names of interfaces are at most 15 long.
func podInterface(prefix, pod string) string {
	sum := sha1.Sum([]byte(pod))
	return prefix + hex.EncodeToString(sum[:])[:11]
}

// Serve makes a pod answer on more ports. Those on which it already does are left alone.
func (b *Bed) Serve(name string, ports ...PodPort) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.pods[name]
	if p == nil {
		return fmt.Errorf("testbed: there is no pod %q", name)
	}
	if err := b.serve(p, ports); err != nil {
		return fmt.Errorf("testbed: pod %q: %w", name, err)
	}
	return nil
}

// StopServing ends a pod's servers and their connections, as the end of its processes does. Connections to its
// addresses are refused from then on, and its ports are free.
func (b *Bed) StopServing(name string) error {
	b.mu.Lock()
	p := b.pods[name]
	if p == nil {
		b.mu.Unlock()
		return fmt.Errorf("testbed: there is no pod %q", name)
	}
	servers := slices.Collect(maps.Values(p.servers))
	p.stop()
	b.mu.Unlock() // probes need not wait until the ports are free
	for _, s := range servers {
		<-s.gone
	}
	return nil
}

// RemovePod ends a pod: its servers close their connections, then its addresses vanish.
func (b *Bed) RemovePod(name string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.pods[name]
	if p == nil {
		return fmt.Errorf("testbed: there is no pod %q", name)
	}
	if err := b.removePod(p); err != nil {
		return fmt.Errorf("testbed: remove pod %q: %w", name, err)
	}
	return nil
}

func (b *Bed) removePod(p *pod) error {
	p.stop()
	delete(b.pods, p.Name)
	delete(b.places, Place(p.Name))
	if p.spec.HostNetwork {
		return nil
	}
	for _, a := range p.Addrs {
		delete(b.used, a)
	}
	defer p.host.close()
	return b.unplug(p)
}

// unplug removes the pod's routes and cable. The kernel would remove the cable when it frees the
// namespace, but later.
func (b *Bed) unplug(p *pod) error {
	var errs []error
	for _, other := range p.routed {
		for _, a := range p.Addrs {
			errs = append(errs, other.forget(a))
		}
	}
	if link, err := b.places[p.Node].link.LinkByName(p.cable); err == nil { // else it was never laid
		errs = append(errs, b.places[p.Node].link.LinkDel(link))
	}
	return errors.Join(errs...)
}
