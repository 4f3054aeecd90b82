package ebpf

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/nft"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// A port of the node that a tracked connection has towards a backend stands for no other client there. Towards another
// backend it may.
func TestFlow_taken(t *testing.T) {
	r := newPacketRun(t, `
backend default/web:http cluster 10.244.1.11:8080 local
backend default/other:http cluster 10.244.1.12:8080 local
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat always
frontend 192.0.2.1:30081/tcp any forward default/other:http cluster snat always
`)
	key := at(packetsHookINGRESS, uint8(model.TCP), endpointAt("10.244.1.11:8080"), endpointAt("192.0.2.1:4000"))
	if err := r.programs.Maps[packetsMapTaken].Put(key, uint8(0)); err != nil {
		t.Fatal(err)
	}
	r.play(strings.TrimSpace(`
lan tcp 192.0.2.9:4000 > 192.0.2.1:30080 S    -> tcp 192.0.2.9:4000 > 10.244.1.11:8080 S
out tcp 192.0.2.9:4000 > 10.244.1.11:8080 S   -> tcp 192.0.2.1:PORT > 10.244.1.11:8080 S
pod tcp 10.244.1.11:8080 > 192.0.2.1:PORT SA  -> tcp 10.244.1.11:8080 > 192.0.2.9:4000 SA
pod tcp 10.244.1.11:8080 > 192.0.2.1:4000 A   -> the same
lan tcp 192.0.2.9:4000 > 192.0.2.1:30081 S    -> tcp 192.0.2.9:4000 > 10.244.1.12:8080 S
out tcp 192.0.2.9:4000 > 10.244.1.12:8080 S   -> tcp 192.0.2.1:4000 > 10.244.1.12:8080 S`))
}

// Entries that did not fit are tried again, and those that did fit stay.
func TestTaken_full(t *testing.T) {
	lack.Need(t, lack.Root)
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.Hash, KeySize: uint32(unsafe.Sizeof(packetsTuple{})), ValueSize: 1, MaxEntries: 2, Flags: 1, // not all at once
	})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	key := func(port uint16) packetsTuple {
		return at(packetsHookINGRESS, uint8(model.TCP), endpointAt("10.244.1.11:8080"), packetsEndpoint{Port: port})
	}
	for _, step := range []struct {
		want map[packetsTuple]uint8
		fits bool
	}{
		{map[packetsTuple]uint8{key(1): 0, key(2): 0}, true},
		{map[packetsTuple]uint8{key(2): 0, key(3): 0, key(4): 0}, false},
		{map[packetsTuple]uint8{key(3): 0, key(4): 0}, true},
		{nil, true},
	} {
		err := reserve(m, step.want)
		has := map[packetsTuple]uint8{}
		failed := each(m, func(key packetsTuple, value uint8) error {
			has[key] = value
			return nil
		})
		if failed != nil {
			t.Fatal(failed)
		}
		if (err == nil) != step.fits || step.fits && !maps.Equal(has, step.want) {
			t.Errorf("of %v the map has %v: %v", step.want, has, err)
		}
	}
}

// There may be more entries at once than the kernel has memory at hand for: the test kernel has it for a few.
func TestTaken_many(t *testing.T) {
	lack.Need(t, lack.Root)
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.Hash, KeySize: uint32(unsafe.Sizeof(packetsTuple{})), ValueSize: 1, MaxEntries: 1 << 16, Flags: 1, // not all at once
	})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	want := map[packetsTuple]uint8{}
	for port := range uint16(20_000) {
		want[at(packetsHookINGRESS, uint8(model.TCP), endpointAt("10.244.1.11:8080"), packetsEndpoint{Port: port})] = 0
	}
	if err := reserve(m, want); err != nil {
		t.Fatal(err)
	}
	has := map[packetsTuple]uint8{}
	err = each(m, func(key packetsTuple, value uint8) error {
		has[key] = value
		return nil
	})
	if err != nil || !maps.Equal(has, want) {
		t.Errorf("of %d the map has %d: %v", len(want), len(has), err)
	}
}

