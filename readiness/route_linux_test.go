package readiness

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

func TestReach(t *testing.T) {
	bed := testbed.Need(t, testbed.Spec{Pods: []testbed.PodSpec{
		{Name: "web", Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}}},
		{Name: "mute"},
		{Name: "beyond", Node: testbed.LAN, Addrs: []netip.Addr{netip.MustParseAddr("100.64.0.9")}},
	}})
	on := func(place testbed.Place, command string) {
		t.Helper()
		words := strings.Fields(command)
		if out, err := bed.Command(t.Context(), place, words[0], words[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	on(testbed.Node, "ip route del 100.64.0.9")
	on("mute", "nft table inet t { chain c { type filter hook input priority 0; drop; }; }") // but it has an address
	for _, c := range []struct {
		name string
		to   netip.AddrPort
		want string // empty: it is reached
	}{
		{"serves", netip.AddrPortFrom(bed.Addr("web", false), 8080), ""},
		{"refuses", netip.AddrPortFrom(bed.Addr("web", true), anyPort), ""},
		{"the node itself", netip.AddrPortFrom(bed.Addr(testbed.Node, true), anyPort), ""},
		{"silent", netip.AddrPortFrom(bed.Addr("mute", false), anyPort), "10.244.1.3:1: i/o timeout"},
		{"nobody's", netip.MustParseAddrPort("10.244.1.99:80"), "no route to host"},
		{"beyond the default route", netip.MustParseAddrPort("100.64.0.9:80"), "no route but the default one"},
		{"beyond that of IPv6", netip.MustParseAddrPort("[fd01::9]:80"), "no route but the default one"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var err error
			failed := bed.Do(testbed.Node, func() error {
				err = reach(t.Context(), c.to)
				return nil
			})
			if failed != nil {
				t.Fatal(failed)
			}
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}
