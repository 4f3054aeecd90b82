package kernelspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
	"fairlead.dev/fairlead/model"
)

// sample is how many load balancers a quick audit reads.
const sample = 8

// Audit implements dataplane.Dataplane. A quick one reads all ids, which is two calls and tells of each object that is
// gone, as after a restart of HNS, and some load balancers whole. On an overlay it reads the network, too: endpoints
// depend on which node pods are on. Whatever it reads, the next Sync goes by.
func (p *plane) Audit(ctx context.Context, _ *model.State, d dataplane.Depth) (r dataplane.Report, err error) {
	if p.held == nil {
		return r, errors.New("the objects of HNS are not known since a call has failed")
	}
	var fs []frontend
	if d == dataplane.Full {
		if err = p.look(ctx, true); err == nil {
			p.findStale()
			fs = p.all()
		}
	} else {
		fs, err = p.quick(ctx)
	}
	if err != nil {
		p.held = nil
		return r, err
	}
	for _, f := range fs {
		if drift, ok := p.compare(f); ok {
			r.Drifts = append(r.Drifts, drift)
		}
	}
	if p.held.overlay() && p.held.at[p.options.SourceVIP] == "" {
		r.Drifts = append(r.Drifts, dataplane.Drift{
			Class: "endpoints", Object: "endpoint " + p.options.SourceVIP.String(), Want: "the source of load balancers",
		})
	}
	for id := range p.stale {
		e, ok := p.held.endpoints[id]
		if !ok { // it has gone since
			continue
		}
		r.Drifts = append(r.Drifts, dataplane.Drift{
			Class: "endpoints", Object: "endpoint " + e.IPConfigurations[0].Address,
			Want: "the node that has its address", Have: "node " + providerOf(e.Policies).ProviderAddress,
		})
	}
	return r, nil
}

// quick returns the load balancers to be compared: all if objects have come or gone.
func (p *plane) quick(ctx context.Context) ([]frontend, error) {
	if p.held.overlay() {
		if err := p.findRoutes(ctx); err != nil {
			return nil, err
		}
	}
	changed, err := p.held.refresh(ctx, p.hns, false)
	if err != nil || changed {
		return p.all(), err
	}
	var fs []frontend
	for f := range p.layout.wanted { // begins somewhere each time
		id, ok := p.held.taken[f]
		if !ok {
			continue
		}
		b, err := p.hns.LoadBalancer(ctx, id)
		switch {
		case errors.Is(err, hns.ErrNotFound):
			p.held.dropBalancer(id)
		case err != nil:
			return nil, fmt.Errorf("load balancer %s: %w", id, err)
		default:
			p.held.putBalancer(id, b)
		}
		if fs = append(fs, f); len(fs) == sample {
			break
		}
	}
	return fs, nil
}

// compare reports whether a load balancer is not what it should be.
func (p *plane) compare(f frontend) (d dataplane.Drift, differs bool) {
	d = dataplane.Drift{Class: "load balancers", Object: "load balancer " + f.String()}
	id, exists := p.held.taken[f]
	if exists {
		have := p.held.balancers[id]
		d.Have = p.words(&have)
	}
	b := p.layout.wanted[f]
	if b == nil {
		return d, exists
	}
	want, lacking := p.document(f, b)
	have := p.held.meant(id)
	d.Want = p.words(&want)
	if len(want.Endpoints) < len(b.backends) && b.kind != model.HealthCheckNodePort || lacking != nil {
		d.Want += fmt.Sprintf(", and all %d backends", len(b.backends))
		return d, true
	}
	return d, !exists || !same(&have, &want)
}

// words are what a load balancer does. Endpoints are told by address.
func (p *plane) words(b *hns.LoadBalancer) string {
	to := make([]string, 0, len(b.Endpoints))
	for _, id := range members(b) {
		name := "endpoint " + id
		if e, ok := p.held.endpoints[id]; ok && len(e.IPConfigurations) > 0 {
			name = e.IPConfigurations[0].Address
		}
		to = append(to, name)
	}
	slices.Sort(to)
	var ports []string
	for _, m := range b.PortMappings {
		ports = append(ports, fmt.Sprintf("port %d, mapping flags %d, distribution %d",
			m.InternalPort, m.Flags, m.DistributionType))
	}
	return fmt.Sprintf("%s; %s; flags %d; source %s", strings.Join(ports, "; "), strings.Join(to, ","), b.Flags,
		cmp.Or(b.SourceVIP, "none"))
}