// Connections that another data plane has begun keep their ports to themselves until they have ended.
func TestTaken(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	dir := testbed.NeedBPFFS(t)
	programNFT(t, bed)
	want := map[packetsTuple]uint8{}
	for _, to := range []string{"192.0.2.1:30080", "[fd00::c000:201]:30080", "192.0.2.1:30053"} {
		for range 20 { // half of them get other ports
			dial(t, bed, to)
		}
	}
	for _, f := range hiddenIn(t, bed) {
		if f.Back.Port() < 32768 {
			want[at(packetsHookINGRESS, uint8(f.Protocol), packetsEnd(f.Answers), packetsEnd(f.Back))] = 0
		}
	}
	p := planeAs(t, bed, Options{Pins: filepath.Join(dir, "fairlead")})
	defer p.Close()
	if got := takenBy(t, p); len(want) == 0 || !maps.Equal(got, want) {
		t.Errorf("taken are %v, want %v", got, want)
	}
	if err := bed.Do(testbed.Node, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }); err != nil {
		t.Fatal(err)
	}
	if n := portsTables(t, bed); n != 0 {
		t.Errorf("%d tables are left, which were to be there until the programs were attached", n)
	}
	p.packets.reserved.next = time.Time{}
	p.auditReserved()
	if got := takenBy(t, p); len(got) > 0 {
		t.Errorf("taken are still %v", got)
	}
}

// While connections that the programs have begun go on, whom others hide gets ports that the programs have not.
func TestDrain_ports(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	dir := testbed.NeedBPFFS(t)
	pins := filepath.Join(dir, "fairlead")
	p := planeAs(t, bed, Options{Pins: pins})
	dial(t, bed, "192.0.2.1:30080")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	programNFT(t, bed)
	if flows := drainAt(t, bed, pins); flows != 1 {
		t.Errorf("%d flows are left, want 1", flows)
	}
	for _, to := range []string{"192.0.2.1:30080", "[fd00::c000:201]:30080", "192.0.2.1:30053", "[fd00::c000:201]:30053"} {
		for range 10 {
			dial(t, bed, to)
		}
	}
	flows := hiddenIn(t, bed)
	for _, f := range flows {
		if f.Back.Port() < 32768 {
			t.Errorf("%s has a port of the programs: %s", f.From, f.Back)
		}
	}
	if len(flows) != 40 {
		t.Errorf("%d clients are hidden, want 40", len(flows))
	}
	if err := bed.Do(testbed.Node, dropPortsTable); err != nil { // as another program may
		t.Fatal(err)
	}
	drainAt(t, bed, pins)
	if n := portsTables(t, bed); n != 2 {
		t.Errorf("there are %d tables, want 2", n)
	}
	err := bed.Do(testbed.Node, func() error {
		left := &Plane{pins: pins, serve: TC}
		return errors.Join(left.Remove(context.Background()), left.Close())
	})
	if err != nil {
		t.Error(err)
	}
	if n := portsTables(t, bed); n != 0 {
		t.Errorf("%d tables are left", n)
	}
}

