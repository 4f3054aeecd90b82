package tracked_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/internal/nfnetlink"
	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

const rows = `
backend default/web:dns cluster 10.244.1.2:53 local
backend default/web:dns cluster6 [fd00::af4:102]:53 local
backend default/web:http cluster 10.244.1.2:80 local
frontend 192.0.2.1:30053/udp any forward default/web:dns cluster snat always
frontend [fd00::c000:201]:30053/udp any forward default/web:dns cluster6 snat never
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat never
`

// Each filter lists what it says, and what is forgotten is gone.
func TestList(t *testing.T) {
	t.Parallel()
	bed := newBed(t)
	for _, to := range []string{"192.0.2.1:30053", "[fd00::c000:201]:30053", "192.0.2.1:30080"} {
		dial(t, bed, to)
	}
	lost, err := bed.Probe(t.Context(), testbed.Probe{
		From: "a", To: netip.MustParseAddrPort("10.96.0.99:80"), Timeout: 200 * time.Millisecond,
	})
	if err != nil || lost.Result == testbed.Answered {
		t.Fatal(lost, err)
	}
	c := dialNode(t, bed)
	if n, err := tracked.Count(c); err != nil || n != 4 {
		t.Errorf("there are %d flows (%v), want 4", n, err)
	}
	for name, x := range map[string]struct {
		filter tracked.Filter
		want   string
	}{
		"all": {tracked.Filter{}, `
tcp 10.96.0.99:80 by itself
tcp 192.0.2.1:30080 by 10.244.1.2:80 answered
udp 192.0.2.1:30053 by 10.244.1.2:53 hidden answered
udp [fd00::c000:201]:30053 by [fd00::af4:102]:53 answered`},
		"a protocol": {tracked.Filter{Protocol: model.UDP}, `
udp 192.0.2.1:30053 by 10.244.1.2:53 hidden answered
udp [fd00::c000:201]:30053 by [fd00::af4:102]:53 answered`},
		"a destination": {tracked.Filter{Protocol: model.UDP, To: netip.MustParseAddrPort("192.0.2.1:30053")}, `
udp 192.0.2.1:30053 by 10.244.1.2:53 hidden answered`},
		"a destination of IPv6": {tracked.Filter{Protocol: model.UDP, To: netip.MustParseAddrPort("[fd00::c000:201]:30053")}, `
udp [fd00::c000:201]:30053 by [fd00::af4:102]:53 answered`},
		"a port of destinations": {
			tracked.Filter{Protocol: model.UDP, To: netip.AddrPortFrom(netip.Addr{}, 30053)}, `
udp 192.0.2.1:30053 by 10.244.1.2:53 hidden answered
udp [fd00::c000:201]:30053 by [fd00::af4:102]:53 answered`},
		"another port of destinations": {tracked.Filter{Protocol: model.UDP, To: netip.AddrPortFrom(netip.Addr{}, 53)}, ""},
		"a port of backends": {tracked.Filter{Protocol: model.TCP, Answers: netip.AddrPortFrom(netip.Addr{}, 80)}, `
tcp 10.96.0.99:80 by itself
tcp 192.0.2.1:30080 by 10.244.1.2:80 answered`},
		"a destination's other port": {tracked.Filter{Protocol: model.UDP, To: netip.MustParseAddrPort("192.0.2.1:30080")}, ""},
		"answers of a backend": {tracked.Filter{Protocol: model.TCP, Answers: netip.MustParseAddrPort("10.244.1.2:80")}, `
tcp 192.0.2.1:30080 by 10.244.1.2:80 answered`},
		"answers of its other port": {tracked.Filter{Protocol: model.TCP, Answers: netip.MustParseAddrPort("10.244.1.2:53")}, ""},
		"not answered": {tracked.Filter{Mask: tracked.Answered}, `
tcp 10.96.0.99:80 by itself`},
		"a protocol, answered": {
			tracked.Filter{Protocol: model.TCP, Status: tracked.Answered, Mask: tracked.Answered}, `
tcp 192.0.2.1:30080 by 10.244.1.2:80 answered`},
		"hidden": {tracked.Filter{Status: tracked.NewFrom, Mask: tracked.NewFrom}, `
udp 192.0.2.1:30053 by 10.244.1.2:53 hidden answered`},
		"a mark that nobody has": {tracked.Filter{Mark: 1}, ""},
	} {
		check(t, c, name, x.want, x.filter)
	}
	check(t, c, "several filters, a flow that passes two", `
tcp 10.96.0.99:80 by itself
udp 192.0.2.1:30053 by 10.244.1.2:53 hidden answered`, tracked.Filter{Protocol: model.TCP, Mask: tracked.Answered},
		tracked.Filter{Protocol: model.UDP, To: netip.MustParseAddrPort("192.0.2.1:30053")},
		tracked.Filter{Protocol: model.UDP, Answers: netip.MustParseAddrPort("10.244.1.2:53")})
	if err := tracked.Forget(c, lister(tracked.List).list(t, c, tracked.Filter{Protocol: model.UDP})); err != nil {
		t.Error(err)
	}
	if got := texts(lister(tracked.List).list(t, c, tracked.Filter{Protocol: model.UDP})); got != "" {
		t.Errorf("not forgotten:\n%s", got)
	}
}

