package conformance_test

import (
	"bufio"
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/ipvs"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/testbed"
	"fairlead.dev/fairlead/testbed/vm"
)

// TestIPVS_drain watches real servers whose backend leaves while there is a connection to it.
func TestIPVS_drain(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	t.Run("goes when its connection has ended", func(t *testing.T) {
		d := newDrain(t, ipvs.Options{})
		flow := d.open(model.TCP, "10.96.0.10:80", "pod-a")
		d.apply(strings.ReplaceAll(drainRows, "10.244.1.11", "10.244.2.13"))
		d.audit()
		d.has("0AF4010B:1F90 Masq 0", true)
		d.has("0AF4020D:1F90 Masq 1", true)
		flow.answers("pod-a")
		// An end in good order is remembered for two minutes.
		if err := flow.Conn.(interface{ SetLinger(int) error }).SetLinger(0); err != nil {
			t.Fatal(err)
		}
		flow.Close()
		d.until("0AF4010B:1F90", false)
	})
	t.Run("goes when its time is over", func(t *testing.T) {
		d := newDrain(t, ipvs.Options{DrainTimeout: 2 * time.Second})
		flow := d.open(model.TCP, "10.96.0.10:80", "pod-a")
		d.apply(strings.ReplaceAll(drainRows, "10.244.1.11", "10.244.2.13"))
		flow.answers("pod-a")
		d.until("0AF4010B:1F90", false)
	})
	t.Run("comes back", func(t *testing.T) {
		d := newDrain(t, ipvs.Options{})
		d.open(model.TCP, "10.96.0.10:80", "pod-a")
		d.apply(strings.ReplaceAll(drainRows, "10.244.1.11", "10.244.2.13"))
		d.apply(drainRows)
		d.audit()
		d.has("0AF4010B:1F90 Masq 1", true)
		d.open(model.TCP, "10.96.0.10:80", "pod-a")
	})
	t.Run("SCTP drains as TCP does", func(t *testing.T) {
		d := newDrain(t, ipvs.Options{})
		flow := d.open(model.SCTP, "10.96.0.10:3868", "pod-a")
		d.apply(strings.ReplaceAll(drainRows, "10.244.1.11", "10.244.2.13"))
		d.audit()
		d.has("0AF4010B:1B58 Masq 0", true)
		flow.answers("pod-a")
	})
	t.Run("UDP is forgotten at once", func(t *testing.T) {
		d := newDrain(t, ipvs.Options{})
		flow := d.open(model.UDP, "10.96.0.10:53", "pod-a")
		d.apply(strings.ReplaceAll(drainRows, "10.244.1.11", "10.244.2.13"))
		d.has("0AF4010B:14E9", false)
		flow.answers("pod-c")
	})
	t.Run("a Service that is gone", func(t *testing.T) {
		d := newDrain(t, ipvs.Options{})
		flow := d.open(model.TCP, "203.0.113.10:80", "pod-a")
		d.apply("guard 10.96.0.0/16 drop\n")
		d.audit()
		flow.answers("pod-a")
		o, err := d.bed.Probe(t.Context(), testbed.Probe{
			From: testbed.Outside, To: netip.MustParseAddrPort("203.0.113.10:80"), Protocol: model.TCP, Timeout: time.Second,
		})
		if err != nil || o.Result != testbed.Refused {
			t.Errorf("a new connection: %s, %v", o, err)
		}
	})
}

// TestIPVS_hostPorts tries what listens on the node at addresses that are local for the sake of IPVS.
func TestIPVS_hostPorts(t *testing.T) {
	t.Parallel()
	if !hasIPVS(t) {
		vm.Replay(t, "IPVS")
		return
	}
	d := newDrain(t, ipvs.Options{})
	for from, places := range map[testbed.Place][]string{
		testbed.Outside: {"203.0.113.10:6443", "10.96.0.10:6443", "10.96.0.99:6443"},
		"client":        {"203.0.113.10:6443", "10.96.0.10:6443", "10.96.0.99:6443"},
		testbed.Node:    {"203.0.113.10:6443", "10.96.0.10:6443", "10.96.0.99:6443"},
	} {
		for _, to := range places {
			o, err := d.bed.Probe(t.Context(), testbed.Probe{
				From: from, To: netip.MustParseAddrPort(to), Protocol: model.TCP, Timeout: time.Second / 4,
			})
			if err != nil || o.Result == testbed.Answered {
				t.Errorf("%s to %s: %s, %v", from, to, o, err)
			}
		}
	}
	o, err := d.bed.Probe(t.Context(), testbed.Probe{
		From: testbed.Outside, To: netip.MustParseAddrPort("192.0.2.1:6443"), Protocol: model.TCP, Timeout: time.Second,
	})
	if err != nil || o.Result != testbed.Answered {
		t.Errorf("the node's own address: %s, %v", o, err)
	}
}

