package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// pinOld pins a table of an earlier version in place of one: it forgets, and has of each element what that version had.
func pinOld[K, V any](t *testing.T, path string, had func(K, V) V) {
	t.Helper()
	here, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	there, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.LRUHash, KeySize: here.KeySize(), ValueSize: here.ValueSize(), MaxEntries: here.MaxEntries(),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	err = each(here, func(key K, value V) error { return there.Put(key, had(key, value)) })
	if err := errors.Join(err, here.Unpin(), there.Pin(path)); err != nil {
		t.Fatal(err)
	}
}

// Flows of an earlier version are adopted: connections go on, stay as long as others do, and are their owners'.
func TestMigrate_old(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	o := Options{Pins: filepath.Join(testbed.NeedBPFFS(t), "fairlead"), Sizes: Sizes{Translations: 1 << 12}}
	p := planeAs(t, bed, o)
	open := []*talker{
		newTalker(t, bed, model.TCP, "192.0.2.1:30080"), newTalker(t, bed, model.TCP, "203.0.113.1:80"),
		newTalker(t, bed, model.TCP, "[fd00::c000:201]:30080"),
	}
	pool := model.PoolID{Service: "default/web:http"}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	pinOld(t, p.memoryPath(packetsMapTranslations), func(key packetsTuple, v packetsTranslation) packetsTranslation {
		v.Held, v.Near, v.State = 0, 0, v.State&^packetsStateLASTING
		if isWayBack(key, &v) {
			v.Pool = poolName(pool)
		}
		return v
	})
	shares, err := ebpf.LoadPinnedMap(p.memoryPath(objectsMapShares), nil)
	if err == nil {
		err = errors.Join(shares.Unpin(), shares.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	p = planeAs(t, bed, o)
	defer p.Close()
	for _, c := range open {
		c.goesOn(t, "an earlier version")
	}
	flows := 0
	err = each(p.memory[packetsMapTranslations], func(key packetsTuple, v packetsTranslation) error {
		if key.Hook == packetsHookINGRESS && v.State&packetsStateBACK == 0 {
			flows++
			if at := phase(unix.IPPROTO_TCP, v.State); at != packetsPhaseTCP_OPEN || v.Held == 0 {
				t.Errorf("a flow is at phase %d, and has %d places", at, v.Held)
			}
		}
		return nil
	})
	if err != nil || flows != len(open) {
		t.Errorf("%d flows, want %d: %v", flows, len(open), err)
	}
	if held, all := p.sweep.shares.held(ownerOf(pool)), p.sweep.shares.held(everybody); held < 6 || held > 12 || all != held {
		t.Errorf("their owner holds %d places of %d", held, all)
	}
}

// So are clients, which keep their backends for the time that their pools have.
func TestMigrate_oldClients(t *testing.T) {
	r := newPacketRun(t, attachedRows)
	p := r.plane()
	p.tables = r.tables
	from, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.LRUHash, KeySize: 24, ValueSize: 32, MaxEntries: attachedClients,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	clock, err := readClock()
	if err != nil {
		t.Fatal(err)
	}
	backends := []string{"10.244.1.11:8080", "10.244.1.12:8080", "10.244.1.13:8080"}
	for i := range 60 {
		key := objectsAffinityKey{
			Client: address(netip.AddrFrom4([4]byte{198, 18, 0, byte(i)})), Pool: poolName(model.PoolID{Service: "one/web:http"}),
		}
		value := objectsAffinity{Backend: endpoint(netip.MustParseAddrPort(backends[i%3])), Last: uint64(clock.monotonic)}
		if err := from.Put(key, value); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(p.migrateAffinities(from, p.memory[objectsMapAffinities]), p.detach()); err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		if c := r.open(fmt.Sprintf("198.18.0.%d:4000", i), "203.0.113.1:80"); c.backend != backends[i%3] {
			t.Errorf("client %d had %s, and reaches %s", i, backends[i%3], c.backend)
		}
	}
	s, unmap, err := mapShares(p.memory[objectsMapShares], objectsSharedOF_AFFINITIES, attachedClients, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	if n := s.held(ownerOf(model.PoolID{Service: "one/web:http"})); n != 60 {
		t.Errorf("their owner has %d places", n)
	}
}
