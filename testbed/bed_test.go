package testbed

import (
	"net/netip"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
)

func newBed(t testing.TB, s Spec) *Bed {
	t.Helper()
	b, err := New(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func TestSmoke(t *testing.T) {
	start := time.Now()
	ports := []PodPort{{model.TCP, 80}, {model.UDP, 80}}
	b := newBed(t, Spec{Pods: []PodSpec{{Name: "a", Ports: ports}, {Name: "b", Node: NodeB, Ports: ports}}})
	t.Log(time.Since(start))
	start = time.Now()
	for _, from := range []Place{Node, NodeB, Outside, "a", "b"} {
		for _, to := range []Place{"a", "b"} {
			for _, v6 := range []bool{false, true} {
				for _, p := range []model.Protocol{model.TCP, model.UDP} {
					for _, port := range []uint16{80, 81} {
						o, err := b.Probe(t.Context(), Probe{From: from, To: netip.AddrPortFrom(b.Addr(to, v6), port), Protocol: p})
						t.Log(from, to, v6, p, port, o, err, o.RTT)
					}
				}
			}
		}
	}
	for _, from := range []Place{Node, NodeB, Outside, "a", "b"} {
		for _, to := range []string{"10.96.0.1:80", "[fd00::a60:1]:80", "203.0.113.1:80"} {
			for _, p := range []model.Protocol{model.TCP, model.UDP} {
				o, err := b.Probe(t.Context(), Probe{From: from, To: netip.MustParseAddrPort(to), Protocol: p})
				t.Log(from, to, p, o, err, o.RTT)
			}
		}
	}
	t.Log(time.Since(start))
	start = time.Now()
	if _, err := b.AddPod(t.Context(), PodSpec{Name: "c", Ports: ports}); err != nil {
		t.Fatal(err)
	}
	t.Log("pod", time.Since(start))
	out, err := b.Command(t.Context(), Node, "ip", "a").CombinedOutput()
	t.Logf("%s %v", out, err)
	out, err = b.Command(t.Context(), "a", "ip", "r").CombinedOutput()
	t.Logf("%s %v", out, err)
}
