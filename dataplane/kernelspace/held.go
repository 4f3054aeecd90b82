package kernelspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/model"
)

// held is what HNS has, as far as it was read.
type held struct {
	network   hns.Network
	routes    []route
	endpoints map[string]hns.Endpoint     // of the network, by id
	at        map[netip.Addr]string       // ids of endpoints by address
	hidden    map[netip.Addr][]string     // ids of further endpoints of the address
	named     map[string]string           // likewise by name
	balancers map[string]hns.LoadBalancer // of all programs, by id
	taken     map[frontend]string         // ids of load balancers by what they serve
	asked     map[string]hns.LoadBalancer // by id: documents that HNS was given and may have completed
}

func newHeld(n hns.Network) *held {
	return &held{
		network: n, routes: routesOf(n), endpoints: map[string]hns.Endpoint{}, at: map[netip.Addr]string{},
		hidden: map[netip.Addr][]string{}, named: map[string]string{}, balancers: map[string]hns.LoadBalancer{},
		taken: map[frontend]string{}, asked: map[string]hns.LoadBalancer{},
	}
}

func (h *held) overlay() bool { return strings.EqualFold(h.network.Type, hns.Overlay) }

// route says on which node pods of a prefix are.
type route struct {
	prefix netip.Prefix
	node   netip.Addr
}

// routesOf are those to pods elsewhere. The network plugin adds them as nodes join.
func routesOf(n hns.Network) (all []route) {
	for _, p := range n.Policies {
		var r hns.Route
		if p.Type == hns.RemoteSubnetRoute && json.Unmarshal(p.Settings, &r) == nil {
			prefix, _ := netip.ParsePrefix(r.DestinationPrefix)
			node, _ := netip.ParseAddr(r.ProviderAddress)
			all = append(all, route{prefix, node})
		}
	}
	return all
}

// provider is the address of the node that has an address of a pod; not valid: none has it.
func (h *held) provider(a netip.Addr) (node netip.Addr) {
	for _, r := range h.routes {
		if r.prefix.Contains(a) || r.node == a {
			node = r.node
		}
	}
	return node
}

// refresh reads ids, and the objects that are new. If again, it reads all. It reports whether anything was read or is
// gone. Without a network there are no endpoints.
func (h *held) refresh(ctx context.Context, from hns.HNS, again bool) (changed bool, err error) {
	if h.network.ID != "" {
		ids, err := from.EndpointIDs(ctx, h.network.ID)
		if err == nil {
			all := objects[hns.Endpoint]{h.endpoints, from.Endpoint, h.dropEndpoint, h.putEndpoint}
			changed, err = all.read(ctx, ids, again)
		}
		if err != nil {
			return changed, fmt.Errorf("endpoints of HNS network %s: %w", h.network.Name, err)
		}
	}
	ids, err := from.LoadBalancerIDs(ctx)
	if err == nil {
		var more bool
		all := objects[hns.LoadBalancer]{h.balancers, from.LoadBalancer, h.dropBalancer, h.putBalancer}
		more, err = all.read(ctx, ids, again)
		changed = changed || more
	}
	if err != nil {
		return changed, fmt.Errorf("load balancers of HNS: %w", err)
	}
	return changed, nil
}

// objects are those of one kind.
type objects[T any] struct {
	known map[string]T // by id
	query func(context.Context, string) (T, error)
	drop  func(id string)
	put   func(id string, o T)
}

// read brings them up to date. One that goes away meanwhile is not there.
func (all objects[T]) read(ctx context.Context, ids []string, again bool) (changed bool, err error) {
	there := make(map[string]bool, len(ids))
	for _, id := range ids {
		there[id] = true
	}
	for id := range all.known {
		if !there[id] {
			all.drop(id)
			changed = true
		}
	}
	for _, id := range ids {
		if _, ok := all.known[id]; ok && !again {
			continue
		}
		changed = true
		o, err := all.query(ctx, id)
		switch {
		case errors.Is(err, hns.ErrNotFound), errors.Is(err, hns.ErrNoEndpoint):
			all.drop(id)
		case err != nil:
			return changed, err
		default:
			all.put(id, o)
		}
	}
	return changed, nil
}

