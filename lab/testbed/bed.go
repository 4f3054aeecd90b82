// Package testbed is a virtual cluster in network namespaces of this process: the node under test, a second node, pods
// on both, and a client outside. Everything has an IPv4 and an IPv6 address. Demo, conformance tests and benchmarks put
// a service proxy on the node and look at what real packets do.
//
//	         ┌ node ────────── 192.0.2.1 ┐        ┌ node-b ──────── 192.0.2.2 ┐
//	pods ────┤ cali…  10.244.1.0/24      │        │ cali…  10.244.2.0/24      ├──── pods
//	         └───────────┬───────────────┘        └───────────┬───────────────┘
//	             eth0    │                                     │    eth0
//	  LAN ═══════════════╪══════════════════╦══════════════════╪═════════ 192.0.2.0/24
//	                     │                  ║                  │
//	         outside 192.0.2.9       hosts (any address)    gateway 192.0.2.254
//
// Service, load balancer and external addresses belong to no machine: packets to them are routed to the node (a pod's
// pass its own node first). The node forwards packets that it does not take to the gateway, which answers
// "unreachable". So a probe tells a packet that the node dropped (TimedOut) from one that it let go by (Unreachable).
//
// Pods are sockets of this process. A server answers every connection and datagram with its pod's name and the address
// it saw. So one Probe shows which backend served, and whose source address arrived there. A pod hangs on an interface
// of the node named cali and eleven hex digits (as with Calico), or with Spec.PodBridge on a port of the bridge cbr0
// (as with kubenet). All its packets, those to its neighbours too, pass its node's routing.
//
// A Bed needs root or, see Reexec, a user namespace. It leaves no trace: the kernel removes all of it with the process,
// even a killed one.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
)

// Place is where a probe or command starts: Node, NodeB, Outside, or the name of a pod.
type Place string

const (
	// Node is the node under test.
	Node Place = "node"
	// NodeB is the second node. It forwards packets of its pods and has no proxy.
	NodeB Place = "node-b"
	// Outside is a client on the LAN that sends whatever is not for the LAN to Node.
	Outside Place = "outside"
	// LAN is where a PodSpec puts a host that belongs to no node and may have any address. It is the
	// gateway's own place, too.
	LAN Place = "lan"
)

const (
	lanBridge = "lan0" // the LAN, in the namespace of that place
	podBridge = "cbr0" // of a node whose Spec says PodBridge
)

// Spec describes a cluster. The zero Spec has both nodes, the client, and no pods.
type Spec struct {
	Pods []PodSpec
	// PodBridge puts the pods of each node on a bridge named cbr0 instead of an interface of their
	// own each.
	PodBridge bool
	// Cgroup puts Node and its pods into a cgroup of their own; see Bed.Cgroup. It needs root, and the hierarchy of
	// version 2. A killed process leaves the group, empty.
	Cgroup bool
}

// Bed is a running cluster. Its methods may be called concurrently.
type Bed struct {
	bridged bool
	cgroup  *cgroup // of Node and its pods; may be nil

	mu     sync.RWMutex
	places map[Place]*host
	pods   map[string]*pod
	used   map[netip.Addr]string // owner of each address
	serves sync.WaitGroup
}

// host is a namespace with its addresses.
type host struct {
	*netns
	addrs []netip.Addr // primary ones, IPv4 first
	ports sourcePorts
}

