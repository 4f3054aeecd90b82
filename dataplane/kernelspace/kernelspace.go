// Package kernelspace is the data plane of Windows nodes: it programs the Host Networking Service (HNS), which has the
// virtual switch do what rows say.
//
//	State, Change ─► layout ─► balancers ──┐
//	                                       ├─► settle ─► HNS
//	HNS ─► held: load balancers, endpoints ┤
//	record: which of them are Fairlead's ──┘
//
// HNS has one load balancer for an address, port and protocol, which sends connections to endpoints: ports of the
// switch. The network plugin makes those of pods on this node. For a pod elsewhere Fairlead makes a remote endpoint.
// Package service makes rows that HNS can have, and reports what objects ask for beyond that.
//
// The meaning of flags is that of kube-proxy's mode kernelspace: pkg/proxy/winkernel of Kubernetes 1.37.
package kernelspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/model"
)

// Name is that of the plane.
const Name = "kernelspace"

// Options are settings of the plane, some of them those of kube-proxy's section winkernel.
type Options struct {
	Network      string     // networkName, or else KUBE_NETWORK of the environment
	SourceVIP    netip.Addr // sourceVip: the source of packets that load balancers send; overlay networks need it
	RootEndpoint string     // rootHnsEndpointName: where connections to health VIPs go
	NodeIP       netip.Addr // of the node in the underlay; not valid: that by which other nodes are reached
	// Host is the interface that has NodeIP, or from which packets go to another node; nil: that of the system.
	Host       func(ip, toward netip.Addr) (netip.Addr, net.HardwareAddr, error)
	Everywhere bool    // NodePorts are open on all addresses of the node, whichever rows there are
	Records    string  // directory of the record of Fairlead's objects; empty: there is none
	HNS        hns.HNS // nil: that of the system
}

// Driver opens the plane.
func Driver(o Options) dataplane.Driver {
	open := func(c dataplane.Config) (*plane, error) {
		p := &plane{options: o, config: c, hns: o.HNS}
		p.config.Log = c.Logger()
		var err error
		if p.hns == nil {
			if p.hns, err = hns.System(); err != nil {
				return nil, fmt.Errorf("mode %s: %w: %w", Name, err, dataplane.ErrUnsupported)
			}
		}
		if p.options.Host == nil {
			p.options.Host = host
		}
		p.record, err = openRecord(o.Records)
		return p, err
	}
	return dataplane.Driver{
		Name: Name,
		Open: func(c dataplane.Config) (dataplane.Dataplane, error) {
			p, err := open(c)
			if err != nil {
				return nil, err
			}
			return p, nil
		},
		Inspect: func() (dataplane.Leftover, error) {
			r, err := openRecord(o.Records)
			return dataplane.Leftover{Rules: err == nil && len(r.objects) > 0}, err
		},
		Remove: func(ctx context.Context, c dataplane.Config) error {
			p, err := open(c)
			if err != nil {
				return err
			}
			return errors.Join(p.Remove(ctx), p.Close())
		},
	}
}

// plane implements dataplane.Dataplane. The effect of a call that failed is not known: the next Sync reads it again.
type plane struct {
	dataplane.Base
	options Options
	config  dataplane.Config
	hns     hns.HNS
	record  *record

	features hns.Features
	held     *held                    // nil before the first Sync
	layout   *layout                  // of the State at hand
	due      map[frontend]bool        // load balancers that are not as they should be
	idle     map[string]bool          // ids of own endpoints that no load balancer may need
	stale    map[string]bool          // ids of own endpoints that must be made anew
	host     struct{ ip, mac string } // of the node in the underlay of an overlay network
	coexist  *bool                    // whether HNS takes a second load balancer of a frontend; nil: not known
	rigid    bool                     // HNS cannot change a load balancer, whatever its version says
	removing bool
}

// Sync reads all objects, or after an ErrPartial those that may have changed, keeps what is right, and makes what is
// missing before it deletes what is not wanted.
func (p *plane) Sync(ctx context.Context, s *model.State) error {
	first := p.layout == nil
	if first {
		if err := p.reopen(); err != nil {
			return err
		}
	}
	err := p.look(ctx, len(p.due) == 0)
	if err == nil {
		err = p.prepareOverlay(ctx)
	}
	if err != nil {
		p.held = nil
		return err
	}
	p.layout = newLayout(p.options.Everywhere, p.features, p.held.overlay())
	p.layout.change(s, s.Whole())
	if err := p.adopt(s, first); err != nil {
		return err
	}
	if err := p.settleAll(ctx); err != nil {
		return err
	}
	return p.prune()
}

