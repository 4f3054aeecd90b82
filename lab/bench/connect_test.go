package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// A slice opens batches of connections; the first one warms up and does not count. A batch fits into the backlog of a
// server (and its datagrams into the buffer). The server takes it when the batch is over: while the client measures, it
// has the processor for itself.
const (
	perBatch = 100
	batches  = 10
)

// servers are the pods to which all Services of this benchmark lead.
const serverPods = 2

// arena is a virtual cluster with raw servers.
type arena struct {
	bed      *testbed.Bed
	tcp, udp []int           // sockets of the servers
	track    *netlink.Handle // to the node's connection tracking
}

// newArena makes a cluster whose node has a proxy with n Services, or none at all.
func newArena(b *testing.B, n int) *arena {
	b.Helper()
	a := newArenaOn(b, testbed.Need(b, testbed.Spec{Pods: arenaPods()}))
	if n > 0 {
		a.fleet(n).install(b, a.bed)
	}
	return a
}

// fleet are n Services of these servers.
func (a *arena) fleet(n int) fleet { return fleet{n, func(int) []netip.Addr { return a.pods() }, true} }

func arenaPods() []testbed.PodSpec {
	pods := []testbed.PodSpec{{Name: "client"}}
	for i := range serverPods {
		pods = append(pods, testbed.PodSpec{Name: serverPod(i)})
	}
	return pods
}

// newArenaOn has arenaPods serve on a node without a proxy.
func newArenaOn(b *testing.B, bed *testbed.Bed) *arena {
	b.Helper()
	a := &arena{bed: bed}
	b.Cleanup(a.close)
	for i := range serverPods {
		if err := a.bed.Do(testbed.Place(serverPod(i)), a.listen); err != nil {
			b.Fatal(err)
		}
	}
	err := a.bed.Do(testbed.Node, func() (err error) {
		a.track, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return a
}

func serverPod(i int) string { return fmt.Sprintf("server-%d", i) }

// pods are the IPv4 addresses of the servers.
func (a *arena) pods() (addrs []netip.Addr) {
	for i := range serverPods {
		addrs = append(addrs, a.bed.Addr(testbed.Place(serverPod(i)), false))
	}
	return addrs
}

// listen opens a pod's servers: dual-stack sockets.
func (a *arena) listen() error {
	any6 := &unix.SockaddrInet6{Port: podPort}
	tcp, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	a.tcp = append(a.tcp, tcp)
	udp, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	a.udp = append(a.udp, udp)
	return errors.Join(unix.Bind(tcp, any6), unix.Listen(tcp, perBatch), unix.Bind(udp, any6))
}

func (a *arena) close() {
	for _, fd := range append(a.tcp, a.udp...) {
		unix.Close(fd)
	}
	if a.track != nil {
		a.track.Close()
	}
}

// client opens connections in an arena.
type client struct {
	*arena
	name     string
	place    testbed.Place
	protocol model.Protocol
	v6       bool
	targets  []unix.RawSockaddrInet6 // in which an IPv4 one fits
	size     uintptr                 // of a target
	bind     func(fd int) error      // chooses the source; nil: the kernel does
	next     int
	stints   []stint // of the batches of shortConnections
}

// client connects to the first n Services in turn, or to the pods.
func (a *arena) client(c client, n int) *client {
	c.arena, c.size = a, unix.SizeofSockaddrInet4
	if c.v6 {
		c.size = unix.SizeofSockaddrInet6
	}
	for i := range n {
		c.targets = append(c.targets, rawSockaddr(c.family(serviceAddr(i)), servicePort))
	}
	if n == 0 {
		for _, pod := range a.pods() {
			c.targets = append(c.targets, rawSockaddr(c.family(pod), podPort))
		}
	}
	rand.Shuffle(len(c.targets), func(i, j int) { c.targets[i], c.targets[j] = c.targets[j], c.targets[i] })
	return &c
}

func (c *client) family(a netip.Addr) netip.Addr {
	if c.v6 {
		return testbed.EmbedV6(a)
	}
	return a
}

func rawSockaddr(a netip.Addr, port uint16) (raw unix.RawSockaddrInet6) {
	port = port<<8 | port>>8
	if a.Is6() {
		return unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: port, Addr: a.As16()}
	}
	*(*unix.RawSockaddrInet4)(unsafe.Pointer(&raw)) = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port, Addr: a.As4()}
	return raw
}

// slice opens connections, and then has the node forget them.
func (c *client) slice() (took []time.Duration, err error) {
	err = c.bed.Do(c.place, func() (err error) {
		if err := blockSignals(); err != nil {
			return err
		}
		for n := 0; n <= batches && err == nil; n++ {
			err = c.batch(&took)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return took[perBatch:], c.track.ConntrackTableFlush(netlink.ConntrackTable)
}

// blockSignals keeps the runtime's own signals from interrupting connect.
func blockSignals() error {
	err := unix.PthreadSigmask(unix.SIG_BLOCK, &unix.Sigset_t{Val: [16]uint64{^uint64(0)}}, nil)
	return os.NewSyscallError("sigmask", err)
}

func (c *client) batch(took *[]time.Duration) error {
	for range perBatch {
		d, err := c.connect(&c.targets[c.next])
		if err != nil {
			return err
		}
		*took = append(*took, d)
		c.next = (c.next + 1) % len(c.targets)
	}
	if n := c.drain(); n != perBatch {
		return fmt.Errorf("%d of %d connections arrived", n, perBatch)
	}
	return nil
}

// connect opens one TCP connection and resets it, or sends the first datagram of a UDP flow.
func (c *client) connect(to *unix.RawSockaddrInet6) (took time.Duration, err error) {
	fd, err := c.socket(to)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return c.dial(fd, to)
}

func (c *client) socket(to *unix.RawSockaddrInet6) (fd int, err error) {
	kind := unix.SOCK_STREAM
	if c.protocol == model.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err = unix.Socket(int(to.Family), kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 5}))
	if err == nil && c.bind != nil {
		err = c.bind(fd)
	}
	if err != nil {
		unix.Close(fd)
		return 0, fmt.Errorf("prepare a socket: %w", err)
	}
	return fd, nil
}

// dial returns what connect or sendto took; the kernel carries the packets through all namespaces within
// these calls.
func (c *client) dial(fd int, to *unix.RawSockaddrInet6) (took time.Duration, err error) {
	var errno unix.Errno
	start := time.Now()
	if c.protocol == model.UDP {
		_, _, errno = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), 0, 0, 0, uintptr(unsafe.Pointer(to)), c.size)
	} else {
		_, _, errno = unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(to)), c.size)
	}
	took = time.Since(start)
	if errno != 0 {
		return 0, fmt.Errorf("connect: %w", errno)
	}
	return took, nil
}

