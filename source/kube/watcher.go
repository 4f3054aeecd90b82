package kube

import (
	"context"
	"math"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"fairlead.dev/fairlead/service"
)

// watcher keeps one mirror up to date. client-go's Reflector decides when to list and when to watch;
// the watcher sends its requests, hands it the answers in compact form, and tells the link how it goes.
type watcher struct {
	*mirror
	client rest.Interface
	link   *link
	timing timing
	absent atomic.Bool // an optional resource that the server does not offer
	later  atomic.Bool // it is to be asked for again only later
	served atomic.Bool // it has been offered
	restraint
}

// run returns when ctx ends.
func (w *watcher) run(ctx context.Context) {
	logger := logr.FromSlogHandler(background{w.source.log.Handler()})
	ctx = klog.NewContext(ctx, logger)
	requests := &cache.ListWatch{ListWithContextFunc: w.List, WatchFuncWithContext: w.Watch}
	r := cache.NewReflectorWithOptions(requests, &compact{}, w.mirror, cache.ReflectorOptions{
		Logger:          &logger,
		Name:            "fairlead",
		TypeDescription: w.resource,
		Clock:           endingClock{ctx: ctx},
		Backoff: &wait.Backoff{
			Duration: w.timing.backoff, Factor: 2, Jitter: 1, Cap: maxBackoff, Steps: math.MaxInt32,
		},
	})
	r.RunWithContext(ctx)
}

// List is called with the pages of a list, where streaming is not possible.
func (w *watcher) List(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	if !w.pause(ctx) {
		return nil, ctx.Err()
	}
	requestCtx, cancel := context.WithTimeout(ctx, w.timing.list)
	defer cancel()
	full := w.list()
	if err := w.request(o).Do(requestCtx).Into(full); err != nil {
		w.failed(ctx, err)
		return nil, err
	}
	list, err := w.compactList(full)
	if err != nil {
		w.failed(ctx, err)
		return nil, err
	}
	w.works()
	return list, nil
}

// pause waits before it asks again for what the server does not offer, or a server in trouble.
func (w *watcher) pause(ctx context.Context) bool {
	if w.later.Load() {
		return sleep(ctx, w.timing.absent)
	}
	return w.restraint.wait(ctx)
}

func (w *watcher) compactList(full runtime.Object) (*compactList, error) {
	l, err := meta.ListAccessor(full)
	if err != nil {
		return nil, err
	}
	list := &compactList{}
	list.ResourceVersion, list.Continue = l.GetResourceVersion(), l.GetContinue()
	list.RemainingItemCount = l.GetRemainingItemCount()
	list.Items = make([]*compact, 0, meta.LenList(full))
	err = meta.EachListItem(full, func(o runtime.Object) error {
		c, err := w.reduce(o)
		list.Items = append(list.Items, c)
		return err
	})
	return list, err
}

// reduce makes an object compact.
func (w *watcher) reduce(o runtime.Object) (*compact, error) {
	c, err := header(o)
	if err == nil {
		c.value, c.problems, err = w.compact(o)
	}
	if m, ok := o.(metav1.Object); ok && len(c.problems) > 0 {
		c.uid = m.GetUID()
	}
	return c, err
}

// header is what is needed of any object.
func header(o runtime.Object) (*compact, error) {
	m, err := meta.Accessor(o)
	if err != nil {
		return nil, err
	}
	return &compact{
		name:    service.Name{Namespace: m.GetNamespace(), Name: m.GetName()},
		version: m.GetResourceVersion(),
		listed:  m.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true",
	}, nil
}

// request leaves retries to the Reflector, which has other ways to try. For a version that the server does not know
// since etcd was restored, for one, client-go's request would ask for most of a minute.
func (w *watcher) request(o metav1.ListOptions) *rest.Request {
	o.LabelSelector, o.FieldSelector = w.labels, w.fields
	return w.client.Get().Resource(w.resource).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0)
}

// Watch is called for a streaming list (SendInitialEvents), and to continue where a watch ended.
func (w *watcher) Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	streaming := o.SendInitialEvents != nil
	if !w.pause(ctx) {
		return nil, ctx.Err()
	}
	requestCtx, cancel := context.WithCancel(ctx)
	patience := time.AfterFunc(w.timing.silence, cancel)
	from, err := w.request(o).Watch(requestCtx)
	patience.Stop()
	if err != nil {
		cancel()
		if !streaming || !refusesStreaming(err) {
			w.failed(ctx, err)
		}
		return nil, err
	}
	to := make(chan watch.Event)
	s := &stream{watcher: w, from: from, to: to, proxy: watch.NewProxyWatcher(to)}
	if !streaming {
		s.version = o.ResourceVersion
	}
	w.source.running.Go(func() {
		defer cancel()
		s.pump(ctx)
	})
	return s.proxy, nil
}

