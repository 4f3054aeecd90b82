package ebpf_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	bpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

const dns = `
backend default/web:dns cluster 10.244.1.11:5353 local
backend default/web:dns cluster 10.244.1.12:5353 local
backend default/web:dns cluster6 [fd00::af4:10b]:5353 local
frontend 10.96.0.10:53/udp any forward default/web:dns cluster snat offcluster
frontend 10.96.0.11:53/udp any forward default/web:dns cluster snat offcluster
frontend [fd00::a60:a]:53/udp any forward default/web:dns cluster6 snat offcluster
pods 10.244.0.0/16
pods fd00::af4:0/112
`

// ask sends a datagram by a socket that is not connected, and returns who answers and what address it has to the
// receiver.
func ask(conn *net.UDPConn, to string) (string, error) {
	if _, err := conn.WriteToUDPAddrPort([]byte("?\n"), netip.MustParseAddrPort(to)); err != nil {
		return "", err
	}
	if err := conn.SetReadDeadline(time.Now().Add(eventually.Patience())); err != nil {
		return "", err
	}
	answer := make([]byte, 128)
	n, from, err := conn.ReadFromUDPAddrPort(answer)
	if err != nil {
		return "", err
	}
	name, _, _ := strings.Cut(string(answer[:n]), " ")
	return fmt.Sprintf("%s from %s", name, netip.AddrPortFrom(from.Addr().Unmap(), from.Port())), nil
}

// listen opens a UDP socket in a place.
func (c cluster) listen(from testbed.Place, network string) *net.UDPConn {
	c.t.Helper()
	var conn *net.UDPConn
	check(c.t, c.Do(from, func() (err error) {
		conn, err = net.ListenUDP(network, nil)
		return err
	}))
	c.t.Cleanup(func() { conn.Close() })
	return conn
}

// A socket that is not connected gets all its answers from the address that it asked, and keeps its backend until that
// leaves. A socket of IPv6 may ask addresses of both families.
func TestDatagrams(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	before := parse(t, dns)
	check(t, p.Sync(t.Context(), before))
	for _, network := range []string{"udp4", "udp"} {
		conn := c.listen("client", network)
		first := map[string]string{}
		for _, service := range []string{"10.96.0.10:53", "10.96.0.11:53"} {
			for i := range 20 {
				answer, err := ask(conn, service)
				check(t, err)
				if i == 0 {
					first[service] = answer
				}
				if answer != first[service] || !strings.HasSuffix(answer, " from "+service) {
					t.Fatalf("%s, then %s; asked was %s", first[service], answer, service)
				}
			}
		}
		if network == "udp" {
			answer, err := ask(conn, "[fd00::a60:a]:53")
			check(t, err)
			if answer != "pod-a from [fd00::a60:a]:53" {
				t.Error(answer)
			}
		}
		gone, _, _ := strings.Cut(first["10.96.0.10:53"], " ")
		stays := map[string]string{"pod-a": "pod-b", "pod-b": "pod-a"}[gone]
		addr := map[string]string{"pod-a": "10.244.1.11", "pod-b": "10.244.1.12"}[gone]
		after := parse(t, strings.Replace(dns, "backend default/web:dns cluster "+addr+":5353 local\n", "", 1))
		check(t, p.Apply(t.Context(), after, model.Diff(before, after)))
		answer, err := ask(conn, "10.96.0.10:53")
		check(t, err)
		if answer != stays+" from 10.96.0.10:53" {
			t.Errorf("%s has left, and %s", gone, answer)
		}
		check(t, p.Apply(t.Context(), before, model.Diff(after, before)))
	}
}

