// Package cluster brings ordinary application manifests to life in a testbed. It plays those parts of Kubernetes whose
// work a service proxy takes for granted:
//
//	manifests ─► parse ─┬─ Deployments, Pods, … ─► plan ─► virtual pods in the testbed
//	(Load)              │                                     │ addresses
//	                    ├─ Services ─► allocate ─┐            ▼
//	                    └─ Endpoints …           └──────► EndpointSlices ─► Result ─► Write(dir)
//	                                                                          └─► Addresses to probe
//
// The scheduler and kubelet are a pod for each replica, spread over both nodes. It answers on every container port, and
// on every target port of a Service that selects it. The API server and the cloud allocate ClusterIPs, NodePorts and
// load balancer addresses. The endpoint controller writes EndpointSlices from selectors and readiness. Other objects of
// the manifests are counted.
//
// Apply always gets the whole of the manifests, and changes what differs from last time.
package cluster

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Cluster is the memory between two calls of Apply: what runs, and which user has which
// address. One goroutine calls it.
type Cluster struct {
	bed     *testbed.Bed
	pods    plan              // that run
	servers map[server]string // by pods
	allocations
}

// New starts without any workload. The Bed remains the caller's to close.
func New(bed *testbed.Bed) *Cluster { return &Cluster{bed: bed, pods: plan{}} }

// Result is the cluster that the manifests describe, as an API server would show it. Everything is
// sorted by name.
type Result struct {
	Pods         []Pod
	Services     []*corev1.Service // with all addresses and ports allocated
	Slices       []*discoveryv1.EndpointSlice
	Nodes        []*corev1.Node
	ServiceCIDRs []*networkingv1.ServiceCIDR
	Addresses    []Address      // what there is to probe
	Notes        []string       // Services without anything to probe, and why
	Skipped      map[string]int // objects by kind that play no part
	Problems     []Problem      // objects that were left out, wholly or in part
}

// Pod is a running virtual pod.
type Pod struct {
	Place     string // its name in the testbed, and in its answers
	Namespace string
	Name      string
	Node      testbed.Place
	Addrs     []netip.Addr
}

// Problem is something wrong with one object. It never stops the others.
type Problem struct {
	File     string
	Line     int    // where the mistake is, or else where the document begins; 0: unknown
	Document int    // counted from 1; 0: the file as a whole
	Object   string // kind, namespace/name; empty: unknown
	Reason   string
}

func (p Problem) Error() string {
	s := p.File
	if p.Line > 0 {
		s += fmt.Sprintf(":%d", p.Line)
	}
	if p.Document > 0 {
		s += fmt.Sprintf(": document %d", p.Document)
	}
	if p.Object != "" {
		s += ": " + p.Object
	}
	return s + ": " + p.Reason
}

// Apply makes the cluster what the manifests say and no more. An error means that ctx ended or the
// testbed is broken; what is wrong with single objects is in Result.Problems.
func (c *Cluster) Apply(ctx context.Context, manifests []Manifest) (*Result, error) {
	r, services, pods := c.plan(manifests)
	if err := c.run(ctx, pods, r.report); err != nil {
		return nil, err
	}
	c.publish(r, services)
	return r, nil
}

// plan does all that needs no kernel.
func (c *Cluster) plan(manifests []Manifest) (*Result, []*service, plan) {
	in := parse(manifests)
	r := &Result{Skipped: in.skipped, Nodes: c.nodes(), ServiceCIDRs: serviceCIDRs(), Problems: in.problems}
	services := c.allocate(in.services, r.report)
	pods := planPods(in.workloads, r.report)
	for _, s := range services {
		s.pods = pods.selected(s)
		if len(s.pods) == 0 {
			s.given = in.slices[s.key()]
			pods.planHosts(c, s, r.report)
		}
	}
	if pods.silent(model.SCTP) {
		r.Notes = append(r.Notes, "this kernel has no SCTP: the pods' SCTP ports do not answer")
	}
	return r, services, pods
}

