package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

const dns = `
apiVersion: v1
kind: Service
metadata: {name: dns}
spec:
  type: NodePort
  clusterIP: 10.96.0.53
  clusterIPs: [10.96.0.53]
  ports: [{port: 53, targetPort: 5353, nodePort: 30053, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns, labels: {kubernetes.io/service-name: dns}}
addressType: IPv4
ports: [{port: 5353, protocol: UDP}]
endpoints:
- addresses: [POD-A]
- addresses: [POD-B]
`

// TestRun_ebpfLife kills the process, starts it anew, and does so after another version's objects. Meanwhile there are
// connections of all kinds: short and long ones, datagrams, of sockets on the node and from outside.
func TestRun_ebpfLife(t *testing.T) {
	w := newMachine(t)
	w.write("dns.yaml", dns)
	flags := []string{"--proxy-mode", "ebpf", "--cgroup-root", w.bed.Cgroup()}
	p := w.start(flags...)
	load := w.watch(10*time.Millisecond, everywhere())
	ctx, stop := context.WithCancel(t.Context())
	var streams sync.WaitGroup
	for from, to := range everywhere() {
		conn, err := w.bed.Dial(t.Context(), from, model.TCP, to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		streams.Go(func() { w.talk(ctx, conn) })
	}
	asked := w.ask(ctx, &streams)
	for _, event := range []struct {
		name  string
		prior func()
	}{
		{"killed", func() {}},
		{"an older version has been there", func() { w.pretend(8) }},
		{"a newer version has been there", func() { w.pretend(16) }},
		{"killed again", func() {}},
	} {
		_ = p.Process.Kill()
		_ = p.Wait()
		event.prior()
		before := asked.Load()
		if err := load.Settle(t.Context(), 50); err != nil {
			t.Errorf("%s: %v", event.name, err)
		}
		p = w.start(flags...)
		eventually.Equal(w, "pins", "links memory netns", w.pins)
		if err := load.Settle(t.Context(), 50); err != nil {
			t.Errorf("%s, and there is a process: %v", event.name, err)
		}
		if asked.Load() < before+100 {
			t.Errorf("%s: only %d datagrams were answered", event.name, asked.Load()-before)
		}
	}
	stop()
	streams.Wait()
	r := load.Stop()
	if len(r.Faults) > 0 || r.Total().Answered < 400 {
		t.Error(r)
	}
	t.Logf("%d connections", r.Total().Answered)
	t.Logf("%d datagrams were answered", asked.Load())
	w.otherFlows(p, flags)
}

// otherFlows has a version come that cannot read the flows of the one before. New connections are served; open ones
// from outside end.
func (m machine) otherFlows(p *proxy, flags []string) {
	m.Helper()
	_ = p.Process.Kill()
	_ = p.Wait()
	want := m.sizeOfFlows()
	m.misfit("translations", 8)
	m.start(flags...)
	eventually.Equal(m, "size of flows", want, m.sizeOfFlows)
	for from, to := range everywhere() {
		c := m.dial(from, to)
		if err := errors.Join(talk(c), c.Close()); err != nil {
			m.Errorf("from %s: %v", from, err)
		}
	}
}

// ask sends datagrams until ctx ends, by sockets that are connected and others, and counts answers. One that has no
// answer is sent a second time, as resolvers do: a process that replaces the maps of another version does not
// know the datagrams on their way.
func (m machine) ask(ctx context.Context, group *sync.WaitGroup) *atomic.Int64 {
	var answered atomic.Int64
	service, port := netip.MustParseAddrPort("10.96.0.53:53"), netip.MustParseAddrPort("192.0.2.1:30053")
	for _, c := range []struct {
		from      testbed.Place
		to        netip.AddrPort
		connected bool
	}{
		{testbed.Node, service, false}, {testbed.Node, service, true},
		{"pod-a", service, false}, {"pod-a", service, true}, {"pod-a", port, false},
		{testbed.Outside, port, false}, {"pod-b", port, true},
	} {
		group.Go(func() {
			for ctx.Err() == nil {
				if err := m.exchange(c.from, c.to, c.connected, &answered); err != nil && ctx.Err() == nil {
					m.Errorf("datagrams from %s to %s (connected: %t): %v", c.from, c.to, c.connected, err)
					return
				}
			}
		})
	}
	return &answered
}

// exchange opens a socket, and sends some datagrams, each when the one before is answered.
func (m machine) exchange(from testbed.Place, to netip.AddrPort, connected bool, answered *atomic.Int64) error {
	var conn *net.UDPConn
	err := m.bed.Do(from, func() (err error) {
		if connected {
			conn, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to))
		} else {
			conn, err = net.ListenUDP("udp4", nil)
		}
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	send := func() error {
		if connected {
			_, err := conn.Write([]byte("?\n"))
			return err
		}
		_, err := conn.WriteToUDPAddrPort([]byte("?\n"), to)
		return err
	}
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for range 100 {
		<-pace.C
		err := answer(conn, send, to)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			m.Logf("a datagram from %s to %s is sent again", from, to)
			err = answer(conn, send, to)
		}
		if err != nil {
			return err
		}
		answered.Add(1)
	}
	return nil
}