// reopen reads the record again: a plane with other settings may have served until now.
func (p *plane) reopen() error {
	r, err := openRecord(p.options.Records)
	if err != nil {
		return err
	}
	p.record, r = r, p.record
	return r.close()
}

// prune removes from the record objects that HNS has lost, as it does when it starts anew.
func (p *plane) prune() error {
	there := map[string]bool{takenOver: true}
	for f := range p.held.taken {
		there[balancerObject(f)] = true
	}
	for a := range p.held.at {
		there[p.endpointObject(a)] = true
	}
	for object := range p.record.objects {
		if there[object] {
			continue
		}
		if err := p.record.write(event{Object: object, Gone: true}); err != nil {
			return err
		}
	}
	return nil
}

// all are the load balancers that are wanted, and then those of Fairlead's that are not.
func (p *plane) all() (fs []frontend) {
	for f := range p.layout.wanted {
		fs = append(fs, f)
	}
	slices.SortFunc(fs, frontend.compare)
	wanted := len(fs)
	for f, id := range p.held.taken {
		if p.layout.wanted[f] == nil && p.record.owns(balancerObject(f), id) {
			fs = append(fs, f)
		}
	}
	slices.SortFunc(fs[wanted:], frontend.compare)
	return fs
}

// Apply implements dataplane.Dataplane.
func (p *plane) Apply(ctx context.Context, s *model.State, c model.Change) error {
	if p.held == nil {
		return p.Sync(ctx, s)
	}
	dirty, idle := p.layout.change(s, c)
	for _, a := range idle {
		if id, ok := p.held.at[a]; ok {
			p.idle[id] = true
		}
	}
	if p.unrouted(dirty) {
		if err := p.findRoutes(ctx); err != nil {
			p.held = nil
			return err
		}
	}
	if len(p.stale) > 0 { // all load balancers that have them change, too
		return p.settleAll(ctx)
	}
	return p.settle(ctx, dirty)
}

// unrouted reports whether load balancers need endpoints on nodes that are not known: the network plugin of an overlay
// may have told of them since.
func (p *plane) unrouted(dirty []frontend) bool {
	unknown := func(to model.Backend) bool {
		return !to.Local && p.held.at[to.Addr] == "" && !p.held.provider(to.Addr).IsValid()
	}
	return p.held.overlay() && slices.ContainsFunc(dirty, func(f frontend) bool {
		b := p.layout.wanted[f]
		return b != nil && slices.ContainsFunc(b.backends, unknown)
	})
}

// findRoutes reads the network again, and notes which endpoints are on other nodes than they were.
func (p *plane) findRoutes(ctx context.Context) error {
	n, err := p.hns.Network(ctx, p.options.Network)
	if err == nil && n.ID != p.held.network.ID {
		err = fmt.Errorf("it was made anew: %w", hns.ErrNoNetwork)
	}
	if err != nil {
		return fmt.Errorf("HNS network %q: %w", p.options.Network, err)
	}
	if routes := routesOf(n); !slices.Equal(routes, p.held.routes) {
		p.held.network, p.held.routes = n, routes
		p.findStale()
	}
	return nil
}

// Repair implements dataplane.Dataplane. It goes by the Audit: calls fail where HNS has changed since.
func (p *plane) Repair(ctx context.Context, s *model.State, _ dataplane.Report) error {
	if p.held == nil || p.held.overlay() != p.layout.overlay {
		return p.Sync(ctx, s)
	}
	if err := p.prepareOverlay(ctx); err != nil {
		p.held = nil
		return err
	}
	return p.settleAll(ctx)
}

// settleAll goes through all load balancers and own endpoints.
func (p *plane) settleAll(ctx context.Context) error {
	clear(p.due)
	for id := range p.ownEndpoints() {
		p.idle[id] = true
	}
	p.findStale()
	return p.settle(ctx, p.all())
}

