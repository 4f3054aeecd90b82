package kube

import (
	"context"
	"io"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/json"

	"fairlead.dev/fairlead/service"
)

// RoutedGate is a readiness gate of pods, and the condition that it waits for.
const RoutedGate corev1.PodConditionType = "fairlead.dev/routed"

const (
	podsResource = "pods"
	// A node may write so often to its pods, as all of them start at once after a boot. Its kubelet writes more.
	podWrites, podBurst = 20, 100
)

// Pod is one that has RoutedGate and addresses, and does not end.
type Pod struct {
	Name   service.Name
	UID    types.UID
	Addrs  []netip.Addr
	Port   uint16 // the first of TCP that it declares; 0: none
	Routed Routed
}

// Routed is what the condition of a Pod says; zero: it has none.
type Routed struct {
	Is  bool
	Why string
}

// PodWatch is until it is closed.
type PodWatch interface {
	io.Closer
	Watches() []Watch
}

// WatchPods tells of each Pod of a node that is there or changes, and of one that is gone by nil, until it is closed.
func (c *Client) WatchPods(node string, changed func(service.Name, *Pod)) PodWatch {
	return c.watch(&kind{
		resource: podsResource,
		group:    corev1.SchemeGroupVersion,
		fields:   fields.OneTermEqualSelector("spec.nodeName", node).String(),
		list:     func() runtime.Object { return &corev1.PodList{} },
		compact:  of(fromPod),
		put: func(_ *service.Batch, all map[service.Name]any, name service.Name) {
			p, _ := all[name].(*Pod)
			changed(name, p)
		},
	})
}

func fromPod(o *corev1.Pod) (any, []service.Problem) {
	p := &Pod{Name: service.Name{Namespace: o.Namespace, Name: o.Name}, UID: o.UID}
	gated := slices.ContainsFunc(o.Spec.ReadinessGates, func(g corev1.PodReadinessGate) bool {
		return g.ConditionType == RoutedGate
	})
	ends := o.DeletionTimestamp != nil || o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed
	if !gated || ends {
		return nil, nil
	}
	for _, ip := range o.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			p.Addrs = append(p.Addrs, a)
		}
	}
	if len(p.Addrs) == 0 {
		return nil, nil
	}
	for _, c := range o.Status.Conditions {
		if c.Type == RoutedGate {
			p.Routed = Routed{Is: c.Status == corev1.ConditionTrue, Why: c.Message}
		}
	}
	for _, c := range o.Spec.Containers {
		for _, port := range c.Ports {
			if port.Protocol == corev1.ProtocolTCP && p.Port == 0 {
				p.Port = uint16(port.ContainerPort)
			}
		}
	}
	return p, nil
}

// SetRouted writes the condition of a Pod, but not of another one of that name. It logs errors.
func (c *Client) SetRouted(ctx context.Context, p *Pod, now Routed) error {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	condition := map[string]any{"type": RoutedGate, "status": corev1.ConditionFalse, "message": now.Why}
	if now.Is {
		condition["status"] = corev1.ConditionTrue
	}
	if now.Is != p.Routed.Is || p.Routed.Why == "" {
		condition["lastTransitionTime"] = metav1.Now()
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": p.UID}, "status": map[string]any{"conditions": []any{condition}},
	})
	if err != nil {
		return err
	}
	const status = "status"
	err = c.pods.Patch(types.StrategicMergePatchType).Namespace(p.Name.Namespace).Resource(podsResource).Name(p.Name.Name).
		SubResource(status).Body(patch).Do(ctx).Error()
	// Invalid is also what admission policies answer.
	cause, _ := apierrors.StatusCause(err, metav1.CauseTypeFieldValueInvalid)
	switch {
	case err == nil:
		c.link.works(podsResource + "/" + status)
	case !apierrors.IsNotFound(err) && cause.Field != "metadata.uid": // else it is gone, or is not the one of that UID
		c.link.failed(podsResource+"/"+status, err)
	}
	return err
}