// answer sends, and waits for an answer that comes from where it was sent to. Others are not for this client; the kernel
// sees to that for a socket that is connected.
func answer(conn *net.UDPConn, send func() error, to netip.AddrPort) error {
	if err := send(); err != nil {
		return err
	}
	if err := conn.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	for {
		_, from, err := conn.ReadFromUDPAddrPort(make([]byte, 128))
		if err != nil || from == to || conn.RemoteAddr() != nil {
			return err
		}
	}
}

// pretend has the memory be that of a version with another layout of all but flows of packets. The programs that are in
// force go on with what they have, as those of another version would. They lose their list of flows: the process puts that
// of another version out of force before it attaches programs, and here the map that it opens is not theirs.
func (m machine) pretend(more uint32) {
	m.Helper()
	m.ignoreNotes()
	entries, err := os.ReadDir(filepath.Join(m.pinned, "memory"))
	if err != nil {
		m.Fatal(err)
	}
	for _, e := range entries {
		if name := e.Name(); name != "translations" && name != "peers" { // whose elements only its sockets have
			m.misfit(name, more)
		}
	}
}

// ignoreNotes has programs look for the flow of every packet.
func (m machine) ignoreNotes() {
	m.Helper()
	noted, err := ebpf.LoadPinnedMap(filepath.Join(m.pinned, "memory", "noted"), nil)
	if err != nil {
		m.Fatal(err)
	}
	defer noted.Close()
	memory, err := noted.Memory()
	if err == nil {
		_, err = memory.WriteAt(make([]byte, 8), 0)
	}
	if err != nil {
		m.Fatal(err)
	}
}

// misfit puts a map with elements of another size in place of one that is pinned.
func (m machine) misfit(name string, more uint32) {
	m.Helper()
	path := filepath.Join(m.pinned, "memory", name)
	here, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		m.Fatal(err)
	}
	defer here.Close()
	other, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: here.Type(), KeySize: here.KeySize(), ValueSize: here.ValueSize() + more, MaxEntries: here.MaxEntries(),
		Flags: here.Flags(),
	})
	if err == nil {
		defer other.Close()
		err = errors.Join(here.Unpin(), other.Pin(path))
	}
	if err != nil {
		m.Fatalf("%s: %v", name, err)
	}
}

func (m machine) sizeOfFlows() string {
	m.Helper()
	flows, err := ebpf.LoadPinnedMap(filepath.Join(m.pinned, "memory", "translations"), nil)
	if err != nil {
		m.Fatal(err)
	}
	defer flows.Close()
	return fmt.Sprint(flows.ValueSize())
}