// Remove implements dataplane.Dataplane. It goes by the record alone: "fairlead clean" reads no configuration, and the
// network may be gone.
func (p *plane) Remove(ctx context.Context) error {
	p.removing = true
	defer func() { p.removing, p.held = false, nil }()
	for _, network := range p.record.networks() {
		p.begin(hns.Network{ID: network})
		p.layout = newLayout(true, p.features, false)
		_, err := p.held.refresh(ctx, p.hns, true)
		if errors.Is(err, hns.ErrNoNetwork) || errors.Is(err, hns.ErrNotFound) {
			continue
		}
		if err == nil {
			err = p.settleAll(ctx)
		}
		if err != nil {
			return err
		}
	}
	clear(p.record.objects) // the others went with their network
	return p.record.remove()
}

// Close implements dataplane.Dataplane.
func (p *plane) Close() error { return p.record.close() }

// Describe implements dataplane.Dataplane.
func (p *plane) Describe() (lines []string) {
	if p.held == nil {
		return nil
	}
	for f, b := range p.layout.wanted {
		if id, ok := p.held.taken[f]; ok {
			lines = append(lines, fmt.Sprintf("load balancer %s: %s of Service %s", id, f, b.service))
		}
	}
	slices.Sort(lines)
	return lines
}

// look finds the network, and reads what HNS has. Other networks are none of Fairlead's: a network that was made anew
// is another one, though it has the name.
func (p *plane) look(ctx context.Context, again bool) error {
	v, err := p.hns.Version(ctx)
	if err != nil {
		return fmt.Errorf("version of HNS: %w", err)
	}
	if p.learn(v); !p.features.Documents {
		return fmt.Errorf("HNS has version %s, and 9.2 (Windows Server 2019) is needed: %w", v, dataplane.ErrUnsupported)
	}
	n, err := p.hns.Network(ctx, p.options.Network)
	if err != nil {
		return fmt.Errorf("HNS network %q: %w; networkName (--network-name, KUBE_NETWORK) must name one that the network "+
			"plugin makes", p.options.Network, err)
	}
	if p.held == nil || p.held.network.ID != n.ID {
		p.begin(n)
		again = true
	}
	p.held.network, p.held.routes = n, routesOf(n)
	_, err = p.held.refresh(ctx, p.hns, again)
	return err
}

// begin knows nothing of a network yet.
func (p *plane) begin(n hns.Network) {
	p.held, p.due = newHeld(n), map[frontend]bool{}
	p.idle, p.stale = map[string]bool{}, map[string]bool{}
}

// learn notes what a version of HNS can do, and logs what it lacks.
func (p *plane) learn(v hns.Version) {
	f := v.Features()
	if lacks := f.Lacks(); f != p.features && len(lacks) > 0 {
		p.config.Log.Info("this version of HNS lacks features that Services may ask for", "reason",
			fmt.Sprintf("HNS %s has no %s", v, strings.Join(lacks, ", ")))
	}
	p.features = f
}

// prepareOverlay finds what the documents of an overlay network need of the host, and makes the endpoint from which
// load balancers send.
func (p *plane) prepareOverlay(ctx context.Context) error {
	if !p.held.overlay() {
		return nil
	}
	if !p.options.SourceVIP.IsValid() {
		return errors.New("HNS network " + p.options.Network + " is an overlay: sourceVip (--source-vip) must have an " +
			"address of it for the node")
	}
	if p.host.mac == "" {
		toward := netip.AddrFrom4([4]byte{192, 0, 2, 1}) // of no network (RFC 5737): the default route leads there
		if len(p.held.routes) > 0 {
			toward = p.held.routes[0].node
		}
		ip, mac, err := p.options.Host(p.options.NodeIP, toward)
		if err != nil {
			return fmt.Errorf("address of the node in the underlay: %w; set --bind-address", err)
		}
		p.host.ip, p.host.mac = ip.String(), mac.String()
	}
	if _, ok := p.held.at[p.options.SourceVIP]; ok {
		return nil
	}
	return p.createEndpoint(ctx, p.options.SourceVIP, hns.Endpoint{MACAddress: p.host.mac})
}

