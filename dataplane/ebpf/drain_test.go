package ebpf

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Programs without rows go on with the memory that is there, however large it was configured to be.
func TestDrain_sizes(t *testing.T) {
	t.Parallel()
	bed := outsideBedOf(t, testbed.Spec{Cgroup: true})
	dir := testbed.NeedBPFFS(t)
	pins := filepath.Join(dir, "fairlead")
	p := planeAs(t, bed, Options{
		Pins: pins, Sizes: Sizes{Affinities: 5000, Flows: 6000, Sockets: 8192, Translations: 9000},
	})
	probe := testbed.Probe{From: testbed.Outside, Protocol: model.UDP, To: netip.MustParseAddrPort("192.0.2.1:30053")}
	if got := probes(t, bed, probe, 1); got != "pod-a source 192.0.2.1" {
		t.Error(got)
	}
	before := map[string]ebpf.MapID{}
	for name, m := range p.memory {
		before[name] = idOf(t, m)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	err := bed.Do(testbed.Node, func() error {
		n, err := drain(t.Context(), dataplane.Config{}, pins)
		if n != 1 {
			t.Errorf("%d flows are left, want 1", n)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range before {
		m, err := ebpf.LoadPinnedMap(filepath.Join(pins, memoryDir, name), nil)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := idOf(t, m); got != want {
			t.Errorf("%s is another map, with %d elements", name, m.MaxEntries())
		}
		m.Close()
	}
}

func idOf(t *testing.T, m *ebpf.Map) ebpf.MapID {
	t.Helper()
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}

// planeAs is a plane that a test closes, and whose traces go with it.
func planeAs(t *testing.T, bed *testbed.Bed, o Options) (p *Plane) {
	t.Helper()
	o.Cgroup, o.Serve = bed.Cgroup(), TC
	err := bed.Do(testbed.Node, func() (err error) {
		p, err = open(dataplane.Config{}, o)
		return err
	})
	if errors.Is(err, dataplane.ErrUnsupported) {
		lack.Skip(t, lack.Root, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := bed.Do(testbed.Node, func() error {
			left := &Plane{pins: o.Pins, serve: TC}
			return errors.Join(left.Remove(context.Background()), left.Close())
		})
		if err != nil {
			t.Error(err)
		}
	})
	s, err := model.ParseState(outsideRows)
	if err == nil {
		err = p.Sync(t.Context(), s)
	}
	if err != nil {
		t.Fatal(errors.Join(err, p.Close()))
	}
	return p
}
