package kernelspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/model"
)

// settle makes load balancers what the layout says, each by itself: what fails is named, and the others go on. Then it
// deletes endpoints that none needs any more.
func (p *plane) settle(ctx context.Context, dirty []frontend) error {
	if err := p.replaceStale(ctx); err != nil {
		return err
	}
	var failed []error
	fresh := false // the objects were read again since the call came
	for _, f := range p.makeFirst(dirty) {
		err := p.settleOne(ctx, f, fresh)
		if outdated(err) && !fresh {
			fresh = true
			if _, err = p.held.refresh(ctx, p.hns, false); err == nil {
				err = p.settleOne(ctx, f, fresh)
			}
		}
		if err := p.fatal(ctx, err); err != nil {
			return err
		}
		delete(p.due, f)
		if err != nil {
			p.due[f] = true
			failed = append(failed, fmt.Errorf("%s of Service %s: %w", f, p.serviceOf(f), err))
		}
	}
	unswept, err := p.sweep(ctx)
	if err != nil {
		return err
	}
	return dataplane.Partial(append(failed, unswept...)...)
}

// makeFirst has those that are wanted before those that go.
func (p *plane) makeFirst(fs []frontend) []frontend {
	slices.SortStableFunc(fs, func(a, b frontend) int {
		return model.FalseFirst(p.layout.wanted[a] == nil, p.layout.wanted[b] == nil)
	})
	return fs
}

func (p *plane) serviceOf(f frontend) string {
	if b := p.layout.wanted[f]; b != nil {
		return b.service
	}
	return "that is gone"
}

// outdated reports whether a call failed because HNS has changed since it was read. One that found no network may say
// that there is no such object, too.
func outdated(err error) bool {
	if lost(err) {
		return false
	}
	return occupied(err) || errors.Is(err, hns.ErrNoEndpoint) || errors.Is(err, hns.ErrNotFound) ||
		errors.Is(err, errNoEndpoint)
}

// occupied reports whether another object has the address and port, or the address.
func occupied(err error) bool {
	return errors.Is(err, hns.ErrExists) || errors.Is(err, hns.ErrPortInUse)
}

// fatal is an error after which there is no use in going on. The objects of HNS are not known then.
func (p *plane) fatal(ctx context.Context, err error) error {
	if lost(err) {
		p.held = nil
		return err
	}
	return ctx.Err()
}

// lost reports whether a call failed because HNS or its network is not there.
func lost(err error) bool {
	return errors.Is(err, hns.ErrNotRunning) || errors.Is(err, hns.ErrNoNetwork)
}

// errNoEndpoint says what is missing for a backend on this node: Fairlead does not make the endpoints of its pods.
var errNoEndpoint = errors.New("HNS has no endpoint of a backend on this node; the network plugin makes it")

// settleOne makes one load balancer what it should be. If endpoints are lacking and HNS was not read just now, it
// changes nothing.
func (p *plane) settleOne(ctx context.Context, f frontend, fresh bool) error {
	id, exists := p.held.taken[f]
	b := p.layout.wanted[f]
	if b == nil {
		if !exists || !p.record.owns(balancerObject(f), id) {
			return p.record.write(event{Object: balancerObject(f), Gone: true})
		}
		return p.delete(ctx, f, id)
	}
	failed := p.ensure(ctx, f, b)
	if p.fatal(ctx, failed) != nil {
		return failed
	}
	want, lacking := p.document(f, b)
	if lacking = errors.Join(failed, lacking); outdated(lacking) && !fresh {
		return lacking
	}
	if len(want.Endpoints) == 0 {
		if exists && p.record.owns(balancerObject(f), id) {
			return errors.Join(lacking, p.delete(ctx, f, id))
		}
		return lacking
	}
	return errors.Join(lacking, p.put(ctx, f, id, want))
}

// put creates a load balancer, or changes the one with that id. If the version of HNS cannot change it, the new one is
// made before the old one goes if HNS allows that. Else new connections fail between two calls.
func (p *plane) put(ctx context.Context, f frontend, id string, want hns.LoadBalancer) error {
	if id == "" {
		return p.create(ctx, f, want)
	}
	have := p.held.meant(id)
	if !p.record.owns(balancerObject(f), id) {
		return fmt.Errorf("load balancer %s of another program serves it", id)
	}
	if err := p.record.write(event{Object: balancerObject(f), ID: id}); err != nil || same(&have, &want) {
		return err
	}
	if p.features.Modify && !p.rigid {
		done, err := p.modify(ctx, id, want)
		if done || err != nil {
			return err
		}
	}
	if p.coexist == nil || *p.coexist {
		err := p.create(ctx, f, want)
		taken := occupied(err)
		if !taken && err != nil {
			return err
		}
		p.coexist = new(bool)
		if *p.coexist = !taken; !taken {
			return p.deleteID(ctx, id)
		}
	}
	if err := p.deleteID(ctx, id); err != nil {
		return err
	}
	return p.create(ctx, f, want)
}

