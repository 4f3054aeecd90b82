package study

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/lab/testbed"
)

// Own are real Services in place of generated ones: the objects of an API server or of manifests. Only a few Services
// are changed: the targets lead to the server of a Site.
type Own struct {
	from     string
	services []*corev1.Service // that have a ClusterIP, by their names
	slices   []*discoveryv1.EndpointSlice
	targets  []int // indices of services
}

// NewOwn takes the Services and EndpointSlices of objects; from says where they were read. Endpoints on the node of
// that name are on the site's.
func NewOwn(from string, objects []runtime.Object, node string) (*Own, error) {
	o := &Own{from: from}
	for _, object := range objects {
		switch object := object.(type) {
		case *corev1.Service:
			if a, err := netip.ParseAddr(object.Spec.ClusterIP); err == nil && a.IsValid() {
				o.services = append(o.services, object)
			}
		case *discoveryv1.EndpointSlice:
			o.slices = append(o.slices, onNode(object, node))
		}
	}
	slices.SortFunc(o.services, func(a, b *corev1.Service) int { return cmp.Compare(nameOf(a), nameOf(b)) })
	o.services = slices.CompactFunc(o.services, func(a, b *corev1.Service) bool { return nameOf(a) == nameOf(b) })
	return o, o.chooseTargets()
}

func nameOf(o interface {
	GetNamespace() string
	GetName() string
}) string {
	return o.GetNamespace() + "/" + o.GetName()
}

// onNode moves the endpoints of one node to the site's.
func onNode(slice *discoveryv1.EndpointSlice, node string) *discoveryv1.EndpointSlice {
	slice = slice.DeepCopy()
	for i, e := range slice.Endpoints {
		if e.NodeName != nil && *e.NodeName == node {
			slice.Endpoints[i].NodeName = new(string(testbed.Node))
		}
	}
	return slice
}

// chooseTargets takes the first, the last, and one between them of those to which a client can connect.
func (o *Own) chooseTargets() error {
	var all []int
	for i, s := range o.services {
		addr, ok := tcpAddr(s)
		taken := func(p netip.Prefix) bool { return p.Contains(addr.Addr()) }
		if ok && !slices.ContainsFunc(testbed.OwnCIDRs(), taken) {
			all = append(all, i)
		}
	}
	if len(all) == 0 {
		return errors.New("none of the Services has an IPv4 ClusterIP and a port of TCP: there is nothing to connect to")
	}
	o.targets = []int{all[0], all[len(all)-1], all[len(all)/2]}
	slices.Sort(o.targets)
	o.targets = slices.Compact(o.targets)
	return nil
}

// tcpAddr is the address of a Service's first port of TCP.
func tcpAddr(s *corev1.Service) (netip.AddrPort, bool) {
	a, err := netip.ParseAddr(s.Spec.ClusterIP)
	for _, p := range s.Spec.Ports {
		if err == nil && a.Is4() && (p.Protocol == corev1.ProtocolTCP || p.Protocol == "") {
			return netip.AddrPortFrom(a, uint16(p.Port)), true
		}
	}
	return netip.AddrPort{}, false
}

// String says whose Services these are.
func (o *Own) String() string {
	if o == nil {
		return "generated"
	}
	return fmt.Sprintf("%d from %s", len(o.services), o.from)
}

// of are cells of which own Services are part: those whose size is the number of Services have theirs, and no others.
func (o *Own) of(cells []Cell, axis string) []Cell {
	if axis == servicesAxis {
		cells = sized(cells, []int{len(o.services)})
	}
	for i := range cells {
		cells[i].Cluster.own, cells[i].Cluster.theirs = o, axis == servicesAxis
	}
	return cells
}

// target is the one that the i-th Service of a cluster of theirs is. The same Service has several numbers.
func (c Cluster) target(i int) (s *corev1.Service, ok bool) {
	if !c.theirs || i >= c.Services {
		return nil, false
	}
	return c.own.services[c.own.targets[i*len(c.own.targets)/c.Services]], true
}

// leads reports whether it is the address of a target.
func (c Cluster) leads(to netip.AddrPort) bool {
	return slices.ContainsFunc(c.own.targets, func(i int) bool {
		addr, _ := tcpAddr(c.own.services[i])
		return addr == to
	})
}

// objects are all of them, without the endpoints of targets.
func (o *Own) objects(withTargets bool) (all []runtime.Object) {
	led := map[string]bool{}
	for i, s := range o.services {
		all = append(all, s.DeepCopy())
		if withTargets && slices.Contains(o.targets, i) {
			led[nameOf(s)] = true
		}
	}
	for _, slice := range o.slices {
		if !led[slice.Namespace+"/"+slice.Labels[discoveryv1.LabelServiceName]] {
			all = append(all, slice.DeepCopy())
		}
	}
	return all
}

// first is the lowest number of each target.
func (c Cluster) first() (numbers []int) {
	n := len(c.own.targets)
	for i := range n {
		numbers = append(numbers, (i*c.Services+n-1)/n)
	}
	return numbers
}

// freeRange is one of addresses that none of their Services has.
func (o *Own) freeRange() netip.Prefix {
	for _, text := range []string{"10.96.0.0/12", "10.128.0.0/12", "172.16.0.0/12", "100.64.0.0/12"} {
		p := netip.MustParsePrefix(text)
		taken := slices.ContainsFunc(o.services, func(s *corev1.Service) bool {
			a, err := netip.ParseAddr(s.Spec.ClusterIP)
			return err == nil && p.Contains(a)
		})
		if !taken {
			return p
		}
	}
	return netip.MustParsePrefix("198.18.0.0/15")
}
