package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
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

// TestRun_ebpfLife kills the process, starts it anew, and does so after what another version has left, while there are
// connections of all kinds: short and long ones, datagrams, of sockets on the node and from outside.
func TestRun_ebpfLife(t *testing.T) {
	w := newMachine(t)
	w.write("dns.yaml", dns)
	flags := []string{"--proxy-mode", "ebpf", "--ebpf-packets", "nftables", "--cgroup-root", w.bed.Cgroup()}
	p := w.start(flags...)
	loads := w.loads()
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
		{"an older version has been there", func() { w.pretend("v0") }},
		{"a newer version has been there", func() { w.pretend("v100") }},
		{"killed again", func() {}},
	} {
		_ = p.Process.Kill()
		_ = p.Wait()
		event.prior()
		before := asked.Load()
		for _, load := range loads {
			if err := load.AwaitAnswers(t.Context(), 50); err != nil {
				t.Errorf("%s: %v", event.name, err)
			}
		}
		p = w.start(flags...)
		w.becomes("pins", "links memory netns", w.pins)
		for _, load := range loads {
			if err := load.AwaitAnswers(t.Context(), 50); err != nil {
				t.Errorf("%s, and there is a process: %v", event.name, err)
			}
		}
		if asked.Load() < before+100 {
			t.Errorf("%s: only %d datagrams were answered", event.name, asked.Load()-before)
		}
	}
	stop()
	streams.Wait()
	for _, load := range loads {
		r := load.Stop()
		if len(r.Failures) > 0 || r.Total() < 100 {
			t.Error(r)
		}
		t.Logf("%d connections", r.Total())
	}
	t.Logf("%d datagrams were answered", asked.Load())
}

// ask sends datagrams until ctx ends, by sockets that are connected and others, and counts answers. One that has no
// answer is sent a second time, as resolvers do: who replaces the memory of another version has not that of datagrams
// on their way.
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

// pretend makes what is pinned that of another version: with tables of another layout in a directory of another name,
// and programs that were made for these in force.
func (m machine) pretend(version string) {
	m.Helper()
	if err := m.tryPretend(version); err != nil {
		m.Fatal(err)
	}
}

func (m machine) tryPretend(version string) error {
	spec, err := ebpf.LoadCollectionSpec("../../dataplane/ebpf/objects_bpfel.o")
	if err != nil {
		return err
	}
	here, err := filepath.Glob(filepath.Join(m.pinned, "v*"))
	if err != nil || len(here) != 1 {
		return fmt.Errorf("memory %v: %w", here, err)
	}
	links, err := os.ReadDir(filepath.Join(m.pinned, "links"))
	if err != nil {
		return err
	}
	tables, err := m.tablesOf(links[0].Name())
	if err != nil {
		return err
	}
	memory, err := os.ReadDir(here[0])
	if err != nil {
		return err
	}
	var remembered []string
	for _, e := range memory {
		old, err := ebpf.LoadPinnedMap(filepath.Join(here[0], e.Name()), nil)
		if err != nil {
			return err
		}
		defer old.Close()
		delete(tables, e.Name())
		s := spec.Maps[e.Name()]
		if s == nil { // it is for packets
			continue
		}
		remembered = append(remembered, e.Name())
		if s.MaxEntries = old.MaxEntries(); s.Type != ebpf.SkStorage { // which needs its types
			s.ValueSize, s.Key, s.Value = s.ValueSize+8, nil, nil
		}
	}
	other, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: tables})
	if err != nil {
		return err
	}
	defer other.Close()
	return m.install(version, other, remembered, here[0])
}

// install pins the memory of another version, has its programs in force, and removes the memory that was there.
func (m machine) install(version string, c *ebpf.Collection, memory []string, before string) error {
	dir := filepath.Join(m.pinned, version)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for _, name := range memory {
		if err := c.Maps[name].Pin(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	for name, program := range c.Programs {
		l, err := link.LoadPinnedLink(filepath.Join(m.pinned, "links", name), nil)
		if err != nil {
			return err
		}
		if err := errors.Join(l.Update(program), l.Close()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return os.RemoveAll(before)
}

// tablesOf are those of the program at a hook, by their names.
func (m machine) tablesOf(hook string) (map[string]*ebpf.Map, error) {
	l, err := link.LoadPinnedLink(filepath.Join(m.pinned, "links", hook), nil)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	at, err := l.Info()
	if err != nil {
		return nil, err
	}
	p, err := ebpf.NewProgramFromID(at.Program)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return nil, err
	}
	ids, _ := info.MapIDs()
	tables := map[string]*ebpf.Map{}
	for _, id := range ids {
		table, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, err
		}
		m.Cleanup(func() { table.Close() })
		described, err := table.Info()
		if err != nil {
			return nil, err
		}
		tables[described.Name] = table
	}
	return tables, nil
}
