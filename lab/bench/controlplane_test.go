package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/service"
)

const (
	controlServices = 50_000 // each with one endpoint, as Cilium's benchmark has them
	controlRepeats  = 3      // in a round; their mean counts
	// expectedServices is for how many tables are made.
	expectedServices = 3 * controlServices
)

// BenchmarkControlPlane compares how fast objects get into the kernel, and what memory that takes, with Cilium's own
// benchmark of its load balancer, built as it is released. Both are told the same objects, one at a time, which they have
// in memory as an API client would have decoded them, and then that all are gone.
//
//	for each round, in random order
//	  Cilium:   events ─► reflector ─► tables ─► reconciler ─► maps of the kernel
//	  Fairlead: events ─► Batch ─► engine: service.Table ─► plane ebpf ─► maps of the kernel
func BenchmarkControlPlane(b *testing.B) {
	figures := map[string][]load{}
	measure := func(name string, run func() (load, error)) Variant {
		return Variant{name, func() ([]time.Duration, error) {
			l, err := run()
			figures[name] = append(figures[name], l)
			return []time.Duration{l.insert}, err
		}}
	}
	objects := newAPIObjects()
	variants := []Variant{
		measure(fairlead, newControlPlane(b, objects, expectedServices).run),
		measure(fairleadSlices, newControlPlane(b, objects.unread(), expectedServices).run),
		measure(fairleadGrows, newControlPlane(b, objects, 0).run),
	}
	if os.Getenv(rivalsVariable) != "none" {
		variants = append(variants, measure(cilium, newCiliumBenchmark(b).run))
	}
	if _, err := Interleave(variants, rounds(b, roundsOf(b, 5))); err != nil {
		b.Fatal(err)
	}
	reportControlPlane(b, figures)
}

const (
	cilium   = "Cilium"
	fairlead = "Fairlead"
	// Cilium's benchmark reads EndpointSlices beforehand. This one counts that as well, for Fairlead.
	fairleadSlices = "Fairlead, EndpointSlices read too"
	// Cilium's tables are made for three times as many Services. Here they begin as small as they can.
	fairleadGrows = "Fairlead, tables that grow"
)

// load is what it took to take in all Services, and to forget them.
type load struct {
	insert, remove           time.Duration
	objects, allocated, used float64 // per Service: objects and bytes in use when all are there, and bytes ever allocated
}

func reportControlPlane(b *testing.B, figures map[string][]load) {
	b.Helper()
	names := []string{cilium, fairlead, fairleadSlices, fairleadGrows}
	rows := [][]string{append([]string{""}, names...)}
	for _, row := range []struct {
		name string
		of   func(load) float64
	}{
		{"Services inserted per second", func(l load) float64 { return controlServices / l.insert.Seconds() }},
		{"Services deleted per second", func(l load) float64 { return controlServices / l.remove.Seconds() }},
		{"bytes allocated per Service", func(l load) float64 { return l.allocated }},
		{"bytes in use per Service", func(l load) float64 { return l.used }},
		{"objects in use per Service", func(l load) float64 { return l.objects }},
	} {
		series := map[string]Series{}
		for name, loads := range figures {
			for _, l := range loads {
				series[name] = append(series[name], row.of(l))
			}
		}
		cells := []string{row.name}
		for _, name := range names {
			cells = append(cells, describe(series[name], series[cilium]))
		}
		rows = append(rows, cells)
	}
	title := "%d Services × 1 endpoint inserted one by one, and deleted: median of %d rounds of %d each"
	printTable(fmt.Sprintf(title, controlServices, len(figures[fairlead]), controlRepeats), rows...)
}

// describe is the median of a series, and how many times that of a control it is.
func describe(s, control Series) string {
	if len(s) == 0 {
		return ""
	}
	text := fmt.Sprintf("%.0f", Series(s).Median())
	if len(control) > 0 && &s[0] != &control[0] {
		text += ": " + s.Ratio(control).String()
	}
	return text
}

