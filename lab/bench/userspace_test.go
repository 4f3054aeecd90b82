package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/dataplane/iptables"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

const (
	carried       = "userspace"
	shortInSlice  = 100
	atOnce        = 16 // clients in parallel
	eachAtOnce    = 40 // connections of each in a slice
	manyOpen      = 10_000
	deadEndpoints = 3 // of
	endpointsThen = 9
	clientWaits   = 10 * time.Second
)

// competitors are the data planes beside which the one stands that carries connections itself.
func competitors() []contender {
	packets := localhost.Wrap(conntrack.Wrap(nftables.New))
	legacy := iptables.New(iptables.Options{Backend: iptables.Legacy})
	return []contender{
		{name: direct},
		{name: directAgain},
		{name: "nftables", plane: packets},
		{name: "iptables", plane: localhost.Wrap(conntrack.Wrap(legacy))},
		{name: "ebpf", ebpf: &ebpf.Options{Packets: packets}},
		{name: carried},
	}
}

// stand is a cluster in which a contender serves one Service. The plane userspace is that of the program, so that its
// process has nothing else in it.
type stand struct {
	*arena
	program *daemon // nil: it is another plane
	address netip.AddrPort
}

func (c contender) stand(b *testing.B, program string, pods []testbed.PodSpec,
	endpoints func(*testbed.Bed) []netip.Addr,
) *stand {
	b.Helper()
	bed := testbed.Need(b, testbed.Spec{Pods: append(arenaPods(), pods...), Cgroup: c.ebpf != nil})
	s := &stand{arena: newArenaOn(b, bed), address: netip.AddrPortFrom(serviceAddr(0), servicePort)}
	f := fleet{services: 1, endpoints: func(int) []netip.Addr { return endpoints(bed) }}
	switch {
	case c.name == carried:
		s.program = &daemon{bed: bed, args: []string{
			program, "run", "--proxy-mode", carried, "--userspace-max-connections", fmt.Sprint(2 * manyOpen),
			"--manifests", f.manifests(b), "--hostname-override", string(testbed.Node),
			"--cluster-cidr", testbed.ClusterCIDRs()[0].String(), "--healthz-bind-address", healthz, "--control-socket", "",
		}}
		if _, err := s.program.start(context.WithoutCancel(b.Context())); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() {
			if err := s.program.stop(); err != nil {
				b.Error(err)
			}
		})
	case c.plane != nil || c.ebpf != nil:
		c.install(b, bed, f.state(b, newTable(b), bed).String())
	default:
		s.address = netip.AddrPortFrom(endpoints(bed)[0], podPort)
	}
	return s
}

func oneServer(bed *testbed.Bed) []netip.Addr { return []netip.Addr{local(bed).Addr()} }

// processorTime is what the threads of the process have used.
func (d *daemon) processorTime() (sum time.Duration, err error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", d.cmd.Process.Pid))
	for _, name := range threads {
		text, err := os.ReadFile(name)
		if err != nil {
			return 0, err
		}
		var used time.Duration
		if _, err := fmt.Sscan(string(text), &used); err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		sum += used
	}
	return sum, err
}

// measured takes the processor time of a slice: of the client, the server and all their packets, or, as they wait there,
// of the process that carries.
func (s *stand) measured(slice func() ([]time.Duration, time.Duration, error)) (took []time.Duration, cpu time.Duration,
	err error,
) {
	if s.program == nil {
		return slice()
	}
	before, err := s.program.processorTime()
	if err != nil {
		return nil, 0, err
	}
	if took, _, err = slice(); err != nil {
		return nil, 0, err
	}
	after, err := s.program.processorTime()
	return took, (after - before) / time.Duration(len(took)), err
}

// BenchmarkUserspace compares the plane userspace with the others: connections that are opened, used for one request, and
// closed; requests and much data on open ones; many clients at once.
func BenchmarkUserspace(b *testing.B) {
	program := buildDaemon(b)
	var variants []Variant
	processor := map[string]Series{}
	for _, c := range competitors() {
		s := c.stand(b, program, nil, oneServer)
		short := &openConnections{client: s.to(clientPod, s.address)}
		open, err := s.to(clientPod, s.address).openAll()
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(open.close)
		for _, t := range append(traffics(), traffic{shortOnes, nil, requestBytes, shortInSlice}) {
			name := t.name + c.name
			variants = append(variants, Variant{name, func() ([]time.Duration, error) {
				from := open
				if t.do == nil {
					from = short
				}
				took, cpu, err := s.measured(func() ([]time.Duration, time.Duration, error) { return from.sliceOf(t) })
				processor[name] = append(processor[name], cpu.Seconds())
				return took, err
			}})
		}
		many := c.stand(b, program, echoes()[:1], func(bed *testbed.Bed) []netip.Addr {
			return []netip.Addr{bed.Addr("echo-0", false)}
		})
		many.serveEcho(b, "echo-0", podPort)
		variants = append(variants, Variant{crowds + c.name, many.crowd(b)})
	}
	runtime.GC()
	samples, err := Interleave(variants, rounds(b, roundsOf(b, 30)))
	if err != nil {
		b.Fatal(err)
	}
	reportRivals(b, samples, processor)
}

