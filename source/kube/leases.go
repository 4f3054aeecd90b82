package kube

import (
	"cmp"
	"context"
	"os"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/json"
)

// Confirmation is what an agent says of its node's kernel, in a Lease that belongs to the Node.
type Confirmation struct {
	Version uint64    // all changes of EndpointSlices up to this resourceVersion are in force
	Used    []string  // as service.Barrier has it
	Renewed time.Time // by the node's own clock
}

const (
	leasesResource = "leases"
	confirmLabel   = "fairlead.dev/confirms"   // on Leases of agents
	versionKey     = "fairlead.dev/programmed" // annotation: Version
	usedKey        = "fairlead.dev/still-used" // annotation: Used, separated by commas
	leaseName      = "fairlead-"               // and the node's name
)

// LeaseTime is how long a Confirmation counts.
const LeaseTime = 15 * time.Minute

// agentNamespace is where all agents of a cluster have their Leases: that of the pod in which the process runs.
func agentNamespace() string {
	text, _ := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace") // there is none outside a pod
	return cmp.Or(strings.TrimSpace(string(text)), metav1.NamespaceSystem)
}

// Confirm writes a node's Confirmation.
func (c *Client) Confirm(ctx context.Context, node string, says Confirmation) error {
	l := coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			versionKey: strconv.FormatUint(says.Version, 10), usedKey: strings.Join(says.Used, ","),
		}},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &node, LeaseDurationSeconds: new(int32(LeaseTime / time.Second)),
			RenewTime: new(metav1.NewMicroTime(says.Renewed)),
		},
	}
	patch, err := json.Marshal(l)
	if err != nil {
		return err
	}
	err = c.leases.Patch(types.MergePatchType).Namespace(agentNamespace()).Resource(leasesResource).Name(leaseName + node).
		Timeout(requestTime).Body(patch).Do(ctx).Error()
	if !apierrors.IsNotFound(err) {
		return err
	}
	l.Name, l.Labels = leaseName+node, map[string]string{confirmLabel: ""}
	owner := metav1.OwnerReference{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Node", Name: node}
	owner.UID, err = uidOf(ctx, c.objects.Resource(corev1.SchemeGroupVersion.WithResource(nodes)), node)
	if err != nil {
		return err
	}
	if owner.UID != "" { // else nothing would remove the Lease
		l.OwnerReferences = []metav1.OwnerReference{owner}
	}
	return c.leases.Post().Namespace(agentNamespace()).Resource(leasesResource).Timeout(requestTime).Body(&l).
		Do(ctx).Error()
}

// Confirmations are those of all nodes, by name.
func (c *Client) Confirmations(ctx context.Context) (map[string]Confirmation, error) {
	all := map[string]Confirmation{}
	err := c.listLeases(ctx, agentNamespace(), confirmLabel, func(l *coordinationv1.Lease) {
		all[strings.TrimPrefix(l.Name, leaseName)] = Confirmation{
			Version: number(l.Annotations[versionKey]), Used: strings.Split(l.Annotations[usedKey], ","),
			Renewed: l.Spec.RenewTime.Time,
		}
	})
	return all, err
}

// Heartbeat is what a kubelet says of its node.
type Heartbeat struct {
	Renewed time.Time     // by the node's own clock
	Counts  time.Duration // when it has been silent for longer, the node is taken for dead
}

// Heartbeats are those of all nodes, by name. A kubelet renews its Lease four times in the Lease's duration, which
// nodeLeaseDurationSeconds sets: in 40 seconds.
func (c *Client) Heartbeats(ctx context.Context) (map[string]Heartbeat, error) {
	const renewals, ordinary = 6, 40
	all := map[string]Heartbeat{}
	err := c.listLeases(ctx, corev1.NamespaceNodeLease, "", func(l *coordinationv1.Lease) {
		lasts := int32(ordinary)
		if l.Spec.LeaseDurationSeconds != nil {
			lasts = max(lasts, *l.Spec.LeaseDurationSeconds)
		}
		interval := time.Duration(lasts) * time.Second / 4
		all[l.Name] = Heartbeat{l.Spec.RenewTime.Time, renewals * interval}
	})
	return all, err
}

// listLeases asks for what the API server has in memory.
func (c *Client) listLeases(ctx context.Context, namespace, label string, f func(*coordinationv1.Lease)) error {
	var list coordinationv1.LeaseList
	o := metav1.ListOptions{LabelSelector: label, ResourceVersion: "0"}
	err := c.leases.Get().Namespace(namespace).Resource(leasesResource).VersionedParams(&o, metav1.ParameterCodec).
		Timeout(requestTime).Do(ctx).Into(&list)
	for i := range list.Items {
		if list.Items[i].Spec.RenewTime != nil {
			f(&list.Items[i])
		}
	}
	return err
}

// CountNodes asks how many nodes there are.
func (c *Client) CountNodes(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	return countNodes(ctx, c.objects)
}