// A backend that reaches itself is hidden, too, and gets no port by which the programs know a client of it. Those that
// do so through the programs go on.
func TestDrain_portsOfHairpins(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	pins := filepath.Join(testbed.NeedBPFFS(t), "fairlead")
	p := planeAs(t, bed, Options{Pins: pins})
	var open []net.Conn
	for range 20 { // pod-a gets half of them
		for _, from := range []testbed.Place{testbed.Outside, "pod-a", "pod-c"} {
			open = append(open, dialFrom(t, bed, from, "192.0.2.1:30080"), dialFrom(t, bed, from, "[fd00::c000:201]:30080"))
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	programNFT(t, bed)
	drainAt(t, bed, pins)
	for range 40 { // likewise
		dialFrom(t, bed, "pod-a", "192.0.2.1:30080")
		dialFrom(t, bed, "pod-a", "[fd00::c000:201]:30080")
		dialFrom(t, bed, "pod-a", "192.0.2.1:30053")
	}
	kinds := map[string]int{}
	for _, f := range hiddenIn(t, bed) {
		if f.Answers.Addr() == f.From.Addr() {
			kinds[f.To.String()]++
			if f.Back.Port() < 32768 {
				t.Errorf("%s has a port of the programs: %s", f.From, f.Back)
			}
		}
	}
	for _, c := range open {
		_, err := c.Write([]byte("?\n"))
		lines := bufio.NewScanner(c)
		if err != nil || !lines.Scan() || !lines.Scan() { // the server has spoken first
			t.Errorf("an open connection from %s broke: %v", c.LocalAddr(), cmp.Or(err, lines.Err()))
		}
	}
	if len(kinds) != 3 {
		t.Errorf("to itself the pod has %v, want connections to 3 destinations", kinds)
	}
}

// programNFT has the data plane nftables serve the same rows.
func programNFT(t *testing.T, bed *testbed.Bed) {
	t.Helper()
	s, err := model.ParseState(outsideRows)
	if err != nil {
		t.Fatal(err)
	}
	err = bed.Do(testbed.Node, func() error {
		p, err := nftables.New(dataplane.Config{})
		if err != nil {
			return err
		}
		t.Cleanup(func() {
			if err := errors.Join(p.Remove(context.Background()), p.Close()); err != nil {
				t.Error(err)
			}
		})
		return p.Sync(t.Context(), s)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// dial opens a connection of a client from outside, which stays.
func dial(t *testing.T, bed *testbed.Bed, to string) {
	t.Helper()
	dialFrom(t, bed, testbed.Outside, to)
}

func dialFrom(t *testing.T, bed *testbed.Bed, from testbed.Place, to string) net.Conn {
	t.Helper()
	addr, protocol := netip.MustParseAddrPort(to), model.TCP
	if addr.Port() == 30053 {
		protocol = model.UDP
	}
	c, err := bed.Dial(t.Context(), from, protocol, addr)
	if err == nil {
		t.Cleanup(func() { c.Close() })
		if protocol == model.UDP {
			err = answered(c)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func answered(c net.Conn) error {
	_, err := c.Write([]byte("?"))
	if err == nil {
		_, err = c.Read(make([]byte, 512))
	}
	return err
}

// hiddenIn are the flows of clients of Services that connection tracking of the node hides.
func hiddenIn(t *testing.T, bed *testbed.Bed) (flows []tracked.Flow) {
	t.Helper()
	err := bed.Do(testbed.Node, func() error {
		c, err := nfnetlink.Dial()
		if err != nil {
			return err
		}
		defer c.Close()
		flows, err = tracked.List(c, func(f *tracked.Flow) bool {
			return f.Back != f.From && f.Answers != f.To
		}, tracked.Filter{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return flows
}

func drainAt(t *testing.T, bed *testbed.Bed, pins string) (flows int) {
	t.Helper()
	err := bed.Do(testbed.Node, func() (err error) {
		flows, err = drain(t.Context(), dataplane.Config{}, pins)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return flows
}

func takenBy(t *testing.T, p *Plane) map[packetsTuple]uint8 {
	t.Helper()
	var key packetsTuple
	var value uint8
	has := map[packetsTuple]uint8{}
	all := p.packets.Maps[packetsMapTaken].Iterate()
	for all.Next(&key, &value) {
		has[key] = value
	}
	if err := all.Err(); err != nil {
		t.Fatal(err)
	}
	return has
}

// portsTables is how many tables keep others from the programs' ports.
func portsTables(t *testing.T, bed *testbed.Bed) (n int) {
	t.Helper()
	err := bed.Do(testbed.Node, func() error {
		return eachPortsTable(func(c *nfnetlink.Socket, table *nft.Table) error {
			err := table.LoadTable(c)
			if table.Exists {
				n++
			}
			return err
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}
