package load

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

const port = 7000

// newBed has a pod whose server is up, and paths to it in both families.
func newBed(t *testing.T) (*testbed.Bed, *Servers, Spec) {
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
	servers := serve(t, bed, "pod-a")
	s := Spec{Streams: 16, Interval: 10 * time.Millisecond, Pause: 10 * time.Millisecond}
	for _, v6 := range []bool{false, true} {
		p := Path{From: testbed.Node, To: netip.AddrPortFrom(bed.Addr("pod-a", v6), port)}
		s.Paths = append(s.Paths, p)
		s.Sticky = append(s.Sticky, p)
	}
	return bed, servers, s
}

func addPod(t *testing.T, bed *testbed.Bed, name string, addrs []netip.Addr) {
	t.Helper()
	if _, err := bed.AddPod(t.Context(), testbed.PodSpec{Name: name, Addrs: addrs}); err != nil {
		t.Fatal(err)
	}
}

func serve(t *testing.T, bed *testbed.Bed, pod testbed.Place) *Servers {
	t.Helper()
	servers, err := Serve(bed, []testbed.Place{pod}, port)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(servers.Close)
	return servers
}

func start(t *testing.T, bed *testbed.Bed, s Spec) *Load {
	t.Helper()
	l, err := Start(t.Context(), bed, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	return l
}

func TestLoad(t *testing.T) {
	bed, _, s := newBed(t)
	l := start(t, bed, s)
	if err := l.Open(4); err != nil {
		t.Error(err)
	}
	if err := l.Settle(t.Context(), 3); err != nil {
		t.Error(err)
	}
	r := l.Stop()
	if r.Total().Bad() || len(r.Faults) > 0 || r.Counts[Streams].Attempts != 20 {
		t.Errorf("nothing was done to it:\n%s", r)
	}
	for kind, c := range r.Counts {
		if c.Answered < 6 {
			t.Errorf("%s: only %d answers", Kind(kind), c.Answered)
		}
	}
}

// Everything that a client could notice is noticed: servers that end, and others in their place.
func TestLoad_faults(t *testing.T) {
	bed, servers, s := newBed(t)
	s.Timeout = time.Second // nobody tells a socket that is not connected
	l := start(t, bed, s)
	before := l.Report()
	addresses := []netip.Addr{bed.Addr("pod-a", false), bed.Addr("pod-a", true)}
	l.Mark("no server")
	servers.Close()
	if err := l.Settle(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	r := l.Report().Since(before)
	for _, kind := range []Kind{Connections, Streams, Datagrams, Sockets} {
		if r.Counts[kind].Reset == 0 {
			t.Errorf("without a server no %s are reset:\n%s", kind, r)
		}
	}
	if n := r.Counts[Streams].Reset; n != 16 {
		t.Errorf("%d streams are reset", n)
	}
	if text := r.String(); !strings.Contains(text, `after "no server"`) {
		t.Errorf("no step is named:\n%s", text)
	}
	l.Mark("another pod")
	if err := bed.RemovePod("pod-a"); err != nil {
		t.Fatal(err)
	}
	addPod(t, bed, "pod-b", addresses)
	serve(t, bed, "pod-b")
	if err := l.Settle(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	r = l.Report()
	for _, kind := range []Kind{Sockets, StickyTCP, StickyUDP} {
		if r.Counts[kind].Moved == 0 {
			t.Errorf("no %s moved:\n%s", kind, r)
		}
	}
}
