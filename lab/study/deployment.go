package study

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
)

// deployment has pods with processes of their own as the endpoints of one of a Site's Services, for a turn.
type deployment struct {
	*Site
	slice    *discoveryv1.EndpointSlice // nil: they are not announced
	replicas []*traffic.Worker
}

const replicaPort = 9100

// number is that Service's: where there are many, it is none of those that a start of the proxy awaits.
func (d *deployment) number() int { return min(1, d.Services-1) }

func replicaName(i int) testbed.Place { return testbed.Place(fmt.Sprintf("replica-%d", i)) }

// deploy starts the pods, and announces that the first of them are ready.
func (s *Site) deploy(ctx context.Context, pods, ready int) (*deployment, error) {
	d := &deployment{Site: s}
	if err := d.start(ctx, pods, ready); err != nil {
		return nil, errors.Join(err, d.end())
	}
	return d, nil
}

func (d *deployment) start(ctx context.Context, pods, ready int) error {
	for i := range pods {
		if err := d.startPod(ctx, replicaName(i)); err != nil {
			return err
		}
	}
	if d.Proxy == nil {
		return nil
	}
	if err := d.rest(ctx); err != nil {
		return err
	}
	d.slice = d.Site.slice(d.number())
	for i := range d.slice.Ports {
		d.slice.Ports[i].Port = new(int32(replicaPort))
	}
	var endpoints []discoveryv1.Endpoint
	for i := range ready {
		endpoints = append(endpoints, readyEndpoint(d.address(i)))
	}
	begin := time.Now()
	if err := d.become(endpoints...); err != nil {
		return err
	}
	err := d.awaitAnswer(ctx)
	d.worked(time.Since(begin), 1)
	return errors.Join(err, d.rest(ctx))
}

func (d *deployment) startPod(ctx context.Context, name testbed.Place) error {
	if _, err := d.Bed.AddPod(ctx, testbed.PodSpec{Name: string(name)}); err != nil {
		return err
	}
	w, err := traffic.StartWorker(context.WithoutCancel(ctx), d.Bed, name)
	if err != nil {
		return errors.Join(err, d.Bed.RemovePod(string(name)))
	}
	d.replicas = append(d.replicas, w)
	return w.Serve(ctx, traffic.Server{Ports: []uint16{replicaPort}})
}

func (d *deployment) address(replica int) netip.Addr { return d.Bed.Addr(replicaName(replica), false) }

// target is the Service, or where there is no proxy the last pod, which is never replaced.
func (d *deployment) target() netip.AddrPort {
	if d.Proxy == nil {
		return netip.AddrPortFrom(d.address(len(d.replicas)-1), replicaPort)
	}
	return d.Service(d.number())
}

// awaitAnswer returns when one of the pods has answered a request.
func (d *deployment) awaitAnswer(ctx context.Context) error {
	client, err := d.client(ctx, ClientPod)
	if err != nil {
		return err
	}
	const patience = 50 * time.Millisecond
	return d.Proxy.Await(ctx, "no pod has answered", func(ctx context.Context) (bool, error) {
		_, err := client.Run(ctx, traffic.Load{Targets: []netip.AddrPort{d.target()}, Requests: 1, Timeout: patience})
		if err != nil {
			return false, err
		}
		return d.answered(ctx)
	})
}

// answered reports whether a pod has answered.
func (d *deployment) answered(ctx context.Context) (yes bool, err error) {
	for _, w := range d.replicas {
		counts, err := w.Served(ctx)
		if err != nil || counts[replicaPort].Answered > 0 {
			return true, err
		}
	}
	return false, nil
}

// become announces other endpoints.
func (d *deployment) become(endpoints ...discoveryv1.Endpoint) error {
	if d.Proxy == nil {
		return nil
	}
	d.slice = d.slice.DeepCopy() // the catalog keeps what it was given
	d.slice.Endpoints = endpoints
	return d.Catalog.Update(d.slice)
}