// modify reports whether HNS has done it: there are versions that say so and have not.
func (p *plane) modify(ctx context.Context, id string, want hns.LoadBalancer) (bool, error) {
	if err := p.config.Inject("load balancer modify"); err != nil {
		return false, err
	}
	before := p.held.balancers[id]
	want.ID = id
	have, err := p.hns.ModifyLoadBalancer(ctx, want)
	switch {
	case errors.Is(err, hns.ErrMissing):
		p.rigid = true
		return false, nil
	case err != nil:
		p.held.dropBalancer(id)
		return false, fmt.Errorf("modify load balancer %s: %w", id, err)
	case same(&have, &before):
		p.config.Log.Warn("this version of HNS says that it changes load balancers, and does not: Fairlead replaces them")
		p.rigid = true
		return false, nil
	}
	p.held.made(have, want)
	return true, nil
}

func (p *plane) create(ctx context.Context, f frontend, want hns.LoadBalancer) error {
	before, known := p.record.objects[balancerObject(f)]
	if err := p.record.write(event{Object: balancerObject(f)}); err != nil {
		return err
	}
	if err := p.config.Inject("load balancer create"); err != nil {
		return err
	}
	have, err := p.hns.CreateLoadBalancer(ctx, want)
	if occupied(err) { // by a load balancer that was made before
		err = errors.Join(err, p.record.write(event{Object: balancerObject(f), ID: before, Gone: !known}))
	}
	if err != nil {
		return fmt.Errorf("create load balancer: %w", err)
	}
	p.held.made(have, want)
	return p.record.write(event{Object: balancerObject(f), ID: have.ID})
}

func (p *plane) delete(ctx context.Context, f frontend, id string) error {
	if err := p.deleteID(ctx, id); err != nil {
		return err
	}
	return p.record.write(event{Object: balancerObject(f), Gone: true})
}

func (p *plane) deleteID(ctx context.Context, id string) error {
	if err := p.config.Inject("load balancer delete"); err != nil {
		return err
	}
	if err := p.hns.DeleteLoadBalancer(ctx, id); err != nil && !errors.Is(err, hns.ErrNotFound) {
		return fmt.Errorf("delete load balancer %s: %w", id, err)
	}
	p.held.dropBalancer(id)
	return nil
}

// ensure makes the remote endpoints that a load balancer needs. One that cannot be made does not stop the others.
func (p *plane) ensure(ctx context.Context, f frontend, b *balancer) (failed error) {
	if p.held.overlay() && b.kind == model.ClusterIP && p.held.at[f.vip] == "" {
		failed = p.createEndpoint(ctx, f.vip, hns.Endpoint{
			MACAddress: p.host.mac, Policies: provided(p.host.ip), Flags: hns.Remote,
		})
	}
	if b.kind == model.HealthCheckNodePort {
		return failed
	}
	for _, to := range b.backends {
		if to.Local || p.held.at[to.Addr] != "" {
			continue
		}
		if failed = errors.Join(failed, p.createEndpoint(ctx, to.Addr, p.remote(to.Addr))); p.fatal(ctx, failed) != nil {
			break
		}
	}
	return failed
}

// document is the load balancer with the endpoints that there are. The error says which ones are lacking.
func (p *plane) document(f frontend, b *balancer) (hns.LoadBalancer, error) {
	if b.kind == model.HealthCheckNodePort {
		id, ok := p.held.named[p.options.RootEndpoint]
		if !ok {
			return b.document(f, nil, ""), fmt.Errorf("HNS has no endpoint %q (rootHnsEndpointName)", p.options.RootEndpoint)
		}
		return b.document(f, []string{id}, p.sourceVIP(nil)), nil
	}
	var ids []string
	var lacking error
	if p.held.overlay() && b.kind == model.ClusterIP && p.held.at[f.vip] == "" {
		lacking = fmt.Errorf("HNS has no endpoint of the ClusterIP %s", f.vip)
	}
	for _, to := range b.backends {
		id := p.held.at[to.Addr]
		switch {
		case p.stale[id]:
		case id != "" && !(to.Local && p.held.isRemote(id)):
			ids = append(ids, id)
		case to.Local:
			lacking = errors.Join(lacking, fmt.Errorf("%s: %w", to.Addr, errNoEndpoint))
		}
	}
	return b.document(f, ids, p.sourceVIP(b.backends)), lacking
}

// sourceVIP is the source of the packets that the load balancer sends: none on other networks than overlays. On these
// it must be the node's own address if a backend is outside of the overlay.
func (p *plane) sourceVIP(backends []model.Backend) string {
	if !p.held.overlay() {
		return ""
	}
	for _, b := range backends {
		if node := p.held.provider(b.Addr); !b.Local && (!node.IsValid() || node == b.Addr) {
			return p.host.ip
		}
	}
	return p.options.SourceVIP.String()
}

