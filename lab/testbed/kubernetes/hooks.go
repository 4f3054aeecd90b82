package kubernetes

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/testbed"
)

// Hook is a command of a preStop hook that has ended.
type Hook struct {
	Pod    string
	Output string
	Took   time.Duration
	Err    error
}

// Hooks are those that have ended so far.
func (k *Kubelet) Hooks() []Hook {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.hooks)
}

// hook runs the commands of a pod's preStop hooks, and reports whether they have ended.
func (k *Kubelet) hook(ctx context.Context, key string, r *runningPod, pod *corev1.Pod) (ended bool) {
	if !slices.ContainsFunc(pod.Spec.Containers, hasCommand) {
		return true
	}
	if r.hooked == nil {
		done := make(chan struct{})
		r.hooked = done
		grace := 30 * time.Second
		if s := pod.DeletionGracePeriodSeconds; s != nil {
			grace = time.Duration(*s) * time.Second
		}
		k.group.Go(func() {
			defer k.queue.Add(key)
			defer close(done)
			ctx, cancel := context.WithTimeout(ctx, grace)
			defer cancel()
			for _, c := range pod.Spec.Containers {
				if hasCommand(c) {
					k.runHook(ctx, r, &c, pod)
				}
			}
		})
	}
	select {
	case <-r.hooked:
		return true
	default:
		return false
	}
}

func hasCommand(c corev1.Container) bool {
	return c.Lifecycle != nil && c.Lifecycle.PreStop != nil && c.Lifecycle.PreStop.Exec != nil
}

func (k *Kubelet) runHook(ctx context.Context, r *runningPod, c *corev1.Container, pod *corev1.Pod) {
	command := c.Lifecycle.PreStop.Exec.Command
	start := time.Now()
	cmd := k.bed.Command(ctx, testbed.Place(r.place), command[0], command[1:]...)
	cmd.Env = os.Environ()
	var hosts []string
	for _, h := range pod.Status.HostIPs {
		hosts = append(hosts, h.IP)
	}
	fields := map[string]string{"status.hostIP": pod.Status.HostIP, "status.hostIPs": strings.Join(hosts, ",")}
	for _, e := range c.Env {
		if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil {
			e.Value = fields[e.ValueFrom.FieldRef.FieldPath]
		}
		cmd.Env = append(cmd.Env, e.Name+"="+e.Value)
	}
	out, err := cmd.CombinedOutput()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.hooks = append(k.hooks, Hook{r.place, strings.TrimSpace(string(out)), time.Since(start), err})
}

// live renews the nodes' Leases.
func (k *Kubelet) live(ctx context.Context) {
	beat := time.NewTicker(10 * time.Second)
	defer beat.Stop()
	for {
		for _, place := range []testbed.Place{testbed.Node, testbed.NodeB} {
			_ = k.renew(ctx, string(place)) // the API server may be away, and is asked again
		}
		select {
		case <-beat.C:
		case <-ctx.Done():
			return
		}
	}
}

// renew is a heartbeat.
func (k *Kubelet) renew(ctx context.Context, node string) error {
	leases := k.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: node, Namespace: corev1.NamespaceNodeLease},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &node, LeaseDurationSeconds: new(int32(40)), RenewTime: new(metav1.NowMicro()),
		},
	}
	old, err := leases.Get(ctx, node, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, err = leases.Create(ctx, lease, metav1.CreateOptions{})
	case err == nil:
		lease.ResourceVersion = old.ResourceVersion
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	}
	return err
}
