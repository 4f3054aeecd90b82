package conformance

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"fairlead.dev/fairlead/lab/testbed"
)

// TestTraffic_inTurn holds probes that want to see every backend apart. A scheduler that serves the backends in turn,
// as IPVS's rr does, would show two clients that connect in step one of two backends each, however often they try.
func TestTraffic_inTurn(t *testing.T) {
	t.Parallel()
	bed := testbed.Need(t, testbed.Spec{})
	clients := askedBy(t, bed, testbed.NodeB, "192.0.2.2:8080")
	probes, err := parseProbes(`outside tcp 192.0.2.2:8080 -> pod-a|pod-c source outside
		node    tcp 192.0.2.2:8081 -> refused
		node    tcp 192.0.2.2:8080 -> pod-a|pod-c source node
		node-b  tcp 192.0.2.2:8080 -> pod-a|pod-c source node-b`)
	if err != nil {
		t.Fatal(err)
	}
	if err := (&traffic{node: bed}).run(t.Context(), probes); err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprint(slices.Compact(clients()))
	if want := "[192.0.2.9 192.0.2.1 192.0.2.2]"; got != want {
		t.Errorf("one after the other there connect\n%s, want\n%s", got, want)
	}
}

// askedBy serves at an address. Every tenth answer to a client is in the name of pod-c, the others in that of pod-a, so
// that to see both takes each probe many connections. The result tells, once, whose they were, in their order.
func askedBy(t *testing.T, bed *testbed.Bed, place testbed.Place, at string) (clients func() []netip.Addr) {
	var listener net.Listener
	err := bed.Do(place, func() (err error) {
		listener, err = net.Listen("tcp4", at)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	var came []netip.Addr
	var server sync.WaitGroup
	server.Go(func() {
		times := map[netip.Addr]int{}
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			from := c.RemoteAddr().(*net.TCPAddr).AddrPort()
			came = append(came, from.Addr())
			name := "pod-a"
			if times[from.Addr()]++; times[from.Addr()]%10 == 0 {
				name = "pod-c"
			}
			fmt.Fprintf(c, "%s %s\n", name, from)
			c.Close()
		}
	})
	return func() []netip.Addr {
		listener.Close()
		server.Wait()
		return came
	}
}