// remote is the endpoint of an address elsewhere. The hardware address is kube-proxy's invention: no packet has it.
func (p *plane) remote(a netip.Addr) hns.Endpoint {
	b := a.AsSlice()
	if a.Is6() {
		b = []byte{b[15], b[14], b[13], b[12]}
	}
	e := hns.Endpoint{MACAddress: fmt.Sprintf("02-11-%02x-%02x-%02x-%02x", b[0], b[1], b[2], b[3]), Flags: hns.Remote}
	if p.held.overlay() {
		node := p.host.ip // of an address outside of the cluster
		if provider := p.held.provider(a); provider.IsValid() {
			node = provider.String()
		}
		e.Policies = provided(node)
	}
	return e
}

func provided(node string) []hns.Policy {
	settings, _ := json.Marshal(hns.Provider{ProviderAddress: node})
	return []hns.Policy{{Type: hns.ProviderAddress, Settings: settings}}
}

func (p *plane) createEndpoint(ctx context.Context, a netip.Addr, e hns.Endpoint) error {
	if err := p.record.write(event{Object: p.endpointObject(a)}); err != nil {
		return err
	}
	if err := p.config.Inject("endpoint create"); err != nil {
		return err
	}
	e.Network, e.IPConfigurations, e.SchemaVersion = p.held.network.ID, []hns.IPConfig{{Address: a.String()}}, hns.Schema()
	made, err := p.hns.CreateEndpoint(ctx, e)
	if err != nil {
		return fmt.Errorf("create endpoint %s: %w", a, err)
	}
	p.held.putEndpoint(made.ID, made)
	return p.record.write(event{Object: p.endpointObject(a), ID: made.ID})
}

// sweep deletes own endpoints that no load balancer needs: those of backends that are gone, and those of addresses that
// local endpoints have now. One that is in use still is looked at again next time.
func (p *plane) sweep(ctx context.Context) (failed []error, fatal error) {
	for _, ids := range p.held.hidden {
		for _, id := range ids {
			p.idle[id] = true
		}
	}
	for id := range p.idle {
		e, ok := p.held.endpoints[id]
		if !ok || p.needed(id, &e) {
			delete(p.idle, id)
			continue
		}
		switch err := p.deleteEndpoint(ctx, id, &e); {
		case err == nil:
			delete(p.idle, id)
		case errors.Is(err, hns.ErrInUse):
		case p.fatal(ctx, err) != nil:
			return nil, err
		default:
			failed = append(failed, err)
		}
	}
	return failed, nil
}

func (p *plane) needed(id string, e *hns.Endpoint) bool {
	for _, a := range addresses(e) {
		used := p.layout.users[a] > 0 || a == p.options.SourceVIP && !p.removing
		if !p.ownsEndpoint(id, a) || used && p.held.at[a] == id && !p.stale[id] {
			return true
		}
	}
	return false
}

func (p *plane) deleteEndpoint(ctx context.Context, id string, e *hns.Endpoint) error {
	if err := p.config.Inject("endpoint delete"); err != nil {
		return err
	}
	if err := p.hns.DeleteEndpoint(ctx, id); err != nil && !errors.Is(err, hns.ErrNotFound) &&
		!errors.Is(err, hns.ErrNoEndpoint) {
		return fmt.Errorf("delete endpoint %s: %w", e.IPConfigurations[0].Address, err)
	}
	p.held.dropEndpoint(id)
	for _, a := range addresses(e) {
		if err := p.record.write(event{Object: p.endpointObject(a), Gone: true}); err != nil {
			return err
		}
	}
	return nil
}

// findStale notes own endpoints whose node is another one by now: the network plugin of an overlay tells of a node when
// that has joined.
func (p *plane) findStale() {
	clear(p.stale)
	if !p.held.overlay() || p.removing {
		return
	}
	services := map[netip.Addr]bool{}
	for f, b := range p.layout.wanted {
		services[f.vip] = services[f.vip] || b.kind == model.ClusterIP
	}
	for id, a := range p.ownEndpoints() {
		e := p.held.endpoints[id]
		want := p.remote(a).Policies
		if services[a] {
			want = provided(p.host.ip)
		}
		if remote(&e) && providerOf(e.Policies) != providerOf(want) {
			p.stale[id] = true
		}
	}
}

func providerOf(all []hns.Policy) (s hns.Provider) {
	for _, policy := range all {
		if policy.Type == hns.ProviderAddress && json.Unmarshal(policy.Settings, &s) == nil {
			break
		}
	}
	return s
}

// replaceStale takes stale endpoints out of their load balancers and deletes them, so that they can be made anew.
func (p *plane) replaceStale(ctx context.Context) error {
	if len(p.stale) == 0 {
		return nil
	}
	for id := range p.stale {
		p.idle[id] = true
	}
	for f, b := range p.layout.wanted {
		for _, a := range p.layout.needs(f, b) {
			if !p.stale[p.held.at[a]] {
				continue
			}
			if err := p.settleOne(ctx, f, true); p.fatal(ctx, err) != nil {
				return err
			}
			break
		}
	}
	_, err := p.sweep(ctx)
	clear(p.stale)
	return err
}
