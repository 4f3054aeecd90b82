package ebpf_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	bpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
)

// place is the only one that there is.
type place struct {
	Cookie uint64
	_      uint64
	Netns  uint64
	_      [40]byte
}

// openMemory opens a map of those that outlive programs.
func (c cluster) openMemory(name string) *bpf.Map {
	c.t.Helper()
	m, err := bpf.LoadPinnedMap(filepath.Join(c.pins, "memory", name), nil)
	check(c.t, err)
	return m
}

// place reads it.
func (c cluster) place() (at place) {
	c.t.Helper()
	m := c.openMemory("sockets")
	defer m.Close()
	check(c.t, m.Lookup(uint32(0), &at))
	return at
}

// connect opens a socket.
func (c cluster) connect(from testbed.Place, kind, protocol int, to unix.Sockaddr) (fd int, err error) {
	err = c.Do(from, func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, protocol); err != nil {
			return os.NewSyscallError("socket", err)
		}
		return os.NewSyscallError("connect", unix.Connect(fd, to))
	})
	return fd, err
}

// A place whose socket closed unseen is free after a while. A place whose socket is there is not, in whatever namespace
// and state the socket is.
func TestPlaces_unseen(t *testing.T) {
	c := newCluster(t)
	p := c.openSized(ebpf.Sizes{Sockets: 1})
	defer p.Close()
	check(t, p.Sync(t.Context(), parse(t, web)))
	web := &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 80}
	dns := &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 53}
	for name, held := range map[string]struct {
		from testbed.Place
		kind int
		to   unix.Sockaddr
	}{
		"TCP":             {"client", unix.SOCK_STREAM, web},
		"TCP of the node": {testbed.Node, unix.SOCK_STREAM, web},
		"UDP":             {"client", unix.SOCK_DGRAM, dns},
	} {
		fd, err := c.connect(held.from, held.kind, 0, held.to)
		check(t, err)
		before := c.place()
		c.looks(p)
		if after := c.place(); after != before || c.places() != 1 {
			t.Errorf("%s: the place is %+v, and was %+v", name, after, before)
		}
		check(t, unix.Close(fd))
		c.expectPlaces("is closed", 0)
	}
	asks := c.listen("client", "udp4")
	_, err := ask(asks, "10.96.0.10:53")
	check(t, err)
	c.looks(p)
	c.expectPlaces("asks, and is not connected", 1)
	check(t, asks.Close())
	c.expectPlaces("is closed", 0)
	netns, known := c.netnsCookie("client")
	if !known {
		c.ended(p, web, 1) // before Linux 5.14 namespaces are known from living sockets that have places, and there is none
		return
	}
	c.ended(p, web, 0)
	c.forge(p, netns)
}

// looks is often enough for the plane to be sure.
func (c cluster) looks(p dataplane.Dataplane) {
	c.t.Helper()
	for range 2 {
		check(c.t, ebpf.FreePlaces(p))
	}
}

// netnsCookie is the number of a namespace; known is false where the kernel does not tell.
func (c cluster) netnsCookie(of testbed.Place) (cookie uint64, known bool) {
	c.t.Helper()
	err := c.Do(of, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return err
	})
	if errors.Is(err, unix.ENOPROTOOPT) {
		return 0, false
	}
	check(c.t, err)
	return cookie, true
}

// ended has a connection end while its socket is open. That has no name of a peer any more, and does not give back what
// it has lost.
func (c cluster) ended(p dataplane.Dataplane, to unix.Sockaddr, left uint64) {
	fd, err := c.connect("client", unix.SOCK_STREAM, 0, to)
	check(c.t, err)
	check(c.t, unix.Shutdown(fd, unix.SHUT_WR))
	for n := 1; n > 0; {
		n, err = unix.Read(fd, make([]byte, 128))
		check(c.t, err)
	}
	c.looks(p)
	c.expectPlaces("has ended", left)
	check(c.t, unix.Close(fd))
	c.expectPlaces("has ended, and is closed", 0)
}

// expectPlaces counts those that sockets have, of which there was one.
func (c cluster) expectPlaces(what string, want uint64) {
	c.t.Helper()
	if n := c.places(); n != want {
		c.t.Errorf("%d sockets have the place, want %d: there was one that %s", n, want, what)
	}
}

// forge takes the place for sockets that do not exist.
func (c cluster) forge(p dataplane.Dataplane, netns uint64) {
	t := c.t
	m, claims := c.openMemory("sockets"), c.openMemory("claims")
	defer m.Close()
	defer claims.Close()
	for _, forged := range []struct {
		name  string
		netns uint64
		left  uint64
	}{
		{"nowhere", netns, 0},
		{"in a namespace that is not known", 1 << 40, 1},
	} {
		check(t, m.Put(uint32(0), place{Cookie: 1 << 40, Netns: forged.netns}))
		check(t, claims.Put(uint32(0), uint64(1)))
		check(t, ebpf.FreePlaces(p))
		c.expectPlaces("is "+forged.name+", and may have come just now", 1)
		c.looks(p)
		c.expectPlaces("is "+forged.name, forged.left)
	}
}

// Sockets that close while the agent looks give back one place each, and no more.
func TestPlaces_closing(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	defer p.Close()
	check(t, p.Sync(t.Context(), parse(t, web)))
	dns := &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 53}
	for range 5 {
		var fds []int
		for range 900 {
			fd, err := c.connect("client", unix.SOCK_DGRAM, 0, dns)
			check(t, err)
			fds = append(fds, fd)
		}
		check(t, ebpf.FreePlaces(p))
		looked := make(chan error)
		go func() { looked <- ebpf.FreePlaces(p) }()
		for _, fd := range fds {
			check(t, unix.Close(fd))
		}
		check(t, <-looked)
	}
	m := c.openMemory("claims")
	defer m.Close()
	var number, wrong uint32
	var claims uint64
	all := m.Iterate()
	for all.Next(&number, &claims) {
		if claims != 0 {
			wrong++
		}
	}
	check(t, all.Err())
	if wrong > 0 {
		t.Errorf("%d places are not free, of sockets that are closed", wrong)
	}
}

// MPTCP connects sockets of the kernel's own, whose end no hook sees.
func TestPlaces_kernel(t *testing.T) {
	lack.Need(t, lack.MPTCP)
	c := newCluster(t)
	p := c.openSized(ebpf.Sizes{Sockets: 1})
	defer p.Close()
	check(t, p.Sync(t.Context(), parse(t, web)))
	fd, err := c.connect("client", unix.SOCK_STREAM, unix.IPPROTO_MPTCP, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 10}, Port: 80})
	check(t, err)
	c.looks(p)
	if c.places() == 0 {
		t.Fatal("the socket has no place")
	}
	check(t, unix.Close(fd))
	c.expectPlaces("is closed", 1) // else this needs no agent
	eventually.Equal(t, "places, when the kernel has taken leave of the server", 0, func() uint64 {
		c.looks(p)
		return c.places()
	})
}
