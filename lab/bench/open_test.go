package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

const (
	openClients  = 8 // connections that are used in turn
	openArenas   = 3
	openSlices   = 4       // of each contender, client and traffic in a round
	requests     = 600     // in a slice
	requestBytes = 128     // of a request, and of its response
	chunk        = 1 << 16 // bytes of a write
	bulk         = 1 << 20 // bytes of which the time is taken
	bulks        = 40      // in a slice
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

// BenchmarkOpen compares the costs of requests, and of data, on open connections. One thread is the client and the
// server, and the kernel's work for their packets counts as its own. So the time is that of the processor and nothing
// else. Requests are compared as users have them, too: the client and the server have a thread each, which wake each
// other. The clients are a pod of the node and the node itself; the server is a pod.
//
// Whether a cluster of namespaces got good memory is worth some percent. So contenders come and go in turn in one and
// the same cluster, and those of a round are compared; the next round is in another one.
func BenchmarkOpen(b *testing.B) {
	var arenas []*arena
	for range openArenas {
		arenas = append(arenas, newWideArena(b))
	}
	reportOpen(b, inTurn(b, contenders(), arenas, 60, contender.measureOpen))
}

// inTurn has contenders measured in rounds, in random order: those of a round in the same cluster, the next round in
// another one.
func inTurn(b *testing.B, order []contender, arenas []*arena, atLeast int,
	measure func(contender, *testing.B, *arena, map[string]Series),
) map[string]Series {
	b.Helper()
	figures := map[string]Series{}
	next := rounds(b, roundsOf(b, atLeast))
	runtime.GC()
	for i := 0; next(); i++ {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, c := range order {
			measure(c, b, arenas[i%len(arenas)], figures)
		}
	}
	return figures
}

// measureOpen has a contender serve for a moment, and adds what clients see to the figures.
func (c contender) measureOpen(b *testing.B, a *arena, figures map[string]Series) {
	b.Helper()
	to := netip.AddrPortFrom(serviceAddr(0), servicePort)
	rows := fmt.Sprintf("pods %s\n", testbed.ClusterCIDRs()[0]) + forward("web", to, local(a.bed), "offcluster")
	end := c.serve(b, a.bed, rows)
	defer end()
	if c.plane == nil && c.ebpf == nil {
		to = local(a.bed)
	}
	for _, from := range []testbed.Place{clientPod, testbed.Node} {
		if err := a.to(from, to).measureOpen(c.name, figures); err != nil {
			b.Error(err)
			b.FailNow()
		}
	}
}

func (c *client) measureOpen(contender string, figures map[string]Series) error {
	two, err := c.openCouple()
	if err != nil {
		return err
	}
	defer two.close()
	one, err := c.openAll()
	if err != nil {
		return err
	}
	defer one.close()
	times := map[string][]time.Duration{}
	for range openSlices {
		took, err := two.slice()
		if err != nil {
			return err
		}
		times[betweenTwo] = append(times[betweenTwo], took...)
		for _, t := range traffics() {
			took, cpu, err := one.slice(t)
			if err != nil {
				return err
			}
			times[t.name] = append(times[t.name], took...)
			times[t.name+ofProcessor] = append(times[t.name+ofProcessor], cpu)
		}
	}
	for kind, took := range times {
		slices.Sort(took)
		name := nameOpen(c.place, kind, contender)
		figures[name] = append(figures[name], took[len(took)/2].Seconds())
	}
	return nil
}

const ofProcessor = ", processor time"

// nameOpen names a figure.
func nameOpen(from testbed.Place, traffic, contender string) string {
	return fmt.Sprint(from, traffic, contender)
}

func reportOpen(b *testing.B, figures map[string]Series) {
	b.Helper()
	head := []string{"on open connections"}
	for _, c := range contenders() {
		head = append(head, c.name)
	}
	rows := [][]string{head}
	kinds := []string{betweenTwo}
	for _, t := range traffics() {
		kinds = append(kinds, t.name, t.name+ofProcessor)
	}
	for _, from := range []testbed.Place{clientPod, testbed.Node} {
		for _, kind := range kinds {
			control := figures[nameOpen(from, kind, direct)]
			row := []string{fmt.Sprintf("%s: %s", from, kind), show(control.Duration())}
			for _, c := range contenders()[1:] {
				of := figures[nameOpen(from, kind, c.name)]
				ratio := control.Ratio(of) // of rates: the inverse of that of times
				if strings.HasSuffix(kind, ofProcessor) {
					ratio = of.Ratio(control)
				}
				row = append(row, ratio.precise())
				b.ReportMetric(ratio.Median, compact(fmt.Sprintf("%s:%s:%s", from, kind, c.name)))
			}
			rows = append(rows, row)
		}
	}
	n := len(figures[nameOpen(clientPod, betweenTwo, direct)])
	printTable(fmt.Sprintf("%d open connections, all contenders in turn in one cluster, %d rounds in %d clusters: "+
		"medians; times of a request or a MiB, rates and processor time as ratios to direct", openClients, n, openArenas), rows...)
}

// precise has a digit more.
func (r Ratio) precise() string { return fmt.Sprintf("%.3f (%.3f–%.3f)", r.Median, r.Low, r.High) }

// openConnections have both ends here.
type openConnections struct {
	client *client
	ends   [][2]int
}

func (c *client) openAll() (*openConnections, error) {
	o := &openConnections{client: c}
	err := c.bed.Do(c.place, func() error {
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
		o.close()
		return nil, err
	}
	return o, nil
}

func (o *openConnections) close() {
	for _, e := range o.ends {
		unix.Close(e[0])
		unix.Close(e[1])
	}
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