// host is Options.Host of the system. No packet is sent.
func host(ip, toward netip.Addr) (netip.Addr, net.HardwareAddr, error) {
	if !ip.IsValid() || ip.IsUnspecified() {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(toward, 9)))
		if err != nil {
			return ip, nil, err
		}
		defer c.Close()
		ip = c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
	}
	all, err := net.Interfaces()
	if err != nil {
		return ip, nil, err
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			prefix, err := netip.ParsePrefix(a.String())
			if err == nil && prefix.Addr().Unmap() == ip && len(i.HardwareAddr) > 0 {
				return ip, i.HardwareAddr, nil
			}
		}
	}
	return ip, nil, fmt.Errorf("no interface with a hardware address has %s", ip)
}

// ownEndpoints are Fairlead's, by id.
func (p *plane) ownEndpoints() map[string]netip.Addr {
	own := map[string]netip.Addr{}
	for id, e := range p.held.endpoints {
		for _, a := range addresses(&e) {
			if p.ownsEndpoint(id, a) {
				own[id] = a
			}
		}
	}
	return own
}

// ownsEndpoint reports whether an endpoint is Fairlead's. Those of pods on this node never are. They may have an
// address for which Fairlead was about to make an endpoint.
func (p *plane) ownsEndpoint(id string, a netip.Addr) bool {
	own, ok := p.record.objects[p.endpointObject(a)]
	return ok && (own == id || own == "" && (p.held.isRemote(id) || a == p.options.SourceVIP))
}

// The names of objects in the record.

// takenOver is there when kube-proxy's load balancers were recorded.
const takenOver = "takeover"

func balancerObject(f frontend) string { return "load balancer " + f.String() }

func (p *plane) endpointObject(a netip.Addr) string {
	return "endpoint " + a.String() + ofNetwork + p.held.network.ID
}

const ofNetwork = " of network "

// adopt takes over kube-proxy's objects when Fairlead first comes to the node, and when kube-proxy has served since: it
// deletes all load balancers when it starts. There is no record of its own ones. They are at a wanted address and port,
// or at another port of a Service's address.
func (p *plane) adopt(s *model.State, first bool) error {
	if first && !p.hasBalancers() {
		if err := p.record.write(event{Object: takenOver, Gone: true}); err != nil {
			return err
		}
	}
	if p.record.owns(takenOver, "done") {
		return nil
	}
	if err := p.adoptEndpoints(); err != nil {
		return err
	}
	services := map[netip.Addr]bool{}
	for k, f := range s.Frontends {
		if f.Kind != model.NodePort {
			services[k.Addr] = true
		}
	}
	var adopted, strangers int
	for id, b := range p.held.balancers {
		fs := frontends(&b)
		if len(fs) == 1 && p.record.owns(balancerObject(fs[0]), id) {
			continue
		}
		if len(fs) != 1 || p.layout.wanted[fs[0]] == nil && !services[fs[0].vip] && !likeNodePort(&b) {
			strangers++
			continue
		}
		if err := p.record.write(event{Object: balancerObject(fs[0]), ID: id}); err != nil {
			return err
		}
		adopted++
	}
	if adopted+strangers > 0 {
		p.config.Log.Info("HNS has load balancers that Fairlead has not made: it takes those over that are at addresses "+
			"of Services, and leaves the others alone", "count", adopted, "total", adopted+strangers)
	}
	return p.record.write(event{Object: takenOver, ID: "done"})
}

// hasBalancers reports whether HNS has load balancers that were recorded when they were made.
func (p *plane) hasBalancers() bool {
	for f, id := range p.held.taken {
		if p.record.objects[balancerObject(f)] == id {
			return true
		}
	}
	return false
}

// adoptEndpoints takes over remote endpoints with kube-proxy's hardware addresses, which nothing else has.
func (p *plane) adoptEndpoints() error {
	for id, e := range p.held.endpoints {
		for _, a := range addresses(&e) {
			if !remote(&e) || !strings.EqualFold(e.MACAddress, p.remote(a).MACAddress) || p.ownsEndpoint(id, a) {
				continue
			}
			if err := p.record.write(event{Object: p.endpointObject(a), ID: id}); err != nil {
				return err
			}
		}
	}
	return nil
}

// likeNodePort reports whether a load balancer has the shape of kube-proxy's for a NodePort.
func likeNodePort(b *hns.LoadBalancer) bool {
	return len(b.FrontendVIPs) == 0 && b.PortMappings[0].Flags == hns.LocalRoutedVIP|hns.VIPExternalIP
}
