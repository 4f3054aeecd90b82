package kube

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// kind is what is watched of one resource, and what becomes of its objects.
type kind struct {
	resource string
	group    schema.GroupVersion
	labels   string
	fields   string
	// optional: a server that does not offer it, or does not let us see it, has none of it.
	optional bool
	list     func() runtime.Object
	// compact keeps what matters; nil: the object does not concern a proxy. The error is for an object of another kind.
	compact func(runtime.Object) (any, []service.Problem, error)
	// put says in a Batch what an object is now, given all objects of the kind; nil: it is gone.
	put func(b *service.Batch, all map[service.Name]any, name service.Name)
}

// of makes a kind's compact of one for its type.
func of[T runtime.Object](f func(T) (any, []service.Problem)) func(runtime.Object) (any, []service.Problem, error) {
	return func(o runtime.Object) (any, []service.Problem, error) {
		typed, ok := o.(T)
		if !ok {
			return nil, nil, fmt.Errorf("the API server sends a %T where a %T is asked for", o, typed)
		}
		is, problems := f(typed)
		return is, problems, nil
	}
}

// kinds are what kube-proxy watches, by its selectors, and Services that other proxies handle.
func kinds(node string) []*kind {
	return []*kind{serviceKind(), sliceKind(), nodeKind(node), cidrKind()}
}

// serviceKind leaves out headless ones, which DNS alone serves.
func serviceKind() *kind {
	return &kind{
		resource: "services",
		group:    corev1.SchemeGroupVersion,
		fields:   fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String(),
		list:     func() runtime.Object { return &corev1.ServiceList{} },
		compact: of(func(o *corev1.Service) (any, []service.Problem) {
			return service.FromService(o)
		}),
		put: func(b *service.Batch, all map[service.Name]any, name service.Name) {
			s, _ := all[name].(*service.Service)
			b.Services.Set(name, s)
		},
	}
}

// slicesResource is the resource whose versions nodes compare.
const slicesResource = "endpointslices"

// sliceKind leaves out those of headless Services.
func sliceKind() *kind {
	return &kind{
		resource: slicesResource,
		group:    discoveryv1.SchemeGroupVersion,
		labels:   "!" + corev1.IsHeadlessService,
		list:     func() runtime.Object { return &discoveryv1.EndpointSliceList{} },
		compact: of(func(o *discoveryv1.EndpointSlice) (any, []service.Problem) {
			s, problems := service.FromSlice(o)
			if s == nil {
				return nil, problems
			}
			s.Version = number(o.ResourceVersion)
			return s, problems
		}),
		put: func(b *service.Batch, all map[service.Name]any, name service.Name) {
			s, _ := all[name].(*service.Slice)
			b.Slices.Set(name, s)
		},
	}
}

// nodes is the resource of which the own one alone is watched.
const nodes = "nodes"

func nodeKind(node string) *kind {
	return &kind{
		resource: nodes,
		group:    corev1.SchemeGroupVersion,
		fields:   fields.OneTermEqualSelector(metav1.ObjectNameField, node).String(),
		list:     func() runtime.Object { return &corev1.NodeList{} },
		compact: of(func(o *corev1.Node) (any, []service.Problem) {
			return service.FromNode(o)
		}),
		put: func(b *service.Batch, all map[service.Name]any, name service.Name) {
			b.Node = &service.Node{}
			if n, ok := all[name].(*service.Node); ok {
				b.Node = n
			}
		},
	}
}

// cidrKind: ServiceCIDRs exist since Kubernetes 1.29, and as networking.k8s.io/v1 since 1.33.
func cidrKind() *kind {
	return &kind{
		resource: "servicecidrs",
		group:    networkingv1.SchemeGroupVersion,
		optional: true,
		list:     func() runtime.Object { return &networkingv1.ServiceCIDRList{} },
		compact: of(func(o *networkingv1.ServiceCIDR) (any, []service.Problem) {
			return service.FromServiceCIDRs([]*networkingv1.ServiceCIDR{o})
		}),
		put: func(b *service.Batch, all map[service.Name]any, _ service.Name) {
			ranges := []netip.Prefix{}
			for _, v := range all {
				ranges = append(ranges, v.([]netip.Prefix)...)
			}
			b.ServiceCIDRs = append([]netip.Prefix{}, model.Disjoint(ranges)...)
		},
	}
}
