package memory

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/model"
)

const served = `backend default/dns cluster 10.244.1.11:5353 local
backend default/web cluster 10.244.1.11:8080 local
backend default/web cluster 10.244.2.13:8080
backend default/web cluster 10.244.2.14:8080 weight 0
frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster
frontend 10.96.0.10:53/udp any forward default/dns cluster snat offcluster
guard 10.96.0.0/16 drop
pods 10.244.0.0/16
pool default/dns cluster
pool default/web cluster affinity 10m0s
`

// bed is a Kernel and what is done to it.
type bed struct {
	*testing.T
	Kernel
	s *model.State
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// plane opens one in a stage and has it hold all rows.
func (b *bed) plane(name string, n Nature, to dataplane.Stage) dataplane.Dataplane {
	b.Helper()
	p, err := b.Driver(name, n).Open(dataplane.Config{})
	b.must(err)
	_, err = p.SetStage(b.Context(), nil, to)
	b.must(err)
	b.must(p.Sync(b.Context(), b.s))
	return p
}

func (b *bed) set(p dataplane.Dataplane, to dataplane.Stage) int {
	b.Helper()
	open, err := p.SetStage(b.Context(), b.s, to)
	b.must(err)
	return open
}

// tcp is a packet of one of a client's connections.
func tcp(port uint16) Packet { return to("10.96.0.10:80", model.TCP, port) }

func to(addr string, protocol model.Protocol, port uint16) Packet {
	return Packet{SourcePort: port, Packet: model.Packet{
		Protocol: protocol, Source: netip.MustParseAddr("10.244.1.20"), Destination: netip.MustParseAddrPort(addr),
		Interface: "cali0",
	}}
}

// by expects that a plane answers, for a connection that begins or goes on.
func (b *bed) by(plane string, p Packet, begins bool) model.Backend {
	b.Helper()
	a := b.Send(p)
	if a.Plane != plane || a.Begins != begins {
		b.Errorf("answered by %q, begins: %t; should be by %q, %t", a.Plane, a.Begins, plane, begins)
	}
	return a.Backend
}

func (b *bed) left(d dataplane.Driver, want dataplane.Leftover) {
	b.Helper()
	if got, err := d.Inspect(); err != nil || got != want {
		b.Errorf("left is %+v, %v; should be %+v", got, err, want)
	}
}

func TestTracked(t *testing.T) {
	b := &bed{T: t, s: state(t, served)}
	old := b.plane("b", Tracked, dataplane.Active)
	b.by("b", tcp(1), true)
	b.plane("a", Tracked, dataplane.Standby) // serves all the same
	b.by("a", tcp(2), true)
	b.set(old, dataplane.Draining)
	b.must(old.Remove(t.Context()))
	b.must(old.Close())
	b.left(b.Driver("b", Tracked), dataplane.Leftover{})
	b.by("b", tcp(1), false)
	b.End(tcp(1))
	b.by("a", tcp(1), true)
}

func TestTabled(t *testing.T) {
	b := &bed{T: t, s: state(t, served)}
	d := b.Driver("a", Tabled)
	b.must(b.plane("a", Tabled, dataplane.Active).Close())
	b.left(d, dataplane.Leftover{Rules: true})
	b.by("a", tcp(1), true) // without a process
	b.plane("b", Tracked, dataplane.Active)
	for range 2 {
		if n, err := d.Drain(t.Context(), dataplane.Config{}); n != 1 || err != nil {
			t.Error(n, err)
		}
		b.left(d, dataplane.Leftover{Rules: true, Retired: true})
		b.by("a", tcp(1), false)
		b.by("b", tcp(2), true)
		b.End(tcp(2))
	}
	b.End(tcp(1))
	if n, err := d.Drain(t.Context(), dataplane.Config{}); n != 0 || err != nil {
		t.Error(n, err)
	}
	b.left(d, dataplane.Leftover{})
	again := b.plane("a", Tabled, dataplane.Active)
	b.by("a", tcp(3), true)
	b.must(again.Remove(t.Context()))
	b.by("b", tcp(3), true) // it was cut
}

func TestRelayed(t *testing.T) {
	b := &bed{T: t, s: state(t, served)}
	old, now := b.plane("b", Relayed, dataplane.Active), b.plane("a", Relayed, dataplane.Standby)
	b.by("b", tcp(1), true)
	b.set(now, dataplane.Active)
	if n := b.set(old, dataplane.Draining); n != 1 || old.Open() != 1 || now.Open() != 0 {
		t.Error(n, old.Open(), now.Open())
	}
	b.by("b", tcp(1), false)
	b.by("a", tcp(2), true)
	b.must(old.Sync(t.Context(), b.s)) // nothing has told it to be Active again
	b.left(b.Driver("b", Relayed), dataplane.Leftover{Rules: true, Retired: true})
	b.must(old.Close())
	b.by("a", tcp(1), true) // it was cut
	b.must(now.Close())
	if a := b.Send(tcp(1)); a.Verdict != model.Pass {
		t.Error("there is no process, and", a)
	}
	b.plane("a", Relayed, dataplane.Active)
	b.by("a", tcp(1), true)
}

func TestSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bed{T: t, s: state(t, served)}
		old := b.plane("b", Tracked, dataplane.Active)
		want := b.by("b", tcp(1), true)
		bubble.Pass(time.Minute)
		now, err := b.Driver("a", Tracked).Open(dataplane.Config{})
		b.must(err)
		if n, err := now.Learn(t.Context(), b.s, old.Sessions(t.Context(), b.s)); n != 1 || err != nil {
			t.Error(n, err)
		}
		b.must(now.Sync(t.Context(), b.s))
		b.must(old.Remove(t.Context()))
		bubble.Pass(8 * time.Minute)
		if got := b.by("a", tcp(2), true); got != want {
			t.Errorf("%v after %v", got, want)
		}
		bubble.Pass(10 * time.Minute)
		for one, err := range now.Sessions(t.Context(), b.s) {
			t.Error(one, err)
		}
		if got := b.by("a", tcp(3), true); got == want { // the other one's turn
			t.Errorf("%v again", got)
		}
	})
}

// A session ends with its backend, and does not come back with it.
func TestSessions_leave(t *testing.T) {
	b := &bed{T: t, s: state(t, served)}
	p := b.plane("a", Tracked, dataplane.Active)
	old := b.by("a", tcp(1), true)
	without := state(t, strings.ReplaceAll(served, old.AddrPort().String(), "10.244.9.9:9"))
	b.must(p.Apply(t.Context(), without, model.Diff(b.s, without)))
	b.must(p.Apply(t.Context(), b.s, model.Diff(without, b.s)))
	for one, err := range p.Sessions(t.Context(), b.s) {
		t.Error(one, err)
	}
	b.by("a", tcp(1), false)
}

// A plane in force forgets flows of UDP whose backend is gone, and counts. TCP goes on.
func TestForget(t *testing.T) {
	b := &bed{T: t, s: state(t, served)}
	p := b.plane("a", Tracked, dataplane.Active)
	dns := to("10.96.0.10:53", model.UDP, 1)
	b.by("a", dns, true)
	b.by("a", tcp(1), true)
	next := state(t, strings.NewReplacer("10.244.1.11", "10.244.1.12").Replace(served))
	b.must(p.Apply(context.Background(), next, model.Diff(b.s, next)))
	b.by("a", dns, true)
	b.by("a", tcp(1), false)
	c, err := p.Counters(t.Context())
	b.must(err)
	total := uint64(0)
	for _, s := range c.Served {
		total += s.Connections
	}
	if total != 3 {
		t.Error(c)
	}
}