// drain takes what has arrived at the servers and counts it.
func (a *arena) drain() (n int) {
	for _, fd := range a.tcp {
		for {
			conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			if err != nil {
				break
			}
			unix.Close(conn)
			n++
		}
	}
	for _, fd := range a.udp {
		for {
			if _, _, err := unix.Recvfrom(fd, nil, 0); err != nil {
				break
			}
			n++
		}
	}
	return n
}

// clients are the ways in which connections are opened.
func clients() []client {
	return []client{
		{name: "pod, TCP", place: "client", protocol: model.TCP},
		{name: "node, TCP", place: testbed.Node, protocol: model.TCP},
		{name: "pod, TCP over IPv6", place: "client", protocol: model.TCP, v6: true},
		{name: "pod, UDP", place: "client", protocol: model.UDP},
	}
}

// BenchmarkConnect compares what it takes to connect through a Service with connecting to its pods
// on a node without any rules. All the clusters exist at the same time.
func BenchmarkConnect(b *testing.B) {
	const few, many = 100, 50_000
	bare, again := newArena(b, 0), newArena(b, 0)
	arenas := map[int]*arena{}
	for _, n := range []int{few, 1000, 10_000, many} {
		arenas[n] = newArena(b, n)
	}
	columns := []column{
		{direct, bare, 0},
		{"direct again (A/A)", again, 0},
		{"direct, beside 50,000 Services", arenas[many], 0},
		{staticRule, newStaticArena(b), 1},
		{"one of 100 Services", arenas[few], 1},
		{"one of 50,000", arenas[many], 1},
		{"each of 100", arenas[few], few},
		{"each of 1,000", arenas[1000], 1000},
		{"each of 10,000", arenas[10_000], 10_000},
		{"each of 50,000", arenas[many], many},
	}
	compareConnects(b, columns)
}

// staticRule is the name of the contender without a proxy, whose connections a rule without any lookup translates. No
// plane that leaves translation to connection tracking can cost less.
const staticRule = "one static rule"

// newStaticArena makes a cluster in which such rules lead from the first Service to a pod.
func newStaticArena(b *testing.B) *arena {
	b.Helper()
	a := newArena(b, 0)
	for family, v6 := range map[string]bool{"ip": false, "ip6": true} {
		to := netip.AddrPortFrom(a.bed.Addr(testbed.Place(serverPod(0)), v6), podPort)
		service := serviceAddr(0)
		if v6 {
			service = testbed.EmbedV6(service)
		}
		rule := fmt.Sprintf("%s daddr %s meta l4proto { tcp, udp } th dport %d dnat to %s;", family, service, servicePort, to)
		command(b, a.bed, testbed.Node, "nft", fmt.Sprintf(`table %s static {
			chain prerouting { type nat hook prerouting priority -100; %s }
			chain output { type nat hook output priority -100; %[2]s }
			chain postrouting { type nat hook postrouting priority 100; }
		}`, family, rule))
	}
	return a
}

// column is what clients of each kind connect to.
type column struct {
	name  string
	arena *arena
	of    int // how many Services are used, in turn; 0: the pods
}

// compareConnects interleaves them. One of them is the control.
func compareConnects(b *testing.B, columns []column) {
	b.Helper()
	var variants []Variant
	var names []string
	for _, c := range columns {
		names = append(names, c.name)
		for _, kind := range clients() {
			variants = append(variants, Variant{kind.name + c.name, c.arena.client(kind, c.of).slice})
		}
	}
	runtime.GC()
	samples, err := Interleave(variants, rounds(b, 30))
	if err != nil {
		b.Fatal(err)
	}
	reportConnect(b, names, samples)
}

// direct is the name of the control.
const direct = "direct"

func reportConnect(b *testing.B, columns []string, samples Samples) {
	b.Helper()
	for _, control := range []string{direct, staticRule, idlePrograms} {
		if !slices.Contains(columns, control) {
			continue
		}
		rows := [][]string{slices.Concat([]string{"client", control}, without(columns, control))}
		for _, kind := range clients() {
			own := samples.Series(kind.name+control, 0.5)
			row := []string{kind.name, show(own.Duration())}
			for _, column := range without(columns, control) {
				ratio := samples.Series(kind.name+column, 0.5).Ratio(own)
				row = append(row, ratio.String())
				b.ReportMetric(ratio.Median, compact(kind.name+":"+column+"/"+control))
			}
			rows = append(rows, row)
		}
		title := "connect(), or sendto() of a flow's first datagram: median of %d rounds of %d each; ratios to %s"
		printTable(fmt.Sprintf(title, len(samples[clients()[0].name+control]), batches*perBatch, control), rows...)
	}
}

func without(all []string, one string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(s string) bool { return s == one })
}
