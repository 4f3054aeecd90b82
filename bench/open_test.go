package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/testbed"
)

const (
	openClients  = 8       // connections that are used in turn
	openArenas   = 3       // of each contender: what memory it got is one's luck
	requests     = 600     // in a slice
	requestBytes = 128     // of a request, and of its response
	chunk        = 1 << 16 // bytes of a write
	bulk         = 1 << 20 // bytes of which the time is taken
	bulks        = 8       // in a slice
	unheated     = 4       // the first part of a slice that does not count: 1/unheated
)

// traffic is a kind of traffic on connections that are open.
type traffic struct {
	name string
	do   func(here, there int, buffer []byte) error
	size int // of the buffer
	n    int // times in a slice
}

func traffics() []traffic {
	return []traffic{
		{"requests per second", request, requestBytes, requests},
		{"bytes per second, to the server", func(h, t int, b []byte) error { return pump(h, t, b) }, chunk, bulks},
		{"bytes per second, from the server", func(h, t int, b []byte) error { return pump(t, h, b) }, chunk, bulks},
	}
}

// BenchmarkOpen compares what a request, and a MiB, take on connections that are open. One thread is the client and the
// server, and what it does for their packets in the kernel counts as its own, so that the time is that of the processor
// and nothing else. The clients are a pod of the node and the node itself; the server is a pod.
func BenchmarkOpen(b *testing.B) {
	var variants []Variant
	processor := map[string]Series{}
	address := netip.AddrPortFrom(serviceAddr(0), servicePort)
	rows := func(bed *testbed.Bed) string {
		return fmt.Sprintf("pods %s\n", testbed.ClusterCIDRs()[0]) + forward("web", address, local(bed), "offcluster")
	}
	for _, c := range contenders() {
		for i := range openArenas {
			a := c.arenaFor(b, rows)
			to := address
			if c.plane == nil && c.ebpf == nil {
				to = local(a.bed)
			}
			for _, from := range []testbed.Place{clientPod, testbed.Node} {
				o := a.openAll(b, a.to(from, to))
				for _, t := range traffics() {
					name := nameOpen(from, t, c.name, i)
					variants = append(variants, Variant{name, func() ([]time.Duration, error) {
						took, cpu, err := o.slice(t)
						processor[name] = append(processor[name], cpu.Seconds())
						return took, err
					}})
				}
			}
		}
	}
	runtime.GC()
	samples, err := Interleave(variants, rounds(b, roundsOf(b, 150)))
	if err != nil {
		b.Fatal(err)
	}
	reportOpen(b, samples, processor)
}

// nameOpen names what is done in one arena.
func nameOpen(from testbed.Place, t traffic, contender string, arena int) string {
	return fmt.Sprint(from, t.name, contender, arena)
}

// allArenas are the figures of all arenas, by round.
func allArenas(from testbed.Place, t traffic, contender string, of func(name string) Series) (all Series) {
	for i := range openArenas {
		all = append(all, of(nameOpen(from, t, contender, i))...)
	}
	return all
}

func reportOpen(b *testing.B, samples Samples, processor map[string]Series) {
	b.Helper()
	head := []string{"on open connections"}
	for _, c := range contenders() {
		head = append(head, c.name)
	}
	rows := [][]string{head}
	for _, from := range []testbed.Place{clientPod, testbed.Node} {
		for _, t := range traffics() {
			wall := func(c string) Series {
				return allArenas(from, t, c, func(name string) Series { return samples.Series(name, 0.5) })
			}
			cpu := func(c string) Series {
				return allArenas(from, t, c, func(name string) Series { return processor[name] })
			}
			control, idle := wall(direct), cpu(direct)
			row := []string{fmt.Sprintf("%s: %s", from, t.name), show(control.Duration())}
			work := []string{fmt.Sprintf("%s: %s, processor time", from, t.name), show(idle.Duration())}
			for _, c := range contenders()[1:] {
				ratio := control.Ratio(wall(c.name)) // of rates: the inverse of that of times
				row = append(row, ratio.precise())
				work = append(work, cpu(c.name).Ratio(idle).precise())
				b.ReportMetric(ratio.Median, compact(fmt.Sprintf("%s:%s:%s", from, t.name, c.name)))
			}
			rows = append(rows, row, work)
		}
	}
	n := len(samples[nameOpen(clientPod, traffics()[0], direct, 0)])
	printTable(fmt.Sprintf("%d open connections in each of %d clusters: median of %d rounds; times of a request or a MiB, "+
		"rates and processor time as ratios to direct", openClients, openArenas, n), rows...)
}

// precise has a digit more.
func (r Ratio) precise() string { return fmt.Sprintf("%.3f (%.3f–%.3f)", r.Median, r.Low, r.High) }

// openConnections have both ends here.
type openConnections struct {
	client *client
	ends   [][2]int
}

func (a *arena) openAll(b *testing.B, c *client) *openConnections {
	b.Helper()
	o := &openConnections{client: c}
	b.Cleanup(func() {
		for _, e := range o.ends {
			unix.Close(e[0])
			unix.Close(e[1])
		}
	})
	err := a.bed.Do(c.place, func() error {
		if err := blockSignals(); err != nil {
			return err
		}
		for range openClients {
			here, there, err := c.open()
			if err != nil {
				return err
			}
			o.ends = append(o.ends, [2]int{here, there})
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	return o
}

// slice does something some times, on one connection after the other. It returns what each time took, and the mean of
// the processor time.
func (o *openConnections) slice(t traffic) (took []time.Duration, cpu time.Duration, err error) {
	buffer := make([]byte, t.size)
	err = o.client.bed.Do(o.client.place, func() error {
		if err := blockSignals(); err != nil {
			return err
		}
		heat := t.n / unheated
		var start time.Duration
		for i := range t.n + heat {
			if i == heat {
				start = threadTime()
			}
			e := o.ends[i%len(o.ends)]
			begin := time.Now()
			if err := t.do(e[0], e[1], buffer); err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
			took = append(took, time.Since(begin))
		}
		cpu = (threadTime() - start) / time.Duration(t.n)
		took = took[heat:]
		return nil
	})
	return took, cpu, err
}

func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0 // there is no such kernel
	}
	return time.Duration(t.Nano())
}

// request goes there, and its response comes back.
func request(here, there int, b []byte) error {
	return errors.Join(carry(here, there, b), carry(there, here, b))
}

// pump carries a MiB.
func pump(from, to int, b []byte) error {
	for range bulk / len(b) {
		if err := carry(from, to, b); err != nil {
			return err
		}
	}
	return nil
}

// carry writes b at one end, and reads as much at the other.
func carry(from, to int, b []byte) error {
	for written, read, begin := 0, 0, time.Now(); read < len(b); {
		if written < len(b) {
			n, err := unix.Write(from, b[written:])
			if err != nil && !errors.Is(err, unix.EAGAIN) {
				return fmt.Errorf("write: %w", err)
			}
			written += max(n, 0)
		}
		n, err := unix.Read(to, b[:len(b)-read])
		switch {
		case err == nil && n == 0:
			return errors.New("the connection has ended")
		case err == nil:
			read += n
		case !errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("read: %w", err)
		case time.Since(begin) > 5*time.Second:
			return errors.New("nothing arrives")
		}
	}
	return nil
}