// addresses are those of an endpoint.
func addresses(e *hns.Endpoint) (all []netip.Addr) {
	for _, c := range e.IPConfigurations {
		if a, err := netip.ParseAddr(c.Address); err == nil {
			all = append(all, a.Unmap())
		}
	}
	return all
}

func remote(e *hns.Endpoint) bool { return e.Flags&hns.Remote != 0 }

// putEndpoint has the address lead to a local endpoint before a remote one. A new pod may have the address of an
// earlier pod elsewhere. There are versions of HNS that hold the endpoints of both.
func (h *held) putEndpoint(id string, e hns.Endpoint) {
	h.dropEndpoint(id)
	h.addEndpoint(id, e)
}

func (h *held) addEndpoint(id string, e hns.Endpoint) {
	h.endpoints[id] = e
	if e.Name != "" {
		h.named[e.Name] = id
	}
	for _, a := range addresses(&e) {
		switch other, taken := h.at[a]; {
		case !taken:
			h.at[a] = id
		case !remote(&e) && h.isRemote(other):
			h.at[a] = id
			h.hidden[a] = append(h.hidden[a], other)
		default:
			h.hidden[a] = append(h.hidden[a], id)
		}
	}
}

func (h *held) isRemote(id string) bool {
	e := h.endpoints[id]
	return remote(&e)
}

func (h *held) dropEndpoint(id string) {
	e := h.endpoints[id]
	delete(h.endpoints, id)
	if h.named[e.Name] == id {
		delete(h.named, e.Name)
	}
	for _, a := range addresses(&e) {
		others := slices.DeleteFunc(h.hidden[a], func(o string) bool { return o == id })
		delete(h.hidden, a)
		if h.at[a] != id {
			others = append(others, h.at[a])
		}
		delete(h.at, a)
		for _, o := range others {
			h.addEndpoint(o, h.endpoints[o])
		}
	}
}

// putBalancer keeps what HNS was asked for if the load balancer is as it was.
func (h *held) putBalancer(id string, b hns.LoadBalancer) {
	before, asked := h.balancers[id], h.asked[id]
	h.dropBalancer(id)
	if asked.ID != "" && same(&before, &b) {
		h.asked[id] = asked
	}
	h.balancers[id] = b
	for _, f := range frontends(&b) {
		h.taken[f] = id
	}
}

func (h *held) dropBalancer(id string) {
	b := h.balancers[id]
	delete(h.balancers, id)
	delete(h.asked, id)
	for _, f := range frontends(&b) {
		if h.taken[f] == id {
			delete(h.taken, f)
		}
	}
}

// frontends are what a load balancer serves.
func frontends(b *hns.LoadBalancer) (all []frontend) {
	vips := b.FrontendVIPs
	if len(vips) == 0 {
		vips = []string{""}
	}
	for _, vip := range vips {
		for _, m := range b.PortMappings {
			f := frontend{port: m.ExternalPort, protocol: model.Protocol(m.Protocol), v6: b.Flags&hns.IPv6 != 0}
			if vip != "" {
				a, err := netip.ParseAddr(vip)
				if err != nil {
					continue
				}
				f.vip, f.v6 = a.Unmap(), a.Is6()
			}
			all = append(all, f)
		}
	}
	return all
}

// made notes what HNS has, and what it was asked for.
func (h *held) made(have, asked hns.LoadBalancer) {
	h.putBalancer(have.ID, have)
	asked.ID = have.ID
	h.asked[have.ID] = asked
}

// meant is what a load balancer was asked to be, or else what it is.
func (h *held) meant(id string) hns.LoadBalancer {
	if asked, ok := h.asked[id]; ok {
		return asked
	}
	return h.balancers[id]
}

// same reports whether two load balancers do the same.
func same(a, b *hns.LoadBalancer) bool {
	return a.Flags == b.Flags && a.SourceVIP == b.SourceVIP && slices.Equal(a.PortMappings, b.PortMappings) &&
		slices.Equal(a.FrontendVIPs, b.FrontendVIPs) && slices.Equal(members(a), members(b))
}

// members are the ids of a load balancer's endpoints, sorted. HNS does not keep their case.
func members(b *hns.LoadBalancer) []string {
	ids := make([]string, len(b.Endpoints))
	for i, id := range b.Endpoints {
		ids[i] = strings.ToUpper(id)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}