// Answers come from whom a socket has asked last, of two Services with one backend and that itself. The socket has a place
// as long as it asks one of them alone, or none.
func TestDatagrams_names(t *testing.T) {
	const one, two, pod = "10.96.0.10:53", "10.96.0.11:53", "10.244.1.11:5353"
	for name, taken := range map[string]bool{"place": false, "no place": true} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			p := c.openSized(ebpf.Sizes{Sockets: 1})
			defer p.Close()
			check(t, p.Sync(t.Context(), parse(t, strings.Replace(dns, "backend default/web:dns cluster 10.244.1.12:5353 local\n", "", 1))))
			c.t = t
			if taken {
				_, err := ask(c.listen("client", "udp4"), one)
				check(t, err)
			}
			for _, asked := range [][]string{
				{one, one, two, one, two, two, pod, one, one, pod, pod, two},
				{pod, one, pod, one, one, two},
				{one, pod, one},
			} {
				conn := c.listen("client", "udp4")
				for i, to := range asked {
					if answer, err := ask(conn, to); err != nil || answer != "pod-a from "+to {
						t.Errorf("%v: %q, %v", asked[:i+1], answer, err)
					}
				}
				c.expectPlaces("asked", 1)
				check(t, conn.Close())
				if !taken {
					c.expectPlaces("is closed", 0)
				}
			}
		})
	}
}

// openSized is open for a plane that remembers other numbers of clients and sockets.
func (c cluster) openSized(sizes ebpf.Sizes) (p dataplane.Dataplane) {
	c.t.Helper()
	return c.openAs(ebpf.Options{Sizes: sizes})
}

// A connected UDP socket is aborted when its backend leaves, others are not.
func TestRelease(t *testing.T) {
	for name, sockets := range map[string]uint32{"places": 0, "one place": 1} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			p := c.openSized(ebpf.Sizes{Sockets: sockets})
			defer p.Close()
			c.released(p)
		})
	}
}

func (c cluster) released(p dataplane.Dataplane) {
	t := c.t
	before := parse(t, strings.Replace(dns, "backend default/web:dns cluster 10.244.1.12:5353 local\n", "", 1))
	check(t, p.Sync(t.Context(), before))
	dial := func(to string) net.Conn {
		conn, err := c.Dial(t.Context(), "client", model.UDP, netip.MustParseAddrPort(to))
		check(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	ask := func(conn net.Conn) (string, error) {
		if _, err := conn.Write([]byte("?\n")); err != nil {
			return "", err
		}
		if err := conn.SetReadDeadline(time.Now().Add(eventually.Patience())); err != nil {
			return "", err
		}
		answer := make([]byte, 128)
		n, err := conn.Read(answer)
		name, _, _ := strings.Cut(string(answer[:n]), " ")
		return name, err
	}
	service, six, direct := dial("10.96.0.10:53"), dial("[fd00::a60:a]:53"), dial("10.244.1.11:5353")
	for _, conn := range []net.Conn{service, six, direct} {
		if name, err := ask(conn); name != "pod-a" {
			t.Fatal(name, err)
		}
	}
	after := parse(t, strings.Replace(dns, "backend default/web:dns cluster 10.244.1.11:5353 local\n", "", 1))
	check(t, p.Apply(t.Context(), after, model.Diff(before, after)))
	if name, err := ask(service); !errors.Is(err, unix.EDESTADDRREQ) {
		t.Errorf("the backend has left, and %q answers (%v)", name, err)
	}
	for _, conn := range []net.Conn{six, direct} {
		if name, err := ask(conn); name != "pod-a" {
			t.Errorf("%s has lost nothing, but %q answers (%v)", conn.RemoteAddr(), name, err)
		}
	}
	if name, err := ask(dial("10.96.0.10:53")); name != "pod-b" {
		t.Error(name, err)
	}
}

// Audit aborts a socket whose connect() was going on when its backend left. This one is in a namespace that the plane did
// not see then.
func TestRelease_late(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	before := parse(t, strings.Replace(dns, "backend default/web:dns cluster 10.244.1.12:5353 local\n", "", 1))
	check(t, p.Sync(t.Context(), before))
	conn, enter := c.dialUnseen("10.244.1.11/32", "10.96.0.10:53")
	after := parse(t, strings.Replace(dns, "backend default/web:dns cluster 10.244.1.11:5353 local\n", "", 1))
	check(t, p.Apply(t.Context(), after, model.Diff(before, after)))
	if !isConnected(t, conn) {
		t.Fatal("the namespace is seen")
	}
	check(t, enter(func() error {
		_, err := p.Audit(t.Context(), after, dataplane.Quick)
		return err
	}))
	if isConnected(t, conn) {
		t.Error("the socket stays with a backend that has left")
	}
}

// dialUnseen connects a socket in a namespace of its own, which has an address and no thread but for those of enter.
func (c cluster) dialUnseen(addr, to string) (conn *net.UDPConn, enter func(f func() error) error) {
	t := c.t
	t.Helper()
	var space *os.File
	var thread int
	check(t, c.Do("client", func() (err error) {
		thread = unix.Gettid()
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if space, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}
		a, err := netlink.ParseAddr(addr)
		if err == nil {
			err = errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, a))
		}
		if err == nil {
			conn, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
		}
		return err
	}))
	t.Cleanup(func() { conn.Close(); space.Close() })
	eventually.True(t, "the thread has ended", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", thread))
		return errors.Is(err, os.ErrNotExist)
	})
	return conn, func(f func() error) error {
		return c.Do("client", func() error {
			err := unix.Setns(int(space.Fd()), unix.CLONE_NEWNET)
			if err == nil {
				done := make(chan error)
				go func() { done <- f() }() // elsewhere
				err = <-done
			}
			return err
		})
	}
}

