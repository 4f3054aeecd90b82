package kubernetes

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// register makes the Node object of a node, ready.
func (k *Kubelet) register(ctx context.Context, place testbed.Place) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: string(place), Labels: map[string]string{corev1.LabelHostname: string(place), corev1.LabelOSStable: "linux"},
	}}
	for _, cidr := range testbed.PodCIDRs(place) {
		node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, cidr.String())
	}
	node.Spec.PodCIDR = node.Spec.PodCIDRs[0]
	nodes := k.client.CoreV1().Nodes()
	made, err := nodes.Create(ctx, node, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		made, err = nodes.Get(ctx, node.Name, metav1.GetOptions{})
	}
	if err != nil {
		return err
	}
	for _, v6 := range []bool{false, true} {
		made.Status.Addresses = append(made.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: k.bed.Addr(place, v6).String()})
	}
	made.Status.Addresses = append(made.Status.Addresses,
		corev1.NodeAddress{Type: corev1.NodeHostName, Address: string(place)})
	room := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("256Gi"),
		corev1.ResourcePods: resource.MustParse("250"),
	}
	made.Status.Capacity, made.Status.Allocatable = room, room
	made.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady",
		LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
	}}
	_, err = nodes.UpdateStatus(ctx, made, metav1.UpdateOptions{})
	return err
}

// report tells the API server how a running pod is, if that is news.
func (k *Kubelet) report(ctx context.Context, r *runningPod, pod *corev1.Pod) (again time.Duration, err error) {
	wait := time.Until(r.started.Add(readinessDelay(pod)))
	ready := wait <= 0
	for _, gate := range pod.Spec.ReadinessGates {
		ready = ready && conditionTrue(pod, gate.ConditionType)
	}
	if pod.Status.Phase == corev1.PodRunning && conditionTrue(pod, corev1.PodReady) == ready {
		return max(wait, 0), nil
	}
	pod = pod.DeepCopy()
	k.describe(r, pod, ready)
	_, err = k.client.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return max(wait, 0), err
}

// reportEnd tells the API server that a pod's containers have ended.
func (k *Kubelet) reportEnd(ctx context.Context, pod *corev1.Pod) error {
	pod = pod.DeepCopy()
	pod.Status.Phase = corev1.PodSucceeded
	for _, t := range []corev1.PodConditionType{corev1.ContainersReady, corev1.PodReady} {
		setCondition(&pod.Status, t, false)
	}
	_, err := k.client.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// describe fills in the status of a running pod.
func (k *Kubelet) describe(r *runningPod, pod *corev1.Pod, ready bool) {
	s := &pod.Status
	s.Phase, s.PodIP, s.PodIPs, s.HostIPs = corev1.PodRunning, r.addrs[0], nil, nil
	for _, a := range r.addrs {
		s.PodIPs = append(s.PodIPs, corev1.PodIP{IP: a})
	}
	for _, v6 := range []bool{false, true} {
		a := k.bed.Addr(testbed.Place(pod.Spec.NodeName), v6).String()
		s.HostIPs = append(s.HostIPs, corev1.HostIP{IP: a})
	}
	s.HostIP = s.HostIPs[0].IP
	started := metav1.NewTime(r.started)
	s.StartTime = &started
	s.ContainerStatuses = nil
	for _, c := range pod.Spec.Containers {
		s.ContainerStatuses = append(s.ContainerStatuses, corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, Ready: ready, Started: new(true),
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: started}},
		})
	}
	for _, t := range []corev1.PodConditionType{
		corev1.PodScheduled, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady,
	} {
		setCondition(s, t, ready || t == corev1.PodScheduled || t == corev1.PodInitialized)
	}
}

func setCondition(s *corev1.PodStatus, t corev1.PodConditionType, is bool) {
	status := corev1.ConditionFalse
	if is {
		status = corev1.ConditionTrue
	}
	i := slices.IndexFunc(s.Conditions, func(c corev1.PodCondition) bool { return c.Type == t })
	if i < 0 {
		i = len(s.Conditions)
		s.Conditions = append(s.Conditions, corev1.PodCondition{Type: t})
	}
	if s.Conditions[i].Status != status {
		s.Conditions[i].Status, s.Conditions[i].LastTransitionTime = status, metav1.Now()
	}
}

func conditionTrue(pod *corev1.Pod, t corev1.PodConditionType) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == t && c.Status == corev1.ConditionTrue
	})
}

// readinessDelay is after how long the readiness probes succeed.
func readinessDelay(pod *corev1.Pod) (d time.Duration) {
	for _, c := range pod.Spec.Containers {
		if c.ReadinessProbe != nil {
			d = max(d, time.Duration(c.ReadinessProbe.InitialDelaySeconds)*time.Second)
		}
	}
	return d
}

// lingering is how long a pod that is being deleted serves on: the sleep of its preStop hooks, and its
// grace period at most.
func lingering(pod *corev1.Pod) (d time.Duration) {
	for _, c := range pod.Spec.Containers {
		if c.Lifecycle != nil && c.Lifecycle.PreStop != nil && c.Lifecycle.PreStop.Sleep != nil {
			d = max(d, time.Duration(c.Lifecycle.PreStop.Sleep.Seconds)*time.Second)
		}
	}
	if grace := pod.DeletionGracePeriodSeconds; grace != nil {
		d = min(d, time.Duration(*grace)*time.Second)
	}
	return d
}

// podPorts are the container ports on which this kernel can serve.
func podPorts(pod *corev1.Pod) (ports []testbed.PodPort) {
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			protocol, _ := model.ParseProtocol(string(p.Protocol)) // the API server has checked it
			if testbed.HasProtocol(protocol) {
				ports = append(ports, testbed.PodPort{Protocol: protocol, Port: uint16(p.ContainerPort)})
			}
		}
	}
	return ports
}