// TestRun_ebpfDatagrams changes from nftables to ebpf under a socket of UDP that is the node's and connected to a Service.
// While connection tracking knows its flow it is answered; then its owner is told.
func TestRun_ebpfDatagrams(t *testing.T) {
	w := newMachine(t)
	w.write("dns.yaml", dns)
	w.configure("nftables", "")
	w.start("--config", w.config(), "--cgroup-root", w.bed.Cgroup())
	conn, err := w.bed.Dial(t.Context(), testbed.Node, model.UDP, netip.MustParseAddrPort("10.96.0.53:53"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := talk(conn); err != nil {
		t.Fatal(err)
	}
	w.configure("ebpf", "")
	eventually.Equal(w, "nftables has rows", "false", func() string { return w.nftablesHas("10.96.0.53") })
	if err := talk(conn); err != nil {
		t.Errorf("in mode ebpf: %v", err)
	}
	err = w.bed.Do(testbed.Node, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
	if err != nil {
		t.Fatal(err)
	}
	eventually.Equal(w, "tables", "", w.tablesOfIPv4)
	eventually.Equal(w, "the socket", unix.EDESTADDRREQ.Error(), func() string {
		_, err := conn.Write([]byte("?\n"))
		if errno := unix.Errno(0); errors.As(err, &errno) {
			return errno.Error()
		}
		return fmt.Sprint(err)
	})
}

// TestRun_ebpfPackets changes who serves packets, in a process that runs and by one that starts after another, while
// connections are made all the time. Open ones go on. When those have ended that the programs at devices have made,
// nothing is left of these.
func TestRun_ebpfPackets(t *testing.T) {
	w := newMachine(t)
	w.configure("ebpf", "")
	w.packetsBy("tc")
	flags := []string{"--config", w.config(), "--cgroup-root", w.bed.Cgroup()}
	p := w.start(flags...)
	load := w.watch(10*time.Millisecond, everywhere())
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	served := map[string]string{"tc": "false", "nftables": "true"} // whether nftables has rows
	for i, by := range []string{"nftables", "tc", "nftables"} {
		for from, to := range everywhere() {
			open = append(open, w.dial(from, to))
		}
		w.packetsBy(by)
		t.Logf("%s %s", by, time.Now().Format("05.000"))
		if restart := i == 2; restart {
			_ = p.Process.Kill()
			_ = p.Wait()
			p = w.start(flags...)
		}
		eventually.Equal(w, "packets by "+by+": nftables has rows", served[by], func() string { return w.nftablesHas("10.96.0.10") })
		if err := load.Settle(t.Context(), 20); err != nil {
			t.Error(err)
		}
		for _, c := range open {
			w.talksOver(c, "packets by "+by)
		}
	}
	if r := load.Stop(); len(r.Faults) > 0 || r.Total().Answered < 200 {
		t.Errorf("while it changed who serves packets: %s", r)
	}
	if links, _ := filepath.Glob(filepath.Join(w.pinned, "links", "ingress*")); len(links) == 0 {
		t.Error("there are connections, but no programs at devices")
	}
	w.forgetFlows()
	eventually.Equal(w, "what is pinned for packets", "[] []", func() string {
		links, _ := filepath.Glob(filepath.Join(w.pinned, "links", "*gress*"))
		memory, _ := filepath.Glob(filepath.Join(w.pinned, "memory", "translations*"))
		return fmt.Sprint(links, memory)
	})
}

// forgetFlows is as if all flows of packets had ended.
func (m machine) forgetFlows() {
	m.Helper()
	flows, err := ebpf.LoadPinnedMap(filepath.Join(m.pinned, "memory", "translations"), nil)
	if err != nil {
		m.Fatal(err)
	}
	defer flows.Close()
	for key := []byte(nil); ; {
		if err := flows.NextKey(nil, &key); errors.Is(err, ebpf.ErrKeyNotExist) {
			return
		} else if err = errors.Join(err, flows.Delete(key)); err != nil {
			m.Fatal(err)
		}
	}
}

// packetsBy configures what is to serve packets.
func (m machine) packetsBy(name string) {
	m.Helper()
	path := filepath.Join(filepath.Dir(m.config()), "fairlead.conf")
	text := fairleadConf + "ebpf: {packets: " + name + "}\n"
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		m.Fatal(err)
	}
}

// nftablesHas reports whether a text is in the ruleset.
func (m machine) nftablesHas(text string) string {
	m.Helper()
	out, err := m.bed.Command(m.Context(), testbed.Node, "nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		m.Fatalf("nft: %v %s", err, out)
	}
	return fmt.Sprint(strings.Contains(string(out), text))
}