func isConnected(t *testing.T, conn *net.UDPConn) bool {
	t.Helper()
	raw, err := conn.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) { _, err = unix.Getpeername(int(fd)) }))
	return err == nil
}

// Sockets without a place may be in any namespace. A release of UDP sockets does not look for those of TCP.
func TestRelease_anywhere(t *testing.T) {
	c := newCluster(t)
	p := c.openSized(ebpf.Sizes{Sockets: 1})
	defer p.Close()
	check(t, p.Sync(t.Context(), parse(t, web)))
	gone := parse(t, fromPods)
	for _, kind := range []struct {
		protocol model.Protocol
		to       string
		anywhere bool
	}{{model.TCP, "10.96.0.10:80", false}, {model.UDP, "10.96.0.10:53", true}} {
		for range 2 { // the first has the place
			conn, err := c.Dial(t.Context(), "client", kind.protocol, netip.MustParseAddrPort(kind.to))
			check(t, err)
			defer conn.Close()
		}
		if anywhere, err := ebpf.LooksAnywhere(p, gone); err != nil || anywhere != kind.anywhere {
			t.Errorf("after a socket of %s the bereft may be anywhere: %t, %v", kind.protocol, anywhere, err)
		}
	}
}

// Sockets whose namespace cannot be reached keep a backend that is gone. The plane says so.
func TestRelease_unreached(t *testing.T) {
	c := newCluster(t)
	var said bytes.Buffer
	p := c.openWith(dataplane.Config{Log: slog.New(slog.NewTextHandler(&said, nil))}, ebpf.Options{
		Sizes: ebpf.Sizes{Sockets: 1},
	})
	defer p.Close()
	if _, known := c.netnsCookie("client"); !known { // nor does the plane know which it has not reached
		return
	}
	before, after := parse(t, web), parse(t, fromPods)
	check(t, p.Sync(t.Context(), before))
	conn, err := c.Dial(t.Context(), "client", model.UDP, netip.MustParseAddrPort("10.96.0.10:53"))
	check(t, err)
	defer conn.Close()
	sockets := c.openMemory("sockets")
	defer sockets.Close()
	at, err := sockets.LookupBytes(uint32(0))
	check(t, err)
	binary.NativeEndian.PutUint64(at[unsafe.Offsetof(place{}.Netns):], 1<<40)
	check(t, sockets.Put(uint32(0), at))
	check(t, p.Apply(t.Context(), after, model.Diff(before, after)))
	if !strings.Contains(said.String(), "network namespaces are not found in /run/netns") {
		t.Errorf("the plane says:\n%s", &said)
	}
}