// refusesStreaming reports whether the server, or the proxy before it, is too old for streaming lists
// or has them disabled. An ordinary list comes next, and will tell.
func refusesStreaming(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsMethodNotSupported(err) ||
		apierrors.IsNotAcceptable(err)
}

// failed reports an error, and takes an optional resource that is not offered for one without objects.
func (w *watcher) failed(ctx context.Context, err error) {
	if ctx.Err() != nil || unknownVersion(err) {
		return // we are closing, or the Reflector lists anew
	}
	w.restraint.failed(err)
	notOffered := apierrors.IsNotFound(err) || apierrors.IsForbidden(err)
	if !w.optional || !notOffered || w.served.Load() {
		w.link.failed(w.resource, err)
		return
	}
	w.later.Store(apierrors.IsNotFound(err)) // forbidden it is for a moment while a server starts
	if w.absent.Swap(true) {
		return // known
	}
	w.source.log.Warn("the API server does not offer an optional resource; continuing without it",
		"resource", w.resource, "server", w.link.server, "error", err,
		"advice", "none for Kubernetes older than 1.33; otherwise let cluster role system:node-proxier list and watch it")
	w.source.update(func(*service.Batch) { w.mirror.listed = true })
}

// unknownVersion reports whether history was compacted, or has not yet come to where the watch ended.
func unknownVersion(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) ||
		apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
}

func (w *watcher) works() {
	w.restraint.works()
	w.later.Store(false)
	w.served.Store(true)
	if w.absent.Swap(false) {
		w.source.log.Info("the API server offers an optional resource now", "resource", w.resource,
			"server", w.link.server)
	}
	w.link.works(w.resource)
}

// stream makes the objects of one watch compact as they arrive.
type stream struct {
	*watcher
	from  watch.Interface
	to    chan watch.Event
	proxy *watch.ProxyWatcher
	// version is how far the watch has come; empty: it is in the first objects, which come in any order.
	version string
}

// pump ends when the watch ends, and when it has been silent for so long that it may be dead, though the
// connection is not. The Reflector then continues by another watch.
func (s *stream) pump(ctx context.Context) {
	defer close(s.to)
	defer s.from.Stop()
	silence := time.NewTimer(s.timing.silence)
	settled := time.NewTimer(s.timing.settled)
	defer silence.Stop()
	defer settled.Stop()
	for {
		select {
		case e, ok := <-s.from.ResultChan():
			if !ok || !s.send(s.translate(ctx, e)) {
				return
			}
			silence.Reset(s.timing.silence)
		case <-silence.C:
			s.checkHistory(ctx)
			return
		case <-settled.C: // many watches have nothing to say for long
			s.works()
		case <-s.proxy.StopChan():
			return
		case <-ctx.Done():
			return
		}
	}
}

// checkHistory finds out whether the watch is silent because it waits for a version that lies in the future since etcd
// was restored from a backup. Another watch from there would be as silent, so the Reflector is told to list anew. That
// costs the server much; the question, about no object, little.
func (s *stream) checkHistory(ctx context.Context) {
	if s.version == "" {
		return // it was silent from its beginning
	}
	requestCtx, cancel := context.WithTimeout(ctx, s.timing.list)
	defer cancel()
	o := metav1.ListOptions{ResourceVersion: s.version, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan}
	nothing := fields.OneTermEqualSelector(metav1.ObjectNameField, "-").String()
	err := s.client.Get().Resource(s.resource).VersionedParams(&o, metav1.ParameterCodec).
		Param("fieldSelector", nothing).MaxRetries(0).Do(requestCtx).Error()
	if !apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) {
		return
	}
	s.source.log.Warn("the API server's history went back, as after a restore of etcd; the objects are listed anew",
		"resource", s.resource, "server", s.link.server)
	s.send(watch.Event{Type: watch.Error, Object: &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired,
		Message: "the server's history went back",
	}})
}

func (s *stream) send(e watch.Event) bool {
	select {
	case s.to <- e:
		return true
	case <-s.proxy.StopChan():
		return false
	}
}

// translate makes the event's object compact. Of one that is deleted the name suffices.
func (s *stream) translate(ctx context.Context, e watch.Event) watch.Event {
	var c *compact
	var err error
	switch e.Type {
	case watch.Error:
		s.failed(ctx, apierrors.FromObject(e.Object))
		return e
	case watch.Deleted, watch.Bookmark:
		c, err = header(e.Object)
	default:
		c, err = s.reduce(e.Object)
	}
	if err != nil {
		s.failed(ctx, err)
		return watch.Event{Type: watch.Error, Object: &apierrors.NewInternalError(err).ErrStatus}
	}
	if s.version != "" || c.listed {
		s.version = c.version
	}
	e.Object = c
	return e
}