// publish completes the result from what runs.
func (c *Cluster) publish(r *Result, services []*service) {
	c.index()
	for _, s := range services {
		c.publishService(r, s)
	}
	for place, p := range c.pods {
		r.Pods = append(r.Pods, Pod{place, p.namespace, p.name, p.node, p.addrs})
	}
	slices.SortFunc(r.Pods, func(a, b Pod) int { return cmp.Compare(a.Place, b.Place) })
	slices.SortStableFunc(r.Problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Document, b.Document), cmp.Compare(a.Object, b.Object))
	})
}

// report notes what is wrong with an object: each of joined errors is a problem of its own.
func (r *Result) report(o object, err error) {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			r.report(o, err)
		}
		return
	}
	r.Problems = append(r.Problems, o.problem(err))
}

// reporter is Result.report.
type reporter func(o object, err error)

// publishService adds a Service to the result: its slices, its routes and what there is to probe.
func (c *Cluster) publishService(r *Result, s *service) {
	r.Services = append(r.Services, &s.Service)
	made := s.given
	if made == nil {
		made = slicesOf(s)
	}
	r.Slices = append(r.Slices, made...)
	if why := s.unproxied(); why != "" {
		r.Notes = append(r.Notes, fmt.Sprintf("%s %s: nothing to proxy", s.object, why))
		return
	}
	for _, a := range s.addresses() {
		if err := c.route(a.addr); err != nil {
			r.report(s.object, err)
		}
	}
	r.Addresses = append(r.Addresses, c.addresses(s, made)...)
}

// route leads an address of no machine to the node.
func (c *Cluster) route(a netip.Addr) error {
	planned := slices.Concat(testbed.ServiceCIDRs(), testbed.LoadBalancerCIDRs(), testbed.ExternalCIDRs())
	if slices.ContainsFunc(planned, func(p netip.Prefix) bool { return p.Contains(a) }) || c.bed.Owner(a) != "" {
		return nil
	}
	return c.bed.Route(netip.PrefixFrom(a, a.BitLen()))
}

// run starts and stops pods until those of the plan run, as far as that is possible.
func (c *Cluster) run(ctx context.Context, pods plan, report reporter) error {
	for _, place := range slices.Sorted(maps.Keys(c.pods)) {
		if next := pods[place]; next == nil || !next.continues(c.pods[place]) {
			if err := c.bed.RemovePod(place); err != nil {
				return err
			}
			delete(c.pods, place)
		}
	}
	// Pods that must have certain addresses come before those that take any.
	places := slices.SortedFunc(maps.Keys(pods), func(a, b string) int {
		return cmp.Or(-cmp.Compare(len(pods[a].wanted), len(pods[b].wanted)), cmp.Compare(a, b))
	})
	failed := map[object][]error{}
	for _, place := range places {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := pods[place]
		if err := c.start(ctx, place, p); err != nil {
			failed[p.object] = append(failed[p.object], err)
		}
	}
	for o, errs := range failed {
		report(o, fmt.Errorf("%d of its pods do not run: %w", len(errs), errs[0]))
	}
	return nil
}

// start starts a pod, or more servers of a running one.
func (c *Cluster) start(ctx context.Context, place string, p *pod) error {
	if old := c.pods[place]; old != nil {
		p.addrs = old.addrs
		c.pods[place] = p
		return c.bed.Serve(place, p.listens()...)
	}
	spec := testbed.PodSpec{Name: place, Node: p.node, Ports: p.listens(), HostNetwork: p.spec.HostNetwork}
	if !spec.HostNetwork {
		spec.Addrs = p.wanted
	}
	started, err := c.bed.AddPod(ctx, spec)
	if err != nil {
		return err
	}
	p.addrs = started.Addrs
	c.pods[place] = p
	return nil
}