// If it is wanted, a TCP connection is aborted when its backend has left, and neither when that drains nor if it did not
// come by a Service. A namespace in which no process lives is reached as well.
func TestRelease_TCP(t *testing.T) {
	for name, sockets := range map[string]uint32{"places": 0, "one place": 1} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			p := c.openAs(ebpf.Options{ReleaseTCP: true, Sizes: ebpf.Sizes{Sockets: sockets}})
			defer p.Close()
			c.releasedTCP(p)
		})
	}
}

func (c cluster) releasedTCP(p dataplane.Dataplane) {
	t := c.t
	state := func(backend string) *model.State {
		return parse(t, "pods 10.244.0.0/16\nfrontend 10.96.0.1:80/tcp any forward default/a: cluster snat offcluster\n"+
			"backend default/a: cluster 10.244.1.12:8080 local\n"+backend)
	}
	only := parse(t, strings.Replace(state("backend default/a: cluster 10.244.1.11:8080 local\n").String(),
		"backend default/a: cluster 10.244.1.12:8080 local\n", "", 1))
	check(t, p.Sync(t.Context(), only))
	var conns []net.Conn
	for _, to := range []string{"10.96.0.1:80", "10.96.0.1:80", "10.244.1.11:8080"} {
		conn, err := c.Dial(t.Context(), "client", model.TCP, netip.MustParseAddrPort(to))
		check(t, err)
		t.Cleanup(func() { conn.Close() })
		conns = append(conns, conn)
	}
	lives := func(conn net.Conn) error {
		_, err := conn.Write([]byte("?\n"))
		if err == nil {
			err = conn.SetReadDeadline(time.Now().Add(eventually.Patience()))
		}
		if err == nil {
			_, err = conn.Read(make([]byte, 128))
		}
		return err
	}
	have := only
	for _, step := range []struct {
		backend string
		aborted bool
	}{
		{"backend default/a: cluster 10.244.1.11:8080 local\n", false},
		{"backend default/a: cluster 10.244.1.11:8080 local weight 0\n", false},
		{"", true},
	} {
		want := state(step.backend)
		check(t, p.Apply(t.Context(), want, model.Diff(have, want)))
		have = want
		for i, conn := range conns {
			var aborted unix.Errno
			raw, err := conn.(*net.TCPConn).SyscallConn()
			check(t, err)
			check(t, raw.Control(func(fd uintptr) {
				code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
				check(t, err)
				aborted = unix.Errno(code)
			}))
			if want := step.aborted && i < 2; want != (aborted == unix.ECONNABORTED) {
				t.Errorf("after %q connection %d has the error %v", step.backend, i, aborted)
			}
		}
	}
	if err := lives(conns[2]); err != nil {
		t.Error(err)
	}
}

// A connected socket that names its peer with each datagram receives the answers. So does a socket that is connected no
// more and goes on to ask the service, or the pod itself.
func TestDatagrams_connected(t *testing.T) {
	for name, sockets := range map[string]uint32{"places": 0, "one place": 1} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			p := c.openSized(ebpf.Sizes{Sockets: sockets})
			defer p.Close()
			check(t, p.Sync(t.Context(), parse(t, dns)))
			if sockets == 1 {
				c.needSocketMemory(t)
			}
			for range 12 { // each of which would choose the other backend as often as not
				check(t, c.Do("client", func() error { return connectedAsks(t) }))
			}
		})
	}
}

// needSocketMemory skips a test where the kernel has no memory for what a socket without a place is connected to. The
// test kernel has none.
func (c cluster) needSocketMemory(t *testing.T) {
	t.Helper()
	m, err := bpf.LoadPinnedMap(filepath.Join(c.pins, "memory", "peers"), nil)
	check(t, err)
	defer m.Close()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(fd)
	err = m.Put(int32(fd), make([]byte, m.ValueSize()))
	if errors.Is(err, unix.ENOMEM) {
		lack.Skip(t, lack.SocketMemory, err)
	}
	check(t, err)
}