const drainRows = `
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat never
frontend 203.0.113.10:80/tcp any forward default/web:http cluster snat always
backend default/web:http cluster 10.244.1.11:8080
frontend 10.96.0.10:53/udp any forward default/web:dns cluster snat never
backend default/web:dns cluster 10.244.1.11:5353
frontend 10.96.0.10:3868/sctp any forward default/web:s1ap cluster snat never
backend default/web:s1ap cluster 10.244.1.11:7000
guard 10.96.0.0/16 drop
`

// drain is a plane on a cluster, with drainRows at first.
type drain struct {
	*testing.T
	bed   *testbed.Bed
	plane dataplane.Dataplane
	state *model.State
}

func newDrain(t *testing.T, o ipvs.Options) *drain {
	bed, err := conformance.NewBed(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bed.Close() })
	d := &drain{T: t, bed: bed, state: model.NewState()}
	d.check(bed.Do(testbed.Node, func() (err error) {
		if d.plane, err = conntrack.Wrap(ipvs.New(o))(dataplane.Config{}); err != nil {
			return err
		}
		return d.plane.Sync(t.Context(), d.state)
	}))
	t.Cleanup(func() { _ = d.plane.Close() })
	d.apply(drainRows)
	return d
}

func (d *drain) check(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}

func (d *drain) apply(rows string) {
	d.Helper()
	next, err := model.ParseState(rows)
	d.check(err)
	change := model.Diff(d.state, next)
	d.state = next
	d.check(d.plane.Apply(d.Context(), next, change))
}

// audit has the plane look at what drains, which is no drift.
func (d *drain) audit() {
	d.Helper()
	drifts, err := d.plane.Audit(d.Context(), d.state)
	if err != nil || len(drifts) > 0 {
		d.Errorf("audit: %v, %v", drifts, err)
	}
}

// servers are the virtual servers as the kernel prints them, with single spaces.
func (d *drain) servers() string {
	d.Helper()
	out, err := d.bed.Command(d.Context(), testbed.Node, "cat", "/proc/net/ip_vs").CombinedOutput()
	d.check(err)
	return strings.Join(strings.Fields(string(out)), " ")
}

func (d *drain) has(real string, want bool) {
	d.Helper()
	if text := d.servers(); strings.Contains(text, real) != want {
		d.Errorf("%q is there: %t\n%s", real, !want, text)
	}
}

// until calls Audit, as the engine does again and again, until a real server is there or not.
func (d *drain) until(real string, want bool) {
	d.Helper()
	ctx, cancel := context.WithTimeout(d.Context(), time.Minute)
	defer cancel()
	for strings.Contains(d.servers(), real) != want {
		select {
		case <-ctx.Done():
			d.Fatalf("%q is there: %t\n%s", real, !want, d.servers())
		case <-time.After(50 * time.Millisecond):
		}
		d.audit()
	}
}

// drainFlow is an open connection or UDP socket.
type drainFlow struct {
	net.Conn
	*testing.T
	lines *bufio.Reader
}

// open connects, and wants a pod to answer.
func (d *drain) open(p model.Protocol, to, pod string) *drainFlow {
	d.Helper()
	c, err := d.bed.Dial(d.Context(), "client", p, netip.MustParseAddrPort(to))
	d.check(err)
	d.Cleanup(func() { _ = c.Close() })
	f := &drainFlow{c, d.T, bufio.NewReader(c)}
	if p == model.UDP {
		f.answers(pod)
	} else { // the first line comes unasked
		f.reads(pod)
	}
	return f
}

func (f *drainFlow) answers(pod string) {
	f.Helper()
	if _, err := f.Write([]byte("?\n")); err != nil {
		f.Error(err)
	}
	f.reads(pod)
}

func (f *drainFlow) reads(pod string) {
	f.Helper()
	if err := f.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		f.Error(err)
	}
	line, err := f.lines.ReadString('\n')
	if name, _, _ := strings.Cut(line, " "); err != nil || name != pod {
		f.Errorf("%q, %v; want an answer of %s", line, err, pod)
	}
}
