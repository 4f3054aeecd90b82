package service

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"fairlead.dev/fairlead/model"
)

// deletionTaint marks a node that the cluster autoscaler is about to delete (KEP-3836).
const deletionTaint = "ToBeDeletedByClusterAutoscaler"

// FromNode validates a Node and keeps what matters. Of each family the first internal address is
// the primary one, or the first external address if there is no internal one.
func FromNode(o *corev1.Node) (*Node, []Problem) {
	r := &report{kind: "Node", of: Name{Name: o.Name}}
	n := &Node{Name: o.Name, Zone: o.Labels[corev1.LabelTopologyZone], Eligible: eligible(o)}
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for i, a := range o.Status.Addresses {
			if a.Type != kind {
				continue
			}
			ip, ok := r.addr(index("status.addresses", i), a.Address)
			if ok && !hasFamily(n.IPs, ip) {
				n.IPs = append(n.IPs, ip)
			}
		}
	}
	cidrs := o.Spec.PodCIDRs
	if len(cidrs) == 0 && o.Spec.PodCIDR != "" {
		cidrs = []string{o.Spec.PodCIDR}
	}
	n.PodCIDRs = model.Disjoint(r.prefixes("spec.podCIDRs", cidrs))
	return n, r.done()
}

// eligible reports whether load balancers should still send new connections to the node.
func eligible(o *corev1.Node) bool {
	for _, t := range o.Spec.Taints {
		if t.Key == deletionTaint {
			return false
		}
	}
	return o.DeletionTimestamp == nil
}

// FromServiceCIDRs gathers the ranges of all ServiceCIDR objects, sorted and disjoint. It never
// returns nil, which in a Batch would mean "unchanged".
func FromServiceCIDRs(objects []*networkingv1.ServiceCIDR) ([]netip.Prefix, []Problem) {
	all := []netip.Prefix{}
	var problems []Problem
	for _, o := range objects {
		r := &report{kind: "ServiceCIDR", of: Name{Name: o.Name}}
		all = append(all, r.prefixes("spec.cidrs", o.Spec.CIDRs)...)
		problems = append(problems, r.done()...)
	}
	return append([]netip.Prefix{}, model.Disjoint(all)...), problems
}
