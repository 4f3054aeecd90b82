package hnssim

import (
	"context"
	"encoding/json"
	"fmt"

	"fairlead.dev/fairlead/dataplane/kernelspace/hns"
)

// Client is the service as package kernelspace uses it.
type Client struct{ *Service }

var _ hns.HNS = Client{}

// Version implements hns.HNS.
func (c Client) Version(context.Context) (hns.Version, error) { return c.version, nil }

// Network implements hns.HNS.
func (c Client) Network(ctx context.Context, name string) (hns.Network, error) {
	filter, _ := json.Marshal(map[string]string{"Name": name})
	ids, err := call[[]string](ctx, c, Call{Enumerate, Networks, "", query(filter)})
	if err != nil {
		return hns.Network{}, err
	}
	if len(ids) == 0 {
		return hns.Network{}, fmt.Errorf("network %q: %w", name, hns.ErrNoNetwork)
	}
	return call[hns.Network](ctx, c, Call{Verb: Query, Kind: Networks, ID: ids[0]})
}

// EndpointIDs implements hns.HNS.
func (c Client) EndpointIDs(ctx context.Context, network string) ([]string, error) {
	filter, _ := json.Marshal(map[string]string{"HostComputeNetwork": network})
	return call[[]string](ctx, c, Call{Enumerate, Endpoints, "", query(filter)})
}

func query(filter []byte) json.RawMessage {
	q, _ := json.Marshal(map[string]string{"Filter": string(filter)})
	return q
}

// Endpoint implements hns.HNS.
func (c Client) Endpoint(ctx context.Context, id string) (hns.Endpoint, error) {
	return call[hns.Endpoint](ctx, c, Call{Verb: Query, Kind: Endpoints, ID: id})
}

// CreateEndpoint implements hns.HNS.
func (c Client) CreateEndpoint(ctx context.Context, e hns.Endpoint) (hns.Endpoint, error) {
	document, err := json.Marshal(e)
	if err != nil {
		return e, err
	}
	return call[hns.Endpoint](ctx, c, Call{Create, Endpoints, e.Network, document})
}

// DeleteEndpoint implements hns.HNS.
func (c Client) DeleteEndpoint(ctx context.Context, id string) error {
	_, err := call[any](ctx, c, Call{Verb: Delete, Kind: Endpoints, ID: id})
	return err
}

// LoadBalancerIDs implements hns.HNS.
func (c Client) LoadBalancerIDs(ctx context.Context) ([]string, error) {
	return call[[]string](ctx, c, Call{Verb: Enumerate, Kind: LoadBalancers})
}

// LoadBalancer implements hns.HNS.
func (c Client) LoadBalancer(ctx context.Context, id string) (hns.LoadBalancer, error) {
	return call[hns.LoadBalancer](ctx, c, Call{Verb: Query, Kind: LoadBalancers, ID: id})
}

// CreateLoadBalancer implements hns.HNS.
func (c Client) CreateLoadBalancer(ctx context.Context, b hns.LoadBalancer) (hns.LoadBalancer, error) {
	document, err := json.Marshal(b)
	if err != nil {
		return b, err
	}
	return call[hns.LoadBalancer](ctx, c, Call{Create, LoadBalancers, "", document})
}

// ModifyLoadBalancer implements hns.HNS.
func (c Client) ModifyLoadBalancer(ctx context.Context, b hns.LoadBalancer) (hns.LoadBalancer, error) {
	document, err := json.Marshal(b)
	if err != nil {
		return b, err
	}
	return call[hns.LoadBalancer](ctx, c, Call{Modify, LoadBalancers, b.ID, document})
}

// DeleteLoadBalancer implements hns.HNS.
func (c Client) DeleteLoadBalancer(ctx context.Context, id string) error {
	_, err := call[any](ctx, c, Call{Verb: Delete, Kind: LoadBalancers, ID: id})
	return err
}

func call[T any](ctx context.Context, c Client, what Call) (v T, err error) {
	if err := ctx.Err(); err != nil {
		return v, err
	}
	answer, err := c.Do(what)
	if err != nil || len(answer) == 0 {
		return v, err
	}
	return v, json.Unmarshal(answer, &v)
}
