package userspace_test

import (
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/userspace"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

const nodePorts = `pods 10.244.0.0/16
pool default/web cluster
backend default/web cluster 10.244.1.11:8080
pool default/dns cluster
backend default/dns cluster 10.244.1.11:5353
frontend 192.0.2.1:30080/tcp any forward default/web cluster snat always
frontend 192.0.2.1:30053/udp any forward default/dns cluster snat always
frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster
frontend 10.96.0.11:80/tcp any reject default/nobody
`

// unprivileged makes the plane of a node by a thread that has no rights, and returns what it logs.
func unprivileged(t *testing.T, n *node) *strings.Builder {
	t.Helper()
	var log strings.Builder
	err := n.plane.Close()
	if err == nil {
		err = n.bed.Do(testbed.Node, func() (err error) {
			if err := dropRights(); err != nil {
				return err
			}
			n.plane, err = userspace.New(userspace.Options{})(dataplane.Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
			return err
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return &log
}

// dropRights takes all capabilities from the calling thread.
func dropRights() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	return unix.Capset(&header, &none[0])
}

// probeNode asks from outside.
func (n *node) probeNode(p model.Protocol, to string) string {
	n.Helper()
	o, err := n.bed.Probe(n.Context(), testbed.Probe{
		From: testbed.Outside, To: netip.MustParseAddrPort(to), Protocol: p, Timeout: eventually.Patience(),
	})
	if err != nil {
		n.Fatal(err)
	}
	if o.Result != testbed.Answered {
		return o.Result.String()
	}
	return o.Backend
}

func TestListen(t *testing.T) {
	n := start(t, userspace.Options{})
	before := n.kernel()
	log := unprivileged(t, n)
	s, err := model.ParseState(nodePorts)
	for range 2 { // the second one finds everything open
		if err == nil {
			err = n.plane.Sync(t.Context(), s)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if who := n.probeNode(model.TCP, "192.0.2.1:30080"); who != "pod-a" {
			t.Error(who)
		}
		if who := n.probeNode(model.UDP, "192.0.2.1:30053"); who != "pod-a" {
			t.Error(who)
		}
	}
	if n.kernel() != before {
		t.Error("something was made in the kernel")
	}
	for _, want := range []string{"without root, or CAP_NET_ADMIN", "destination=10.96.0.10:80/tcp"} {
		if strings.Count(log.String(), want) != 1 {
			t.Errorf("%q is not once in the log:\n%s", want, log)
		}
	}
	next := s.Clone()
	for key := range next.Frontends {
		if key.Protocol == model.TCP {
			delete(next.Frontends, key)
		}
	}
	if err := n.plane.Apply(t.Context(), next, model.Diff(s, next)); err != nil {
		t.Fatal(err)
	}
	if who := n.probeNode(model.TCP, "192.0.2.1:30080"); who != testbed.Refused.String() {
		t.Error(who)
	}
	if who := n.probeNode(model.UDP, "192.0.2.1:30053"); who != "pod-a" {
		t.Error(who)
	}
}

// TestListen_addressComes has another program give the machine a Service's address.
func TestListen_addressComes(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByListening})
	n.sync("tcp", "10.244.2.13:8080")
	if who := n.answers(model.TCP); who == "pod-b" {
		t.Fatal(who)
	}
	out, err := n.bed.Command(t.Context(), testbed.Node, "ip", "address", "add", "10.96.0.10/32", "dev", "lo").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n.sync("tcp", "10.244.2.13:8080")
	if who := n.answers(model.TCP); who != "pod-b" {
		t.Fatal(who)
	}
	c := n.dial()
	if err := n.plane.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a connection: %v", err)
	}
}

// TestListen_replaced: a plane with other settings gets the addresses, and connections of the one before live on.
func TestListen_replaced(t *testing.T) {
	n := start(t, userspace.Options{Redirect: userspace.ByListening})
	s, err := model.ParseState(nodePorts)
	if err == nil {
		err = n.plane.Sync(t.Context(), s)
	}
	if err != nil {
		t.Fatal(err)
	}
	c, err := n.bed.Dial(t.Context(), testbed.Outside, model.TCP, netip.MustParseAddrPort("192.0.2.1:30080"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	old := n.plane
	eventually.Equal(t, "connections", 1, old.Open)
	n.at(testbed.Node, func() (err error) {
		n.plane, err = userspace.New(userspace.Options{Redirect: userspace.ByListening})(dataplane.Config{})
		return err
	})
	defer old.Close()
	if open, err := old.SetStage(t.Context(), s, dataplane.Standby); open != 1 || err != nil {
		t.Errorf("%d connections, %v", open, err)
	}
	if s, err = model.ParseState(strings.ReplaceAll(nodePorts, "10.244.1.11", "10.244.2.13")); err == nil {
		err = n.plane.Sync(t.Context(), s)
	}
	if err != nil {
		t.Fatal(err)
	}
	for p, at := range map[model.Protocol]string{model.TCP: "192.0.2.1:30080", model.UDP: "192.0.2.1:30053"} {
		if who := n.probeNode(p, at); who != "pod-b" {
			t.Errorf("%s: %s", p, who)
		}
	}
}
