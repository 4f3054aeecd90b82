package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"fairlead.dev/fairlead/lab/testbed"
)

// Kubelet is the virtual kubelet of both nodes of a Bed, and the scheduler. It registers the nodes, and binds pods to
// the schedulable one that has fewer. It runs each as a pod of the Bed that serves on its container ports and answers
// with PodPlace.
//
// It knows the parts of the Pod API that move Services. These are host network, readiness gates, the initial delay of a
// readiness probe, which then succeeds, and in deletion preStop hooks: a sleep, or a command in the pod's network. The
// pod serves on meanwhile. Then its servers end, and after them its addresses and its object are gone: at once if
// it was deleted without grace.
type Kubelet struct {
	bed       *testbed.Bed
	client    kubernetes.Interface
	pods      listers.PodLister
	nodes     listers.NodeLister
	endpoints discoverylisters.EndpointSliceLister
	queue     workqueue.TypedRateLimitingInterface[string]
	stop      context.CancelFunc
	group     sync.WaitGroup
	execs     []*http.Server // of ServeExec

	binding sync.Mutex // held while a node is chosen

	mu      sync.Mutex
	running map[string]*runningPod // by key
	bound   map[string]string      // key to node: bound here, and perhaps not seen yet
	errs    []error
	hooks   []Hook
}

// runningPod is a pod of the Bed. Only the worker that has its key uses it.
type runningPod struct {
	uid     types.UID
	place   string
	addrs   []string
	started time.Time
	told    time.Time       // when it was told to stop; zero: it was not
	leaving time.Time       // when the EndpointSlices said so; zero: they do not
	hooked  <-chan struct{} // closed when the commands of its preStop hooks have ended
	stopped time.Time       // when its servers ended; zero: they serve
}

// PodPlace is what a pod is called in the Bed, and in its answers.
func PodPlace(namespace, name string) testbed.Place {
	if namespace == corev1.NamespaceDefault {
		return testbed.Place(name)
	}
	return testbed.Place(namespace + "/" + name)
}

// StartKubelet registers the nodes and runs pods until Close. There is one for each control plane.
func (c *ControlPlane) StartKubelet(ctx context.Context, bed *testbed.Bed) (*Kubelet, error) {
	factory := informers.NewSharedInformerFactory(c.client, 0)
	k := &Kubelet{
		bed: bed, client: c.client,
		pods: factory.Core().V1().Pods().Lister(), nodes: factory.Core().V1().Nodes().Lister(),
		endpoints: factory.Discovery().V1().EndpointSlices().Lister(),
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](5*time.Millisecond, time.Second)),
		running: map[string]*runningPod{}, bound: map[string]string{},
	}
	for _, place := range []testbed.Place{testbed.Node, testbed.NodeB} {
		if err := k.register(ctx, place); err != nil {
			return nil, fmt.Errorf("register %s: %w", place, err)
		}
	}
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(k.handler())
	if err != nil {
		return nil, err
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	k.stop = stop
	factory.Start(run.Done())
	k.group.Go(func() { k.live(run) })
	k.group.Go(func() {
		<-run.Done()
		factory.Shutdown()
	})
	for kind, synced := range factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			k.Close()
			return nil, fmt.Errorf("list %s: %w", kind, ctx.Err())
		}
	}
	const workers = 4
	for range workers {
		k.group.Go(func() { k.work(run) })
	}
	return k, nil
}

// Close ends the kubelet. Pods of the Bed are left as they are. Its error is what went wrong meanwhile
// and would not heal.
func (k *Kubelet) Close() error {
	k.queue.ShutDown()
	k.stop()
	for _, s := range k.execs {
		_ = s.Close()
	}
	k.group.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	return errors.Join(k.errs...)
}