const (
	shortOnes = "connections with one request, one after the other"
	crowds    = "the same, by 16 clients at once, per second"
)

// sliceOf is slice, and does short connections, too.
func (o *openConnections) sliceOf(t traffic) (took []time.Duration, cpu time.Duration, err error) {
	if t.do != nil {
		return o.slice(t)
	}
	buffer := make([]byte, t.size)
	err = o.client.bed.Do(o.client.place, func() error {
		if err := blockSignals(); err != nil {
			return err
		}
		start := threadTime()
		for range t.n {
			begin := time.Now()
			if err := o.client.exchange(buffer); err != nil {
				return err
			}
			took = append(took, time.Since(begin))
		}
		cpu = (threadTime() - start) / time.Duration(t.n)
		return nil
	})
	return took, cpu, err
}

// exchange opens a connection, has a request answered, and closes it.
func (c *client) exchange(buffer []byte) error {
	here, there, err := c.open()
	if err != nil {
		return err
	}
	defer unix.Close(there)
	defer unix.Close(here)
	err = unix.SetsockoptLinger(here, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{})
	return errors.Join(err, request(here, there, buffer))
}

// serveEcho has a pod answer each request of a connection with itself, at a port.
func (a *arena) serveEcho(b *testing.B, pod testbed.Place, port uint16) {
	b.Helper()
	var l net.Listener
	err := a.bed.Do(pod, func() (err error) {
		l, err = net.Listen("tcp4", fmt.Sprintf(":%d", port))
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buffer := make([]byte, requestBytes)
				for {
					if _, err := io.ReadFull(c, buffer); err != nil {
						return
					}
					if _, err := c.Write(buffer); err != nil {
						return
					}
				}
			}()
		}
	}()
}

// ask opens a connection from the client pod, has a request answered, and closes it.
func (s *stand) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, clientWaits)
	defer cancel()
	c, err := s.bed.Dial(ctx, clientPod, model.TCP, s.address)
	if err != nil {
		return err
	}
	defer c.Close()
	end, _ := ctx.Deadline()
	buffer := make([]byte, requestBytes)
	err = c.SetDeadline(end)
	if err == nil {
		_, err = c.Write(buffer)
	}
	if err == nil {
		_, err = io.ReadFull(c, buffer)
	}
	return err
}

// crowd is a slice of clients in parallel: the mean time of a connection, of all clients together.
func (s *stand) crowd(b *testing.B) func() ([]time.Duration, error) {
	return func() ([]time.Duration, error) {
		begin := time.Now()
		err := s.inParallel(b.Context(), eachAtOnce, func(err error, _ time.Duration) error { return err })
		return []time.Duration{time.Since(begin) / (atOnce * eachAtOnce)}, err
	}
}

