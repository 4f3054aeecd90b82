package traffic_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/model"
)

const watchedPort = 7000

// newWatched has a pod whose server is up, and paths to it in both families.
func newWatched(t *testing.T) (*testbed.Bed, traffic.WatchSpec) {
	t.Parallel()
	bed, err := testbed.New(t.Context(), testbed.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bed.Close(); err != nil {
			t.Error(err)
		}
	})
	addPod(t, bed, "pod-a", nil)
	s := traffic.WatchSpec{Streams: 16, Interval: 10 * time.Millisecond, Pause: 10 * time.Millisecond}
	for _, v6 := range []bool{false, true} {
		to := netip.AddrPortFrom(bed.Addr("pod-a", v6), watchedPort)
		s.Paths = append(s.Paths, traffic.Path{From: testbed.Node, To: to})
		s.Visits = append(s.Visits, traffic.Path{From: testbed.Outside, To: to, Protocol: model.UDP})
	}
	s.Affinity = s.Paths
	return bed, s
}

func addPod(t *testing.T, bed *testbed.Bed, name string, addrs []netip.Addr) {
	t.Helper()
	ports := []testbed.PodPort{{Protocol: model.TCP, Port: watchedPort}, {Protocol: model.UDP, Port: watchedPort}}
	if _, err := bed.AddPod(t.Context(), testbed.PodSpec{Name: name, Addrs: addrs, Ports: ports}); err != nil {
		t.Fatal(err)
	}
}

func watch(t *testing.T, bed *testbed.Bed, s traffic.WatchSpec) *traffic.Watch {
	t.Helper()
	w, err := traffic.StartWatch(t.Context(), bed, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Stop() })
	if err := w.Settle(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	return w
}

func TestWatch(t *testing.T) {
	bed, s := newWatched(t)
	w := watch(t, bed, s)
	if err := w.Open(4); err != nil {
		t.Error(err)
	}
	if err := errors.Join(w.Settle(t.Context(), 3), w.More(t.Context(), 100)); err != nil {
		t.Error(err)
	}
	r := w.Stop()
	if r.Total().Bad() || len(r.Faults) > 0 || r.Counts[traffic.Streams].Attempts != 20 {
		t.Errorf("nothing was done to it:\n%s", r)
	}
	if r.Backends["pod-a"] < 100 {
		t.Errorf("%v have answered", r.Backends)
	}
	for kind, c := range r.Counts {
		if c.Answered < 6 {
			t.Errorf("%s: only %d answers", traffic.Kind(kind), c.Answered)
		}
	}
}

// Everything that a client could notice is noticed: servers that end, and others in their place.
func TestWatch_faults(t *testing.T) {
	bed, s := newWatched(t)
	s.Timeout = time.Second // the kernel tells an unconnected socket nothing
	w := watch(t, bed, s)
	addresses := []netip.Addr{bed.Addr("pod-a", false), bed.Addr("pod-a", true)}
	w.Mark("no server")
	if err := bed.StopServing("pod-a"); err != nil {
		t.Fatal(err)
	}
	if err := w.Settle(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	r := w.Report()
	for _, kind := range []traffic.Kind{traffic.Connections, traffic.Streams, traffic.Datagrams, traffic.Sockets} {
		if r.Counts[kind].Reset == 0 {
			t.Errorf("without a server no %s are reset:\n%s", kind, r)
		}
	}
	if n := r.Counts[traffic.Streams].Reset; n != 16 {
		t.Errorf("%d streams are reset", n)
	}
	if text := r.String(); !strings.Contains(text, `after "no server"`) || !strings.Contains(text, "the node's kernel has") {
		t.Errorf("no step is named, or nothing of the kernel:\n%s", text)
	}
	w.Mark("another pod")
	if err := bed.RemovePod("pod-a"); err != nil {
		t.Fatal(err)
	}
	addPod(t, bed, "pod-b", addresses)
	if err := w.Settle(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	r = w.Report()
	for _, kind := range []traffic.Kind{traffic.Sockets, traffic.AffinityTCP, traffic.AffinityUDP} {
		if r.Counts[kind].Moved == 0 {
			t.Errorf("no %s moved:\n%s", kind, r)
		}
	}
}