// New builds a cluster and returns when every address can be reached. The caller must Close it.
func New(ctx context.Context, s Spec) (*Bed, error) {
	b := &Bed{
		bridged: s.PodBridge,
		places:  map[Place]*host{},
		pods:    map[string]*pod{},
		used:    map[netip.Addr]string{},
	}
	if err := b.build(ctx, s); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func (b *Bed) build(ctx context.Context, s Spec) (err error) {
	if s.Cgroup {
		if b.cgroup, err = newCgroup(); err != nil {
			return fmt.Errorf("testbed: cgroup: %w", err)
		}
	}
	if err := b.addLAN(); err != nil {
		return fmt.Errorf("testbed: LAN: %w", err)
	}
	for _, p := range []struct {
		place Place
		addr  string
	}{{Node, nodeAddr}, {NodeB, nodeBAddr}, {Outside, outsideAddr}} {
		if err := b.addMachine(p.place, bothAddrs(p.addr)); err != nil {
			return fmt.Errorf("testbed: %s: %w", p.place, err)
		}
	}
	if err := b.addRoutes(); err != nil {
		return fmt.Errorf("testbed: routes: %w", err)
	}
	for _, p := range s.Pods {
		if _, err := b.AddPod(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// addLAN makes the switch, which is the gateway as well.
func (b *Bed) addLAN() error {
	n, err := newNetns(routerSysctls())
	if err != nil {
		return err
	}
	b.places[LAN] = &host{netns: n, addrs: bothAddrs(gatewayAddr)}
	bridge, err := n.addBridge(lanBridge, nil)
	if err != nil {
		return err
	}
	for _, a := range b.places[LAN].addrs {
		b.used[a] = string(LAN)
		if err := n.addAddr(bridge, lanPrefix(a)); err != nil {
			return err
		}
		if err := n.routeNowhere(anyPrefix(a.Is6())); err != nil {
			return err
		}
	}
	return n.addAddr(bridge, linkLocal(b.places[LAN].addrs[0]))
}

// addMachine puts a node or client on the LAN.
func (b *Bed) addMachine(place Place, addrs []netip.Addr) error {
	sysctls := hostSysctls()
	if place != Outside {
		sysctls = routerSysctls()
	}
	n, err := b.newNetns(place, sysctls)
	if err != nil {
		return err
	}
	b.places[place] = &host{netns: n, addrs: addrs}
	eth0, err := b.plug(n, string(place), nil)
	if err != nil {
		return err
	}
	if err := n.addAddr(eth0, linkLocal(addrs[0])); err != nil {
		return err
	}
	for _, a := range addrs {
		b.used[a] = string(place)
		if err := n.addAddr(eth0, lanPrefix(a)); err != nil {
			return err
		}
	}
	if b.bridged && place != Outside {
		_, err = n.addBridge(podBridge, podGatewayMAC())
	}
	return err
}

// newNetns makes a namespace on a machine; those on Node are in the cgroup.
func (b *Bed) newNetns(machine Place, sysctls []sysctl) (*netns, error) {
	n, err := newNetns(sysctls)
	if err == nil && machine == Node {
		if err = n.join(b.cgroup); err != nil {
			n.close()
		}
	}
	return n, err
}

// Cgroup is the directory of the cgroup to which the sockets of Node and its pods belong, and those of what Do runs
// there; empty without Spec.Cgroup.
func (b *Bed) Cgroup() string {
	if b.cgroup == nil {
		return ""
	}
	return b.cgroup.dir
}

// plug connects a namespace to the LAN and returns the index of its eth0.
func (b *Bed) plug(n *netns, name string, mac net.HardwareAddr) (int, error) {
	lan := b.places[LAN].netns
	bridge, err := lan.link.LinkByName(lanBridge)
	if err != nil {
		return 0, err
	}
	_, eth0, err := lan.addVeth(vethSpec{name: name, master: bridge.Attrs().Index, peer: n, far: mac})
	return eth0, err
}

// addRoutes leads every range of the plan to where it belongs.
func (b *Bed) addRoutes() error {
	gateway := b.places[LAN].addrs
	node, nodeB := b.places[Node].addrs, b.places[NodeB].addrs
	everything := []netip.Prefix{anyPrefix(false), anyPrefix(true)}
	routes := []struct {
		from Place
		to   []netip.Prefix
		via  []netip.Addr
	}{
		{Node, everything, gateway},
		{NodeB, everything, gateway},
		{Outside, everything, node},
		{Node, PodCIDRs(NodeB), nodeB},
		{NodeB, PodCIDRs(Node), node},
		{Outside, PodCIDRs(NodeB), nodeB},
		{LAN, PodCIDRs(Node), node},
		{LAN, PodCIDRs(NodeB), nodeB},
	}
	for _, r := range routes {
		for _, to := range r.to {
			if err := b.places[r.from].routeVia(to, r.via); err != nil {
				return err
			}
		}
	}
	for _, node := range []Place{Node, NodeB} {
		for _, p := range PodCIDRs(node) { // an address that no pod has must not leave the node
			if err := b.places[node].routeNowhere(p); err != nil {
				return err
			}
		}
	}
	for _, p := range slices.Concat(ServiceCIDRs(), LoadBalancerCIDRs(), ExternalCIDRs()) {
		if err := b.Route(p); err != nil {
			return err
		}
	}
	return nil
}

// Route makes NodeB and Outside send packets for prefix to Node. The ranges of the plan that belong
// to Services are routed so from the start.
func (b *Bed) Route(prefix netip.Prefix) error {
	via := bothAddrs(nodeAddr)
	for _, from := range []Place{NodeB, Outside} {
		h, err := b.host(from)
		if err == nil {
			err = h.routeVia(prefix, via)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Addr is the first address of a place in one family, and the zero Addr if it has none or there is
// no such place.
func (b *Bed) Addr(place Place, v6 bool) netip.Addr {
	h, err := b.host(place)
	if err != nil {
		return netip.Addr{}
	}
	return addrOf(h.addrs, v6)
}

// Owner is the place that has an address: a machine, or a pod (HostNetwork apart) or host. It is empty if no place has
// it.
func (b *Bed) Owner(a netip.Addr) Place {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return Place(b.used[a])
}

// Do runs f in a place's network namespace, on a thread of its own that ends with f. Sockets that f
// opens stay in the namespace wherever they are used; goroutines that f starts run outside it.
func (b *Bed) Do(place Place, f func() error) error {
	h, err := b.host(place)
	if err != nil {
		return err
	}
	return h.do(f)
}

func (b *Bed) host(place Place) (*host, error) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	h := b.places[place]
	if h == nil {
		return nil, fmt.Errorf("testbed: there is no place %q", place)
	}
	return h, nil
}

// Close stops all servers and commands, and removes the cluster. The kernel frees namespaces in the
// background.
func (b *Bed) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.pods {
		p.stop()
	}
	b.serves.Wait()
	for _, h := range b.places {
		h.close()
	}
	clear(b.places)
	clear(b.pods)
	clear(b.used)
	return b.cgroup.close()
}