// check lists flows by filters, of few and of many.
func check(t *testing.T, c *nfnetlink.Socket, name, want string, filters ...tracked.Filter) {
	t.Helper()
	for how, by := range map[string]lister{"few": tracked.List, "many": tracked.ListByFilters} {
		if got := texts(by.list(t, c, filters...)); got != strings.TrimSpace(want) {
			t.Errorf("%s, of %s:\n%s\nwant%s", name, how, got, want)
		}
	}
}

func newBed(t testing.TB) *testbed.Bed {
	t.Helper()
	s, err := model.ParseState(rows)
	if err != nil {
		t.Fatal(err)
	}
	bed := testbed.Need(t, testbed.Spec{Pods: []testbed.PodSpec{
		{Name: "a", Ports: []testbed.PodPort{{Protocol: model.UDP, Port: 53}, {Protocol: model.TCP, Port: 80}}},
	}})
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
	return bed
}

// dial opens a connection from outside that stays, and is answered.
func dial(t *testing.T, bed *testbed.Bed, to string) {
	t.Helper()
	addr, protocol := netip.MustParseAddrPort(to), model.TCP
	if addr.Port() == 30053 {
		protocol = model.UDP
	}
	c, err := bed.Dial(t.Context(), testbed.Outside, protocol, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Write([]byte("?\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 512)); err != nil {
		t.Fatal(err)
	}
}

func dialNode(t testing.TB, bed *testbed.Bed) (c *nfnetlink.Socket) {
	t.Helper()
	err := bed.Do(testbed.Node, func() (err error) {
		c, err = nfnetlink.Dial()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// lister is one way to list flows.
type lister func(*nfnetlink.Socket, func(*tracked.Flow) bool, ...tracked.Filter) ([]tracked.Flow, error)

// list has the flows that have to do with Services or pods.
func (by lister) list(t *testing.T, c *nfnetlink.Socket, filters ...tracked.Filter) []tracked.Flow {
	t.Helper()
	flows, err := by(c, func(f *tracked.Flow) bool { return f.To.Port() >= 53 }, filters...)
	if err != nil {
		t.Fatal(err)
	}
	return flows
}

func texts(flows []tracked.Flow) string {
	var lines []string
	for _, f := range flows {
		line := fmt.Sprintf("%s %s by %s", f.Protocol, f.To, f.Answers)
		if f.Answers == f.To {
			line = fmt.Sprintf("%s %s by itself", f.Protocol, f.To)
		}
		if f.Back != f.From {
			line += " hidden"
		}
		if f.Status&tracked.Answered != 0 {
			line += " answered"
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
