package kube

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/metadata"

	"fairlead.dev/fairlead/service"
)

// requestTime bounds each request about an Event, a Lease, or the condition of a pod.
const requestTime = 10 * time.Second

// write creates the object of an Event.
func (e *Events) write(event Event) (*eventsv1.Event, error) {
	var regarding corev1.ObjectReference
	err := e.retry(func(ctx context.Context) (err error) {
		regarding, err = e.reference(ctx, event.Object)
		return err
	})
	if err != nil {
		return nil, err
	}
	o := e.newObject(event, regarding) // once: its name tells whether it was created already
	return o, e.retry(func(ctx context.Context) error { return e.create(ctx, o) })
}

// retry tries for about a minute, unless the server has refused for good.
func (e *Events) retry(try func(context.Context) error) error {
	var last error
	backoff := wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.5, Steps: 6}
	err := wait.ExponentialBackoffWithContext(e.ctx, backoff, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, requestTime)
		defer cancel()
		last = try(ctx)
		if last == nil || temporary(last) {
			return last == nil, nil
		}
		return false, last
	})
	return cmp.Or(last, err)
}

// temporary reports whether an error may be another one next time.
func temporary(err error) bool {
	return !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) &&
		!apierrors.IsNotFound(err)
}

// create takes one that exists for success: it has been said, by another node or by a request whose
// answer was lost.
func (e *Events) create(ctx context.Context, o *eventsv1.Event) error {
	err := e.client.Post().Namespace(o.Namespace).Resource(eventsResource).Body(o).Do(ctx).Error()
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// patch says how often an Event came. One that has expired meanwhile is created again.
func (e *Events) patch(s *series) error {
	o := s.event.DeepCopy()
	o.Series = &eventsv1.EventSeries{Count: s.count, LastObservedTime: metav1.NewMicroTime(s.last)}
	text, err := json.Marshal(map[string]any{"series": o.Series})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.ctx, requestTime)
	defer cancel()
	err = e.client.Patch(types.MergePatchType).Namespace(o.Namespace).Resource(eventsResource).Name(o.Name).
		Body(text).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return e.create(ctx, o)
	}
	return err
}

// reference finds what an Event regards. kubectl describe looks for the UID too. A Node's Events have
// the node's name there, as the kubelet's do.
func (e *Events) reference(ctx context.Context, object string) (corev1.ObjectReference, error) {
	kind, of := service.ObjectOf(cmp.Or(object, "Node "+e.node))
	namespace, name, namespaced := of.Namespace, of.Name, of.Namespace != ""
	r := corev1.ObjectReference{Kind: kind}
	switch {
	case kind == "Node":
		r.APIVersion, r.Name, r.UID = "v1", name, types.UID(name)
		return r, nil
	case kind == "Namespace" && !namespaced: // its tenant looks for Events there
		r.APIVersion, r.Namespace, r.Name = "v1", name, name
		return r, nil
	case kind == "Service" && namespaced:
		r.APIVersion, r.Namespace, r.Name = "v1", namespace, name
		return r, e.findUID(ctx, corev1.SchemeGroupVersion.WithResource("services"), &r)
	case kind == "Pod" && namespaced:
		r.APIVersion, r.Namespace, r.Name = "v1", namespace, name
		return r, e.findUID(ctx, corev1.SchemeGroupVersion.WithResource(podsResource), &r)
	case kind == "EndpointSlice" && namespaced:
		r.APIVersion, r.Namespace, r.Name = discoveryv1.SchemeGroupVersion.String(), namespace, name
		return r, e.findUID(ctx, discoveryv1.SchemeGroupVersion.WithResource("endpointslices"), &r)
	case kind == "ServiceCIDR" && !namespaced:
		r.APIVersion, r.Name = networkingv1.SchemeGroupVersion.String(), name
		return r, e.findUID(ctx, networkingv1.SchemeGroupVersion.WithResource("servicecidrs"), &r)
	}
	return r, apierrors.NewBadRequest(fmt.Sprintf("no Event can regard %q", object))
}

// findUID finds the UID of an object that the Source knows to be bad, or lists the one object:
// kube-proxy's cluster role allows list, but not get.
func (e *Events) findUID(ctx context.Context, resource schema.GroupVersionResource, r *corev1.ObjectReference) error {
	if s := e.seen.Load(); s != nil {
		r.UID, _ = s.identity(resource.Resource, service.Name{Namespace: r.Namespace, Name: r.Name})
	}
	if r.UID != "" {
		return nil
	}
	uid, err := uidOf(ctx, e.objects.Resource(resource).Namespace(r.Namespace), r.Name)
	if r.UID = uid; err == nil && uid == "" {
		return apierrors.NewNotFound(resource.GroupResource(), r.Name) // it is gone
	}
	return err
}

// identity is Source.identity of what an Event regards.
func (e *Events) identity(object string) (uid types.UID, created int64) {
	kind, name := service.ObjectOf(object)
	if s := e.seen.Load(); s != nil {
		return s.identity(strings.ToLower(kind)+"s", name)
	}
	return "", 0
}

// uidOf is the UID of an object; empty: there is none.
func uidOf(ctx context.Context, objects metadata.ResourceInterface, name string) (types.UID, error) {
	list, err := objects.List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String(),
	})
	if err != nil || len(list.Items) == 0 {
		return "", err
	}
	return list.Items[0].UID, nil
}

// countNodes asks how many nodes there are. It lists one: the server says how many remain.
func countNodes(ctx context.Context, objects metadata.Interface) (n int, err error) {
	list, err := objects.Resource(corev1.SchemeGroupVersion.WithResource(nodes)).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return 0, err
	}
	n = len(list.Items)
	if list.RemainingItemCount != nil {
		n += int(*list.RemainingItemCount)
	}
	return n, nil
}

func (e *Events) countNodes() {
	err := e.retry(func(ctx context.Context) (err error) {
		e.nodes, err = countNodes(ctx, e.objects)
		return err
	})
	if err != nil && e.ctx.Err() == nil {
		e.log.Debug("nodes could not be counted", "error", err)
	}
}

func (e *Events) newObject(event Event, regarding corev1.ObjectReference) *eventsv1.Event {
	kind := corev1.EventTypeNormal
	if event.Warning {
		kind = corev1.EventTypeWarning
	}
	return &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: cmp.Or(regarding.Namespace, metav1.NamespaceDefault),
			Name:      eventName(event, regarding),
		},
		EventTime:           metav1.NowMicro(),
		ReportingController: e.component,
		ReportingInstance:   cut(e.component+"-"+e.node, 128),
		Action:              cmp.Or(event.Action, event.Reason),
		Reason:              event.Reason,
		Regarding:           regarding,
		Note:                cut(event.Message, maxNote),
		Type:                kind,
	}
}

// eventName is unique, unless all nodes say the same: then it depends on what they say.
func eventName(event Event, regarding corev1.ObjectReference) string {
	number := uint64(time.Now().UnixNano())
	if event.Everywhere {
		h := fnv.New64a()
		fmt.Fprintf(h, "%s %q %q %q", regarding.UID, event.Object, event.Reason, event.Message)
		number = h.Sum64()
	}
	return fmt.Sprintf("%s.%x", cut(regarding.Name, 230), number)
}

// cut shortens a text to so many bytes, of whole characters.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "")
}
