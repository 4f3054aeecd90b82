package userspace_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// TestLoop: a backend may be a NodePort of the own Service, or of one that leads back. It is treated as a port on which
// no process listens. The process does not serve its own connections.
func TestLoop(t *testing.T) {
	for _, way := range []userspace.Redirect{userspace.ByTPROXY, userspace.ByNAT, userspace.ByPlane, userspace.ByListening} {
		t.Run(string(way), func(t *testing.T) { testLoop(t, way) })
	}
}

func testLoop(t *testing.T, way userspace.Redirect) {
	n := start(t, userspace.Options{Redirect: way, MaxConnections: 30, MaxFlows: 30})
	node := n.bed.Addr(testbed.Node, false)
	rows := "pods 10.244.0.0/16\n"
	for _, s := range []struct {
		name string
		port int
		to   []int
	}{{"default/itself", 30080, []int{30080}}, {"default/there", 30081, []int{30082}}, {"default/back", 30082, []int{30081}},
		{"default/served", 30083, []int{30083, 8080}}} {
		rows += fmt.Sprintf("pool %s cluster\npool %[1]s-udp cluster\n", s.name)
		for _, to := range s.to {
			at := fmt.Sprintf("%s:%d", node, to)
			if to == 8080 {
				at = "10.244.1.11:8080"
			}
			rows += fmt.Sprintf("backend %[1]s cluster %[2]s local\nbackend %[1]s-udp cluster %[3]s local\n",
				s.name, at, strings.Replace(at, ":8080", ":5353", 1))
		}
		rows += fmt.Sprintf("frontend %[3]s:%[2]d/tcp any forward %[1]s cluster snat always\n"+
			"frontend %[3]s:%[2]d/udp any forward %[1]s-udp cluster snat always\n", s.name, s.port, node)
	}
	s, err := model.ParseState(rows)
	if err != nil {
		t.Fatal(err)
	}
	n.resync(s)
	for _, from := range []testbed.Place{"client", testbed.Node, testbed.Outside} {
		for port, want := range map[uint16]string{30080: "", 30081: "", 30082: "", 30083: "pod-a"} {
			o, err := n.bed.Probe(t.Context(), testbed.Probe{
				From: from, To: netip.AddrPortFrom(node, port), Timeout: eventually.Patience(),
			})
			if err != nil || o.Backend != want || want == "" && o.Result != testbed.Refused {
				t.Errorf("from %s to port %d: %v %v", from, port, o, err)
			}
			o, err = n.bed.Probe(t.Context(), testbed.Probe{
				From: from, To: netip.AddrPortFrom(node, port), Protocol: model.UDP, Timeout: 300 * time.Millisecond,
			})
			if err != nil || o.Result == testbed.Answered && o.Backend != want {
				t.Errorf("from %s to port %d/udp: %v %v", from, port, o, err)
			}
		}
	}
	c, err := n.plane.Counters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log(c)
	for _, table := range c.Tables {
		if table.Full+table.Evictions > 0 {
			t.Errorf("the table of %s has been full", table.Name)
		}
	}
}