func connectedAsks(t *testing.T) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	t.Cleanup(func() { unix.Close(fd) }) // those that stay keep the places
	service := &unix.SockaddrInet4{Port: 53, Addr: [4]byte{10, 96, 0, 10}}
	wait := unix.NsecToTimeval(answerTime.Nanoseconds())
	err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.Connect(fd, service), answersFrom(fd, service))
	if err != nil {
		return err
	}
	var unspecified [unix.SizeofSockaddrInet4]byte
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unspecified)),
		unix.SizeofSockaddrInet4)
	if errno != 0 {
		return fmt.Errorf("connect to AF_UNSPEC: %w", errno)
	}
	for _, to := range []*unix.SockaddrInet4{
		service,
		{Port: 5353, Addr: [4]byte{10, 244, 1, 11}},
		{Port: 5353, Addr: [4]byte{10, 244, 1, 12}},
		service,
	} {
		if err := answersFrom(fd, to); err != nil {
			return err
		}
	}
	return nil
}

// answersFrom sends a datagram to an address. It is an error if the answer comes from another one.
func answersFrom(fd int, to *unix.SockaddrInet4) error {
	if err := unix.Sendto(fd, []byte("?"), 0, to); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	_, from, err := unix.Recvfrom(fd, make([]byte, 128), 0)
	if got, ok := from.(*unix.SockaddrInet4); err != nil || !ok || got.Addr != to.Addr || got.Port != to.Port {
		return fmt.Errorf("%v was asked, and %v answers: %w", to, from, err)
	}
	return nil
}

// getpeername tells the address that was asked for, in all families.
func TestPeerName(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	check(t, p.Sync(t.Context(), parse(t, web)))
	mapped := [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: 96, 15: 10}
	six := netip.MustParseAddr("fd00::a60:a").As16()
	for name, to := range map[string]unix.Sockaddr{
		"IPv4":        &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 80},
		"IPv6":        &unix.SockaddrInet6{Addr: six, Port: 80},
		"IPv4-mapped": &unix.SockaddrInet6{Addr: mapped, Port: 80},
	} {
		family := unix.AF_INET6
		if name == "IPv4" {
			family = unix.AF_INET
		}
		check(t, c.Do("client", func() error {
			fd, err := unix.Socket(family, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.Connect(fd, to); err != nil {
				return fmt.Errorf("connect: %w", err)
			}
			peer, err := unix.Getpeername(fd)
			if got, want := fmt.Sprint(peer), fmt.Sprint(to); err == nil && port(peer) != 80 {
				t.Errorf("%s: the peer is %s, not %s", name, got, want)
			}
			return err
		}))
	}
}

// places is how many connected sockets have a place of their own, of the only one that there is.
func (c cluster) places() (claims uint64) {
	c.t.Helper()
	m := c.openMemory("claims")
	defer m.Close()
	check(c.t, m.Lookup(uint32(0), &claims))
	return claims
}

// Sockets that find their place taken are remembered all the same: one of eight has the place.
func TestPlaces(t *testing.T) {
	c := newCluster(t)
	p := c.openSized(ebpf.Sizes{Sockets: 1})
	defer p.Close()
	s := parse(t, web)
	check(t, p.Sync(t.Context(), s))
	to := unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 80}
	for range 3 {
		var sockets []int
		check(t, c.Do("client", func() error {
			for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
				to := to
				if kind == unix.SOCK_DGRAM {
					to.Port = 53
				}
				for range 4 {
					fd, err := unix.Socket(unix.AF_INET, kind, 0)
					check(t, err)
					sockets = append(sockets, fd)
					check(t, unix.Connect(fd, &to))
				}
			}
			return nil
		}))
		if n := c.places(); n != 1 {
			t.Errorf("%d sockets have the place", n)
		}
		check(t, p.Sync(t.Context(), s))
		for i, fd := range sockets {
			peer, err := unix.Getpeername(fd)
			if err != nil || port(peer) != []int{80, 53}[i/4] {
				t.Errorf("socket %d: the peer is %+v (%v)", i, peer, err)
			}
			check(t, unix.Close(fd))
		}
		if n := c.places(); n != 0 {
			t.Errorf("%d sockets have the place, and all are closed", n)
		}
	}
}