// inParallel has clients make each some connections, and judge them.
func (s *stand) inParallel(ctx context.Context, each int, judge func(error, time.Duration) error) error {
	errs := make([]error, atOnce)
	var group sync.WaitGroup
	for i := range errs {
		group.Go(func() {
			for range each {
				begin := time.Now()
				errs[i] = errors.Join(errs[i], judge(s.ask(ctx), time.Since(begin)))
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

func reportRivals(b *testing.B, samples Samples, processor map[string]Series) {
	b.Helper()
	head := []string{"pod, TCP"}
	for _, c := range competitors() {
		head = append(head, c.name)
	}
	rows := [][]string{head}
	kinds := append(traffics(), traffic{name: shortOnes}, traffic{name: crowds})
	for _, t := range kinds {
		control := samples.Series(t.name+direct, 0.5)
		row := []string{t.name, show(control.Duration())}
		for _, c := range competitors()[1:] {
			ratio := control.Ratio(samples.Series(t.name+c.name, 0.5))
			row = append(row, ratio.String())
			b.ReportMetric(ratio.Median, compact(t.name+":"+c.name))
		}
		rows = append(rows, row)
		if t.name == crowds {
			continue
		}
		idle := processor[t.name+direct]
		work := []string{t.name + ", processor time; of userspace that of its process", show(idle.Duration())}
		for _, c := range competitors()[1:] {
			work = append(work, processor[t.name+c.name].Ratio(idle).String())
		}
		rows = append(rows, work)
	}
	printTable(fmt.Sprintf("median of %d rounds; times of one, rates and processor time as ratios to direct",
		len(samples[crowds+direct])), rows...)
}

// echoes are pods of which each answers requests, but the first ones.
func echoes() (pods []testbed.PodSpec) {
	for i := range endpointsThen {
		pods = append(pods, testbed.PodSpec{Name: fmt.Sprintf("echo-%d", i)})
	}
	return pods
}

// addressesOf are the pods' and, in the place of all but the first of those that are dead, unused addresses.
func addressesOf(dead int) func(*testbed.Bed) []netip.Addr {
	return func(bed *testbed.Bed) (addrs []netip.Addr) {
		for i, p := range echoes() {
			a := bed.Addr(testbed.Place(p.Name), false)
			if 0 < i && i < dead {
				a = nth(testbed.PodCIDRs(testbed.NodeB)[0].Addr(), 200+i)
			}
			addrs = append(addrs, a)
		}
		return addrs
	}
}

// BenchmarkUserspaceDead counts what clients notice of endpoints that are dead: a third of all, of which one refuses connections
// and the others are silent.
func BenchmarkUserspaceDead(b *testing.B) {
	program := buildDaemon(b)
	rows := [][]string{{"a third of the endpoints is dead", "connections", "failed", "longest that succeeded", "median"}}
	for _, c := range competitors()[2:] {
		s := c.stand(b, program, echoes(), addressesOf(deadEndpoints))
		for i := 1; i < deadEndpoints; i++ {
			command(b, s.bed, testbed.NodeB, "ip", "route", "add", "blackhole", addressesOf(deadEndpoints)(s.bed)[i].String())
		}
		for i := deadEndpoints; i < endpointsThen; i++ {
			s.serveEcho(b, testbed.Place(echoes()[i].Name), podPort)
		}
		var mu sync.Mutex
		var took []time.Duration
		failed := 0
		_ = s.inParallel(b.Context(), eachAtOnce, func(err error, d time.Duration) error {
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed++
			} else {
				took = append(took, d)
			}
			return nil
		})
		slices.Sort(took)
		rows = append(rows, []string{c.name, fmt.Sprint(atOnce * eachAtOnce), fmt.Sprint(failed),
			show(took[len(took)-1]), show(took[len(took)/2])})
		b.ReportMetric(float64(failed), "failed:"+c.name)
	}
	printTable(fmt.Sprintf("%d clients at once, each of which waits %s for its connection and %s for an answer",
		atOnce, testbed.DefaultTimeout, clientWaits), rows...)
}

// BenchmarkUserspaceIdle opens many connections, and tells what they take while they are idle. The kernel memory
// includes that of the client and the server. Where the machine allows too few files it runs in the test kernel.
func BenchmarkUserspaceIdle(b *testing.B) {
	program := buildDaemon(b)
	n, err := moreFiles()
	if err != nil {
		b.Fatal(err)
	}
	if n < manyOpen {
		b.Setenv(daemonVariable, program)
		runInTestKernel(b, fmt.Sprintf("this process may open files for %d connections only", n))
		return
	}
	rows := [][]string{{fmt.Sprintf("%d open connections", n), "kernel, for each", "process, for each", "files, for each",
		"opened in"}}
	for _, c := range competitors() {
		if c.name == directAgain {
			continue
		}
		s := c.stand(b, program, nil, oneServer)
		begun, kernel, process, files := time.Now(), kernelObjects(b), s.program.figure(b, "VmRSS"), s.program.files(b)
		end := s.openMany(b, n)
		took := time.Since(begun)
		letPass(settleTime)
		per := func(after, before float64) string { return fmt.Sprintf("%.1f kB", (after-before)/float64(n)/1000) }
		rows = append(rows, []string{c.name, per(kernelObjects(b), kernel), per(s.program.figure(b, "VmRSS"), process),
			fmt.Sprintf("%.2f", float64(s.program.files(b)-files)/float64(n)), show(took)})
		end()
	}
	printTable("what is idle", rows...)
}

// moreFiles lets this process and those it starts open as many files as manyOpen needs, two for each, or as many as it may.
// It tells for how many that is.
func moreFiles() (connections int, err error) {
	const others = 2000
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, err
	}
	if want := uint64(2*manyOpen + others); limit.Max < want {
		if unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: want, Max: want}) == nil {
			limit.Max = want
		}
	}
	return min(manyOpen, int(limit.Max-others)/2), nil
}

// openMany opens connections until end is called.
func (s *stand) openMany(b *testing.B, n int) (end func()) {
	b.Helper()
	var ends []int
	end = func() {
		for _, fd := range ends {
			unix.Close(fd)
		}
	}
	c := s.to(clientPod, s.address)
	err := s.bed.Do(clientPod, func() error {
		if err := blockSignals(); err != nil {
			return err
		}
		for range n {
			here, there, err := c.open()
			if err != nil {
				return err
			}
			ends = append(ends, here, there)
		}
		return nil
	})
	if err != nil {
		end()
		b.Fatal(err)
	}
	return end
}

// figure is one of memory; nil has none.
func (d *daemon) figure(b *testing.B, name string) float64 {
	b.Helper()
	if d == nil {
		return 0
	}
	m, err := d.memory()
	if err != nil {
		b.Fatal(err)
	}
	return m[name]
}

// files is how many the process has open.
func (d *daemon) files(b *testing.B) int {
	b.Helper()
	if d == nil {
		return 0
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.cmd.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	return len(entries)
}

// kernelObjects is the memory of all objects that the kernel has.
func kernelObjects(b *testing.B) (bytes float64) {
	b.Helper()
	text, err := os.ReadFile("/proc/slabinfo")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var name string
		var active, all, size float64
		if n, _ := fmt.Sscan(line, &name, &active, &all, &size); n == 4 {
			bytes += active * size
		}
	}
	return bytes
}