// apiObjects are what an API client has decoded.
type apiObjects struct {
	services []*corev1.Service
	slices   []*discoveryv1.EndpointSlice
	compact  []*service.Slice // what was read of them beforehand; nil: they are read while time is taken
}

func newAPIObjects() (o apiObjects) {
	for i := range controlServices {
		s, slice := apiPair(i)
		compact, _ := service.FromSlice(slice)
		o.services, o.slices, o.compact = append(o.services, s), append(o.slices, slice), append(o.compact, compact)
	}
	return o
}

// unread are the same objects, of which nothing was read.
func (o apiObjects) unread() apiObjects { return apiObjects{services: o.services, slices: o.slices} }

// controlPlane has the part of the daemon behind its API client follow events, with a kernel that serves no clients.
type controlPlane struct {
	apiObjects
	b        *testing.B
	expected uint32 // Services, for which tables are made
	feed     *feed
	engine   *engine.Engine
}

func newControlPlane(b *testing.B, o apiObjects, expected uint32) *controlPlane {
	b.Helper()
	return &controlPlane{apiObjects: o, b: b, expected: expected}
}

// start has an engine program a kernel that has nothing yet.
func (p *controlPlane) start() (end func() error, err error) {
	plane, remove, err := emptyEBPF(p.b, p.expected)
	if err != nil {
		return nil, err
	}
	p.feed = newFeed()
	p.engine = engine.New(engine.Options{Source: p.feed, Table: newTable(p.b), Plane: plane})
	ctx, cancel := context.WithCancel(p.b.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.engine.Run(ctx) }()
	return func() error {
		cancel()
		return errors.Join(<-ended, plane.Close(), remove())
	}, p.wait(0)
}

// emptyEBPF is the ebpf plane, in a cgroup without processes, with tables for so many Services.
func emptyEBPF(b *testing.B, expected uint32) (plane dataplane.Dataplane, remove func() error, err error) {
	bed, err := testbed.New(b.Context(), testbed.Spec{Cgroup: true})
	if err != nil {
		return nil, nil, err
	}
	pins, path, err := testbed.BPFFS()
	if err != nil {
		return nil, nil, errors.Join(err, bed.Close())
	}
	remove = func() error { return errors.Join(pins.Close(), bed.Close()) }
	err = bed.Do(testbed.Node, func() (err error) {
		o := ebpf.Options{Cgroup: bed.Cgroup(), Pins: filepath.Join(path, "fairlead")}
		o.Sizes.Services = expected
		plane, err = ebpf.New(o)(dataplane.Config{})
		return err
	})
	if err != nil {
		return nil, nil, errors.Join(err, remove())
	}
	return plane, remove, nil
}

// apiPair are the Service and the EndpointSlice that Cilium's benchmark has (pkg/loadbalancer/benchmark/testdata).
func apiPair(i int) (*corev1.Service, *discoveryv1.EndpointSlice) {
	created := metav1.NewTime(time.Date(2022, 9, 13, 11, 11, 26, 0, time.UTC))
	name, ip := fmt.Sprintf("echo-%06d", i), nth(netip.AddrFrom4([4]byte{10, 96, 0, 0}), i).String()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: name, ResourceVersion: "234", CreationTimestamp: created},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"name": name},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
	port, portName, protocol, yes, no, node := int32(80), "http", corev1.ProtocolTCP, true, false, "nodeport-worker"
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "test", Name: fmt.Sprintf("echo-kvlm2-%06d", i), ResourceVersion: "123", CreationTimestamp: created,
			Generation: 3, Labels: map[string]string{
				discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io",
			},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{
			Addresses:  []string{nth(netip.AddrFrom4([4]byte{10, 244, 0, 0}), i).String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no}, NodeName: &node,
		}},
		Ports: []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &protocol}},
	}
	return s, slice
}