func port(a unix.Sockaddr) int {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return a.Port
	case *unix.SockaddrInet6:
		return a.Port
	}
	return 0
}

// runPlane is set in the environment of a process that has a plane serve web, says so, and waits to be killed.
const runPlane = "FAIRLEAD_TEST_EBPF_CGROUP"

// planeProcess is the life of that process. File 3 is its file system for pins.
func planeProcess(cgroup string) error {
	s, err := model.ParseState(web)
	if err != nil {
		return err
	}
	p, err := ebpf.New(ebpf.Options{Cgroup: cgroup, Pins: "/proc/self/fd/3/fairlead"})(dataplane.Config{})
	if err != nil {
		return err
	}
	for {
		if err := p.Sync(context.Background(), s); err != nil {
			return err
		}
		fmt.Println("ready")
	}
}

// Processes are killed at any moment, and others begin: no connection fails.
func TestKill(t *testing.T) {
	c := newCluster(t)
	pins, err := os.Open(filepath.Dir(c.pins))
	check(t, err)
	defer pins.Close()
	start := func() (kill func()) {
		cmd := c.Command(t.Context(), testbed.Node, "/proc/self/exe")
		cmd.Env = append(os.Environ(), runPlane+"="+c.Cgroup())
		cmd.ExtraFiles = []*os.File{pins}
		cmd.Stderr = t.Output()
		out, err := cmd.StdoutPipe()
		check(t, err)
		check(t, cmd.Start())
		if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
			t.Fatal(line, err)
		}
		return func() {
			check(t, cmd.Process.Kill())
			_ = cmd.Wait() // it says that the process was killed
		}
	}
	kill := start()
	var connections atomic.Int64
	done, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(failed)
		for {
			select {
			case <-done:
				return
			default:
			}
			o, err := c.Probe(t.Context(), testbed.Probe{
				From: "client", To: netip.MustParseAddrPort("10.96.0.10:80"), Timeout: answerTime,
			})
			if err != nil || o.Result != testbed.Answered {
				failed <- fmt.Errorf("connection %d: %s: %w", connections.Load(), o, err)
				return
			}
			connections.Add(1)
		}
	}()
	for range 5 {
		seen := connections.Load()
		kill()
		eventually.True(t, "20 more connections, or a failure", func() bool {
			return len(failed) > 0 || connections.Load() >= seen+20
		})
		kill = start()
	}
	close(done)
	kill()
	if err := <-failed; err != nil {
		t.Error(err)
	}
	p := c.open()
	check(t, errors.Join(p.Remove(t.Context()), p.Close()))
}

// With OnlyNode the sockets of pods keep the Service's address, and the node's do not. No plane serves packets here.
func TestOnlyNode(t *testing.T) {
	lack.Need(t, lack.Linux514)
	c := newCluster(t)
	p := c.openAs(ebpf.Options{Serve: ebpf.Behind, OnlyNode: true})
	defer p.Close()
	check(t, p.Sync(t.Context(), parse(t, dns)))
	const service = "10.96.0.10:53"
	if answer, err := ask(c.listen(testbed.Node, "udp4"), service); err != nil || !strings.HasSuffix(answer, service) {
		t.Errorf("a socket of the node: %q, %v", answer, err)
	}
	pod := c.listen("client", "udp4")
	if _, err := pod.WriteToUDPAddrPort([]byte("?\n"), netip.MustParseAddrPort(service)); err != nil {
		t.Fatal(err)
	}
	check(t, pod.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
	if n, from, err := pod.ReadFromUDPAddrPort(make([]byte, 128)); err == nil {
		t.Errorf("a socket of a pod got %d bytes from %s, and nobody serves packets", n, from)
	}
}