// end removes all of it.
func (d *deployment) end() (err error) {
	if d.slice != nil {
		err = d.Catalog.Update(d.Site.slice(d.number()))
		d.worked(time.Second, 1) // it may take long, and no client is measured
	}
	for i, w := range d.replicas {
		err = errors.Join(err, w.Close(), d.Bed.RemovePod(string(replicaName(i))))
	}
	d.replicas = nil
	return err
}

// clients ask a deployment all the time: some by a new connection for each request, which ends in order, and some by
// connections that stay. There are more clients than can wait for an answer at the same time.
type clients struct {
	short, long *traffic.Running
}

// Their requests in a second, and how many connections stay.
const (
	shortRate, shortMost      = 500, 600
	longRate, longConnections = 100, 20
)

func (d *deployment) ask(ctx context.Context, sources []uint16) (c clients, err error) {
	w, err := d.client(ctx, ClientPod)
	if err != nil {
		return c, err
	}
	to := []netip.AddrPort{d.target()}
	short := traffic.Load{
		Targets: to, Rate: d.rate(shortRate), Concurrency: shortMost, Timeout: time.Second, FIN: true,
		Sources: sources,
	}
	long := traffic.Load{
		Targets: to, Rate: d.rate(longRate), Concurrency: longConnections, KeepAlive: true, Timeout: time.Second,
	}
	if c.short, err = w.Begin(ctx, short); err != nil {
		return c, err
	}
	if c.long, err = w.Begin(ctx, long); err != nil {
		_, stopped := c.short.Stop(ctx)
		return c, errors.Join(err, stopped)
	}
	return c, nil
}

// rate is how many requests a second are made where a number of them is right for a processor of today. The test
// kernel's would do nothing else.
func (s *Site) rate(perSecond float64) float64 {
	if s.Kernel == Test {
		return perSecond / 10
	}
	return perSecond
}

// clientFigures are those of clients.
func clientFigures() []Figure {
	return []Figure{
		{Name: "lost", Unit: Count, Better: Lower, Does: "new connections without an answer", Main: true},
		{Name: "asked", Unit: Count, Does: "new connections in all"},
		{Name: "lost share", Unit: Share, Better: Lower, Does: "of all new connections"},
		{Name: "broken", Unit: Count, Better: Lower, Does: "connections that were open, and broke"},
		{Name: "p50", Unit: Seconds, Better: Lower, Does: "a new connection and its answer, from when it should begin"},
		{Name: "p99", Unit: Seconds, Better: Lower, Does: "the same, 99th percentile"},
		{Name: "longest", Unit: Seconds, Better: Lower, Does: "the longest of them that was answered"},
	}
}

// stop ends them.
func (c clients) stop(ctx context.Context) (Figures, error) {
	short, errShort := c.short.Stop(ctx)
	long, errLong := c.long.Stop(ctx)
	if err := errors.Join(errShort, errLong); err != nil {
		return nil, err
	}
	lost, asked := unanswered(short), float64(short.Done)
	f := Figures{
		"lost": lost, "asked": asked + lost, "lost share": lost / max(asked+lost, 1), "broken": float64(long.Failed()),
	}
	if f["lost share"] <= tolerated {
		f["p50"], f["p99"] = short.Total.Quantile(0.5).Seconds(), short.Total.Quantile(0.99).Seconds()
		f["longest"] = short.Total.Quantile(1).Seconds()
	}
	return f, nil
}

// tolerated is the share of requests without an answer beyond which the times of the others say nothing.
const tolerated = 0.01

// unanswered are requests that failed, and those that there was no client for because all waited.
func unanswered(r traffic.Result) float64 { return float64(r.Failed() + r.Unsent) }

// abandon ends them after an error; if they have been stopped, it does nothing.
func (c clients) abandon(ctx context.Context) { _, _ = c.stop(context.WithoutCancel(ctx)) }

// pause waits.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
