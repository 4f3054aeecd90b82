package sidebyside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/lab/eventually"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/lab/testbed"
)

// healthContrast is what load balancers are told by the two proxies of a pair at one healthCheckNodePort.
type healthContrast struct {
	*pair
	objects
	service      *corev1.Service
	to           netip.AddrPort
	theirs, ours string
}

func (c healthContrast) String() string {
	return fmt.Sprintf("health check of %s at %s in mode %s\n\tkube-proxy: %s\n\tfairlead:   %s",
		c.service.Name, c.to, c.mode, c.theirs, c.ours)
}

// localReady counts addresses of ready endpoints on the node: those of slices with a port of the Service, and
// those that only slices with other ports have.
func (c healthContrast) localReady() (serving, others int) {
	has := map[netip.Addr]bool{}
	for _, slice := range c.of(c.service.Name) {
		for _, e := range slice.Endpoints {
			a := netip.MustParseAddr(e.Addresses[0])
			ready := e.Conditions.Ready == nil || *e.Conditions.Ready
			here := e.NodeName != nil && *e.NodeName == string(testbed.Node)
			if ready && here && len(slice.Ports) > 0 && a.Is4() == c.to.Addr().Is4() {
				has[a] = has[a] || servesAny(c.service, slice.Ports)
			}
		}
	}
	for _, serves := range has {
		if serves {
			serving++
		} else {
			others++
		}
	}
	return serving, others
}

// servesAny reports whether some port of a slice is one of the Service's.
func servesAny(s *corev1.Service, ports []discoveryv1.EndpointPort) bool {
	return slices.ContainsFunc(ports, func(of discoveryv1.EndpointPort) bool {
		return slices.ContainsFunc(s.Spec.Ports, func(p corev1.ServicePort) bool {
			return p.Name == *of.Name && p.Protocol == *of.Protocol
		})
	})
}

// health compares what load balancers are told at the healthCheckNodePorts of all Services.
func (p *pair) health(ctx context.Context, o objects) (all []healthContrast) {
	for _, name := range slices.Sorted(maps.Keys(o.services)) {
		s := o.services[name]
		if s.Spec.HealthCheckNodePort == 0 {
			continue
		}
		for _, a := range both(nodeAddrs[0]) {
			c := healthContrast{pair: p, objects: o, service: s}
			c.to = netip.AddrPortFrom(a, uint16(s.Spec.HealthCheckNodePort))
			c.await(ctx, healthContrast.settled)
			all = append(all, c)
		}
	}
	return all
}

// settled reports whether there is no difference, or one that is meant.
func (c healthContrast) settled() bool { return c.theirs == c.ours || explainHealth(c) != nil }

// await asks both proxies until it finds what it should, or gives up. kube-proxy programs the kernel first,
// so its answers may lag behind.
func (c *healthContrast) await(ctx context.Context, as func(healthContrast) bool) {
	_ = eventually.Poll(ctx, func() error { // what differs in the end is the caller's to judge
		c.theirs, c.ours = healthAt(ctx, c.pair.theirs.bed, c.to), healthAt(ctx, c.pair.ours.bed, c.to)
		if as(*c) {
			return nil
		}
		return errors.New(c.String())
	})
}

// healthAt is the answer's status and what programs read of it, or that there is none.
func healthAt(ctx context.Context, bed *testbed.Bed, to netip.AddrPort) string {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+to.String()+"/", nil)
	if err != nil {
		return err.Error()
	}
	response, err := bed.HTTPClient(testbed.Outside).Do(request)
	if err != nil {
		return "nobody answers"
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err.Error()
	}
	var told any
	if err := json.Unmarshal(body, &told); err != nil {
		return fmt.Sprintf("%d %s", response.StatusCode, body)
	}
	return fmt.Sprintf("%d %v, weight %s, %s", response.StatusCode, told,
		response.Header.Get("X-Load-Balancing-Endpoint-Weight"), response.Header.Get("Content-Type"))
}

// told is what healthAt returns if a Service has so many endpoints on the node.
func told(s *corev1.Service, local int) string {
	status := http.StatusOK
	if local == 0 {
		status = http.StatusServiceUnavailable
	}
	return fmt.Sprintf("%d map[localEndpoints:%d service:map[name:%s namespace:%s] serviceProxyHealthy:true], "+
		"weight %[2]d, application/json", status, local, s.Name, s.Namespace)
}
