package bench

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/service"
)

// BenchmarkBulk has an engine program 10,000 Services of one namespace that come at once, while a Service of another one
// changes. It is how long the former take, in time and in processor time, and how long the latter waits at most.
//
//	./dev bench 'Bulk/nftables$'
func BenchmarkBulk(b *testing.B) {
	for _, p := range auditedPlanes() {
		b.Run(p.name, func(b *testing.B) {
			if p.name == "ipvs" && inTestKernel(b) {
				return
			}
			b.ReportMetric(0, "ns/op")
			bed := testbed.Need(b, testbed.Spec{Cgroup: true})
			if p.new == nil {
				p.new = ebpf.New(ebpf.Options{Packets: localhost.Wrap(conntrack.Wrap(nftables.New)), Cgroup: bed.Cgroup(),
					Pins: filepath.Join(testbed.NeedBPFFS(b), "fairlead")})
			}
			for _, victim := range []bool{false, true} {
				wall, work, worst := p.bulk(b, bed, victim)
				name := "alone"
				if victim {
					name = "beside"
					b.ReportMetric(worst.Seconds(), "s-worst-change")
				}
				b.ReportMetric(wall.Seconds(), "s-"+name)
				b.ReportMetric(work.Seconds(), "cpu-s-"+name)
			}
		})
	}
}

// bulk programs the Services once, and removes them.
func (p audited) bulk(b *testing.B, bed *testbed.Bed, victim bool) (wall, work, worst time.Duration) {
	const services = 10_000
	var plane dataplane.Dataplane
	err := bed.Do(testbed.Node, func() (err error) {
		plane, err = p.new(dataplane.Config{})
		return err
	})
	if err != nil {
		lack.Skip(b, lack.IPVS, err)
	}
	batches := make(fixed, 1)
	e := engine.New(engine.Options{
		Source: batches, Table: newTable(b), Plane: plane, MaxRest: time.Second, AuditInterval: time.Hour,
	})
	ctx, stop := context.WithCancel(b.Context())
	result := make(chan error, 1)
	go func() { result <- e.Run(ctx) }()
	defer func() {
		stop()
		if err := <-result; err != nil {
			b.Error(err)
		}
		if err := plane.Remove(b.Context()); err != nil {
			b.Error(err)
		}
		plane.Close()
	}()
	f := fleet{services: 1, endpoints: apart(2)}
	batches <- f.batch(bed)
	awaitPools(b, e, 1)
	letPass(2 * time.Second)
	var bulk service.Batch
	for i := range services {
		f.add(&bulk, i+1)
	}
	for i := range bulk.Services {
		bulk.Services[i].Name.Namespace, bulk.Services[i].Is.Name.Namespace = "tenant", "tenant"
	}
	for i := range bulk.Slices {
		bulk.Slices[i].Name.Namespace, bulk.Slices[i].Is.Name.Namespace = "tenant", "tenant"
	}
	start, before := time.Now(), cpuTime(b)
	batches <- bulk
	for n := 0; victim; n++ {
		var one service.Batch
		f.endpoints = func(int) []netip.Addr { return []netip.Addr{nth(netip.MustParseAddr("10.131.0.1"), n)} }
		f.add(&one, 0)
		sent := time.Now()
		batches <- one
		pools := awaitEndpoint(b, e, one)
		worst = max(worst, time.Since(sent))
		if pools > services {
			break
		}
		letPass(50 * time.Millisecond)
	}
	awaitPools(b, e, services+1)
	return time.Since(start), cpuTime(b) - before, worst
}

// awaitPools waits until so many Services are in force.
func awaitPools(b *testing.B, e *engine.Engine, n int) {
	b.Helper()
	awaitView(b, e, func(v engine.View) bool { return len(v.State.Pools) >= n })
}

// awaitEndpoint waits until the endpoint of a Service is in force, and returns how many Services are.
func awaitEndpoint(b *testing.B, e *engine.Engine, one service.Batch) (pools int) {
	b.Helper()
	want := one.Slices[0].Is.Endpoints[0].Addr
	awaitView(b, e, func(v engine.View) bool {
		pools = len(v.State.Pools)
		pool := v.State.Pools[poolOf(0)]
		return len(pool.Backends) == 1 && pool.Backends[0].Addr == want
	})
	return pools
}

func awaitView(b *testing.B, e *engine.Engine, ok func(engine.View) bool) {
	b.Helper()
	for start := time.Now(); ; letPass(time.Millisecond) {
		done := false
		err := e.Do(b.Context(), func(_ context.Context, v engine.View) error {
			done = ok(v)
			return nil
		})
		if err != nil {
			b.Fatal(err)
		}
		if done {
			return
		}
		if time.Since(start) > 2*time.Minute {
			b.Fatal(fmt.Errorf("it is not in force after two minutes"))
		}
	}
}