// handler queues the pods that change. A pod that leaves makes room, so those without a node are looked
// at again by their own failing attempts.
func (k *Kubelet) handler() cache.ResourceEventHandler {
	add := func(object any) {
		if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(object); err == nil {
			k.queue.Add(key)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: add, DeleteFunc: add, UpdateFunc: func(_, object any) { add(object) },
	}
}

func (k *Kubelet) work(ctx context.Context) {
	for {
		key, over := k.queue.Get()
		if over {
			return
		}
		again, err := k.sync(ctx, key)
		switch {
		case err != nil && ctx.Err() == nil: // the API server is away, or the object has changed meanwhile
			k.queue.AddRateLimited(key)
		case again > 0:
			k.queue.AddAfter(key, again)
		default:
			k.queue.Forget(key)
		}
		k.queue.Done(key)
	}
}

// sync does what is next for a pod, and says when to look at it again (0: when it changes).
func (k *Kubelet) sync(ctx context.Context, key string) (again time.Duration, err error) {
	namespace, name, err := cache.SplitMetaNamespaceKey(key)
	if err != nil {
		return 0, err
	}
	pod, err := k.pods.Pods(namespace).Get(name)
	if apierrors.IsNotFound(err) {
		return 0, k.end(key)
	}
	if err != nil {
		return 0, err
	}
	if r := k.runs(key); r != nil && r.uid != pod.UID { // deleted and made again unseen
		if err := k.end(key); err != nil {
			return 0, err
		}
	}
	switch {
	case pod.DeletionTimestamp != nil:
		return k.terminate(ctx, key, pod)
	case pod.Spec.NodeName == "":
		return 0, k.bind(ctx, key, pod)
	case !k.ours(pod.Spec.NodeName) || pod.Status.Phase == corev1.PodSucceeded:
		return 0, nil
	}
	r, err := k.begin(ctx, key, pod)
	if err != nil {
		return 0, err
	}
	return k.report(ctx, r, pod)
}

func (k *Kubelet) ours(node string) bool {
	return node == string(testbed.Node) || node == string(testbed.NodeB)
}

func (k *Kubelet) runs(key string) *runningPod {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.running[key]
}

// begin starts a pod, unless it runs.
func (k *Kubelet) begin(ctx context.Context, key string, pod *corev1.Pod) (*runningPod, error) {
	if r := k.runs(key); r != nil {
		return r, nil
	}
	place := PodPlace(pod.Namespace, pod.Name)
	started, err := k.bed.AddPod(ctx, testbed.PodSpec{
		Name: string(place), Node: testbed.Place(pod.Spec.NodeName),
		Ports: podPorts(pod), HostNetwork: pod.Spec.HostNetwork,
	})
	if err != nil {
		return nil, fmt.Errorf("start pod %s: %w", key, err)
	}
	r := &runningPod{uid: pod.UID, place: string(place), started: time.Now()}
	for _, a := range started.Addrs {
		r.addrs = append(r.addrs, a.String())
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.running[key] = r
	return r, nil
}

// end stops a pod, if it runs.
func (k *Kubelet) end(key string) error {
	k.mu.Lock()
	r := k.running[key]
	delete(k.running, key)
	delete(k.bound, key)
	k.mu.Unlock()
	if r == nil {
		return nil
	}
	err := k.bed.RemovePod(r.place)
	if err != nil {
		k.mu.Lock()
		k.errs = append(k.errs, err)
		k.mu.Unlock()
	}
	return err
}

// teardown is the time between the end of a pod's servers and that of its network. Packets that are
// under way are answered meanwhile.
const teardown = 2 * time.Second

// terminate lets a pod serve as long as its preStop hook sleeps, ends it and removes the object.
func (k *Kubelet) terminate(ctx context.Context, key string, pod *corev1.Pod) (again time.Duration, err error) {
	if r := k.runs(key); r != nil {
		if left := k.left(r, pod); left > 0 {
			return left, nil
		}
		if !k.hook(ctx, key, r, pod) {
			return 0, nil
		}
		if r.stopped.IsZero() {
			r.stopped = time.Now()
			if err := k.bed.StopServing(r.place); err != nil {
				return 0, err
			}
		}
		if pod.Status.Phase != corev1.PodSucceeded {
			if err := k.reportEnd(ctx, pod); err != nil {
				return 0, err
			}
		}
		if left := time.Until(r.stopped.Add(teardown)); left > 0 {
			return left, nil
		}
	}
	if err := k.end(key); err != nil {
		return 0, err
	}
	return 0, k.forget(ctx, pod)
}

// left is how long a pod that is being deleted serves on. The sleep begins when the EndpointSlices say that the pod
// ends: what a proxy does with the news is tested, not how long a busy controller takes to write it.
func (k *Kubelet) left(r *runningPod, pod *corev1.Pod) time.Duration {
	now := time.Now()
	if r.told.IsZero() {
		r.told = now
	}
	if r.leaving.IsZero() && (!k.listed(r, pod) || now.Sub(r.told) > controllerTime) {
		r.leaving = now
	}
	if r.leaving.IsZero() {
		return min(lingering(pod), 20*time.Millisecond)
	}
	return time.Until(r.leaving.Add(lingering(pod)))
}

// controllerTime bounds the wait for a controller that does not run.
const controllerTime = 20 * time.Second

// listed reports whether the controller's EndpointSlices have a pod as one that does not end.
func (k *Kubelet) listed(r *runningPod, pod *corev1.Pod) bool {
	managed := labels.SelectorFromSet(labels.Set{discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"})
	all, err := k.endpoints.EndpointSlices(pod.Namespace).List(managed)
	if err != nil {
		return false
	}
	for _, s := range all {
		for _, e := range s.Endpoints {
			ends := e.Conditions.Terminating != nil && *e.Conditions.Terminating
			if !ends && e.TargetRef != nil && e.TargetRef.UID == r.uid {
				return true
			}
		}
	}
	return false
}

// forget removes the object of a pod that has ended.
func (k *Kubelet) forget(ctx context.Context, pod *corev1.Pod) error {
	now := int64(0)
	err := k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: &now, Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// bind gives a pod the schedulable node with the fewest pods.
func (k *Kubelet) bind(ctx context.Context, key string, pod *corev1.Pod) error {
	k.binding.Lock()
	defer k.binding.Unlock()
	k.mu.Lock()
	done := k.bound[key] != ""
	k.mu.Unlock()
	if done {
		return nil
	}
	node, err := k.choose(pod)
	if err != nil {
		return err
	}
	binding := &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}
	err = k.client.CoreV1().Pods(pod.Namespace).Bind(ctx, binding, metav1.CreateOptions{})
	if err == nil {
		k.mu.Lock()
		k.bound[key] = node
		k.mu.Unlock()
	}
	return err
}

func (k *Kubelet) choose(pod *corev1.Pod) (string, error) {
	var candidates []string
	for _, name := range []string{string(testbed.Node), string(testbed.NodeB)} {
		node, err := k.nodes.Get(name)
		selector := labels.SelectorFromSet(pod.Spec.NodeSelector)
		if err == nil && !node.Spec.Unschedulable && selector.Matches(labels.Set(node.Labels)) {
			candidates = append(candidates, name)
		}
	}
	if len(candidates) == 0 {
		return "", fmt.Errorf("no node for pod %s/%s", pod.Namespace, pod.Name)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	count := map[string]int{}
	for _, node := range k.bound {
		count[node]++
	}
	return slices.MinFunc(candidates, func(a, b string) int { return count[a] - count[b] }), nil
}
