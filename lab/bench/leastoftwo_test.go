package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Three servers do one request after the other, and one of them takes five times as long as the others. Clients come at
// random, so many that it has work for nine tenths of the time if it gets a third of them.
const (
	servesIn  = 4 * time.Millisecond
	slowness  = 5
	busy      = 0.9
	slowLasts = 15 * time.Second
)

// BenchmarkLeastOfTwo compares the time that requests take when the ebpf plane chooses servers at random, and when it
// takes the less loaded of two. Clients are sockets of a pod, and others whose packets come from outside.
func BenchmarkLeastOfTwo(b *testing.B) {
	for _, from := range []struct {
		name  string
		place testbed.Place
		to    string
	}{{"sockets", "client", "10.96.0.10:80"}, {"packets", testbed.Outside, "192.0.2.1:30080"}} {
		for _, scheduler := range []string{"random", model.LeastOfTwo} {
			b.Run(from.name+"/"+scheduler, func(b *testing.B) {
				c := slowCluster{newSlowBed(b, scheduler), from.place, netip.MustParseAddrPort(from.to)}
				seed := sample.Seed(b)
				for range b.N {
					took, err := c.ask(b.Context(), rand.New(rand.NewPCG(seed, 0)))
					if err != nil {
						b.Fatal(err)
					}
					slices.Sort(took)
					b.ReportMetric(float64(took[len(took)/2])/1e6, "p50-ms")
					b.ReportMetric(float64(took[len(took)*99/100])/1e6, "p99-ms")
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// slowCluster is a cluster with these servers, and where clients are.
type slowCluster struct {
	bed  *testbed.Bed
	from testbed.Place
	to   netip.AddrPort
}

func newSlowBed(b *testing.B, scheduler string) *testbed.Bed {
	b.Helper()
	spec := testbed.Spec{Pods: []testbed.PodSpec{{Name: "client"}}, Cgroup: true}
	for i := range 3 {
		spec.Pods = append(spec.Pods, testbed.PodSpec{Name: serverPod(i)})
	}
	bed := testbed.Need(b, spec)
	rows := "pods 10.244.0.0/16\npool default/web:http cluster scheduler " + scheduler + "\n" +
		"frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster\n" +
		"frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat always\n"
	rows = strings.ReplaceAll(rows, " scheduler random", "")
	for i := range 3 {
		takes := servesIn
		if i == 0 {
			takes *= slowness
		}
		rows += fmt.Sprintf("backend default/web:http cluster %s:8080 local\n", bed.Addr(testbed.Place(serverPod(i)), false))
		serveSlowly(b, bed, serverPod(i), takes)
	}
	contender{name: "ebpf", ebpf: &ebpf.Options{}}.install(b, bed, rows)
	return bed
}

// serveSlowly has a pod answer one client after the other.
func serveSlowly(b *testing.B, bed *testbed.Bed, pod string, takes time.Duration) {
	b.Helper()
	var listener net.Listener
	err := bed.Do(testbed.Place(pod), func() (err error) {
		listener, err = net.Listen("tcp4", ":8080")
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan struct{})
	b.Cleanup(func() {
		listener.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			time.Sleep(takes) //nolint:forbidigo // the work of a server
			_, _ = conn.Write([]byte("."))
			conn.Close()
		}
	}()
}

// ask returns the times of requests that begin at random.
func (c slowCluster) ask(ctx context.Context, chance *rand.Rand) (took []time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var all sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	pause := float64(servesIn*slowness) / 3 / busy
	for end := time.Now().Add(slowLasts); time.Now().Before(end); {
		time.Sleep(time.Duration(chance.ExpFloat64() * pause)) //nolint:forbidigo // the pace of clients
		all.Go(func() {
			began := time.Now()
			conn, err := c.bed.Dial(ctx, c.from, model.TCP, c.to)
			if err == nil {
				_, err = io.ReadAll(conn)
				conn.Close()
			}
			mu.Lock()
			defer mu.Unlock()
			took, errs = append(took, time.Since(began)), append(errs, err)
		})
	}
	all.Wait()
	return took, errors.Join(errs...)
}