// run is a round: the mean of some repeats.
func (p *controlPlane) run() (mean load, err error) {
	for range controlRepeats {
		l, err := p.once()
		if err != nil {
			return mean, err
		}
		mean.insert += l.insert / controlRepeats
		mean.remove += l.remove / controlRepeats
		mean.objects += l.objects / controlRepeats
		mean.allocated += l.allocated / controlRepeats
		mean.used += l.used / controlRepeats
	}
	return mean, nil
}

// once repeats one iteration of Cilium's benchmark, and measures in the same way. The objects are there before and are
// not counted, and memory is counted when all are in the kernel.
func (p *controlPlane) once() (l load, err error) {
	end, err := p.start()
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, end()) }()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	start := time.Now()
	for i := range p.slices {
		p.slice(i, false)
	}
	for _, s := range p.services {
		p.feed.service(s, false)
	}
	if err := p.wait(controlServices); err != nil {
		return l, err
	}
	l.insert = time.Since(start)
	runtime.GC()
	runtime.ReadMemStats(&after)
	l.objects = float64(after.HeapObjects-before.HeapObjects) / controlServices
	l.allocated = float64(after.TotalAlloc-before.TotalAlloc) / controlServices
	l.used = (float64(after.HeapAlloc) - float64(before.HeapAlloc)) / controlServices

	start = time.Now()
	for _, s := range p.services {
		p.feed.service(s, true)
	}
	for i := range p.slices {
		p.slice(i, true)
	}
	err = p.wait(0)
	l.remove = time.Since(start)
	return l, err
}

// slice is an event of the i-th EndpointSlice.
func (p *controlPlane) slice(i int, gone bool) {
	var s *service.Slice
	name := service.Name{Namespace: p.slices[i].Namespace, Name: p.slices[i].Name}
	switch {
	case gone:
	case p.compact != nil:
		s = p.compact[i]
	default:
		s, _ = service.FromSlice(p.slices[i])
	}
	p.feed.update(func(b *service.Batch) {
		b.Slices.Set(name, s)
	})
}

// wait returns when the kernel has so many Services.
func (p *controlPlane) wait(services int) error {
	p.feed.flush()
	pools := -1 // a request is served when the batch before it has been programmed
	err := p.engine.Do(context.Background(), func(_ context.Context, v engine.View) error {
		pools = len(v.State.Pools)
		return nil
	})
	if s := p.engine.Status(); err == nil && (pools != services || s.Failures > 0) {
		err = fmt.Errorf("%d of %d Services are in the kernel: %s", pools, services, s.Error)
	}
	return err
}

// feed is a source.Source that is told of events. Neither benchmark includes the store of objects that an API client
// keeps to find changes.
type feed struct {
	changed chan struct{} // has a token if Next should look

	mu      sync.Mutex
	pending service.Batch
	taken   *sync.Cond // Next has returned what was pending
}

func newFeed() *feed {
	f := &feed{changed: make(chan struct{}, 1)}
	f.taken = sync.NewCond(&f.mu)
	f.pending = service.Batch{
		Node: &service.Node{Name: string(testbed.Node), IPs: []netip.Addr{netip.MustParseAddr("10.0.0.3")}, Eligible: true},
	}
	f.changed <- struct{}{}
	return f
}

// service takes an event of a Service.
func (f *feed) service(o *corev1.Service, gone bool) {
	var s *service.Service
	name := service.Name{Namespace: o.Namespace, Name: o.Name}
	if !gone {
		s, _ = service.FromService(o)
	}
	f.update(func(b *service.Batch) {
		b.Services.Set(name, s)
	})
}

func (f *feed) update(put func(*service.Batch)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	put(&f.pending)
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// Next implements source.Source.
func (f *feed) Next(ctx context.Context) (service.Batch, error) {
	select {
	case <-f.changed:
	case <-ctx.Done():
		return service.Batch{}, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.pending
	f.pending = service.Batch{}
	f.taken.Broadcast()
	return b, nil
}

// flush waits until Next has returned all.
func (f *feed) flush() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.pending.Services)+len(f.pending.Slices) > 0 {
		f.taken.Wait()
	}
}

// Close implements source.Source.
func (f *feed) Close() error { return nil }
