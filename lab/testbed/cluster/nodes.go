package cluster

import (
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/testbed"
)

// bothNodes are the testbed's nodes.
func bothNodes() []testbed.Place { return []testbed.Place{testbed.Node, testbed.NodeB} }

// zoneOf is a node's zone: each has its own.
func zoneOf(node testbed.Place) string {
	return map[testbed.Place]string{testbed.Node: "zone-a", testbed.NodeB: "zone-b"}[node]
}

func nodeLabels(node testbed.Place) map[string]string {
	return map[string]string{
		corev1.LabelHostname:           string(node),
		corev1.LabelOSStable:           "linux",
		corev1.LabelArchStable:         "amd64",
		corev1.LabelTopologyRegion:     "testbed",
		corev1.LabelTopologyZone:       zoneOf(node),
		"node-role.kubernetes.io/node": "",
	}
}

// nodes are the Node objects.
func (c *Cluster) nodes() []*corev1.Node {
	var all []*corev1.Node
	for _, place := range bothNodes() {
		n := &corev1.Node{
			TypeMeta:   metav1.TypeMeta{Kind: "Node", APIVersion: "v1"},
			ObjectMeta: metav1.ObjectMeta{Name: string(place), Labels: nodeLabels(place)},
		}
		for _, p := range testbed.PodCIDRs(place) {
			n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
		}
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
		for _, v6 := range []bool{false, true} {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{
				Type: corev1.NodeInternalIP, Address: c.bed.Addr(place, v6).String(),
			})
		}
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{
			Type: corev1.NodeHostName, Address: string(place),
		})
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		all = append(all, n)
	}
	return all
}

// serviceCIDRs is the range from which ClusterIPs come.
func serviceCIDRs() []*networkingv1.ServiceCIDR {
	cidr := &networkingv1.ServiceCIDR{
		TypeMeta:   metav1.TypeMeta{Kind: "ServiceCIDR", APIVersion: "networking.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
	}
	for _, p := range testbed.ServiceCIDRs() {
		cidr.Spec.CIDRs = append(cidr.Spec.CIDRs, p.String())
	}
	return []*networkingv1.ServiceCIDR{cidr}
}
