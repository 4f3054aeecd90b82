// Package outcomestest has clients of each kind ask backends that answer, refuse, or are silent, and compares that with
// the outcomes that are told of it.
package outcomestest

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// rows have three Services: 1 answers, 2 is silent, 3 refuses.
const rows = `
pods 10.244.0.0/16
pods fd00::af4:0/112
backend default/closed cluster 10.244.1.2:81 local
backend default/closed cluster6 [fd00::af4:102]:81 local
backend default/silent cluster 10.244.1.3:80 local
backend default/silent cluster6 [fd00::af4:103]:80 local
backend default/web cluster 10.244.1.2:80 local
backend default/web cluster6 [fd00::af4:102]:80 local
frontend 10.96.0.1:80/tcp any forward default/web cluster snat SNAT
frontend 10.96.0.2:80/tcp any forward default/silent cluster snat SNAT
frontend 10.96.0.3:80/tcp any forward default/closed cluster snat SNAT
frontend [fd00::a60:1]:80/tcp any forward default/web cluster6 snat SNAT
frontend [fd00::a60:2]:80/tcp any forward default/silent cluster6 snat SNAT
frontend [fd00::a60:3]:80/tcp any forward default/closed cluster6 snat SNAT
`

// Rows are those of the Services. snat says whose source addresses are replaced, as in a row.
func Rows(t testing.TB, snat string) *model.State {
	t.Helper()
	s, err := model.ParseState(strings.ReplaceAll(rows, "SNAT", snat))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// AddServices adds so many that no client asks, of two backends each.
func AddServices(s *model.State, n int) {
	for i := range n {
		id := model.PoolID{Service: fmt.Sprintf("idle/s%d", i)}
		at := netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)})
		s.Frontends[model.Key{Addr: at, Port: 80, Protocol: model.TCP}] = model.Frontend{
			Verdict: model.Forward, Pool: id,
		}
		s.Pools[id] = model.Pool{Backends: []model.Backend{
			{Addr: netip.AddrFrom4([4]byte{10, 245, byte(i >> 8), byte(i)}), Port: 80, Weight: 1},
			{Addr: netip.AddrFrom4([4]byte{10, 246, byte(i >> 8), byte(i)}), Port: 80, Weight: 1},
		}}
	}
}

// NewBed makes a node with the backends of Rows, and a pod that is a client. With cgroup, both are in one of their own.
func NewBed(t testing.TB, cgroup bool) *testbed.Bed {
	t.Helper()
	http := []testbed.PodPort{{Protocol: model.TCP, Port: 80}}
	bed := testbed.Need(t, testbed.Spec{Cgroup: cgroup, Pods: []testbed.PodSpec{
		{Name: "web", Ports: http}, {Name: "silent", Ports: http}, {Name: "client"},
	}})
	if err := bed.Do("silent", unplug); err != nil {
		t.Fatal(err)
	}
	return bed
}

// unplug has the devices of a pod lose all packets.
func unplug() error {
	devices, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, d := range devices {
		if d.Flags&net.FlagLoopback != 0 {
			continue
		}
		link, err := netlink.LinkByName(d.Name)
		if err == nil {
			err = netlink.LinkSetDown(link)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Take is how outcomes are told: those of the time since the last call.
type Take func(answers bool, f func(model.Outcome)) error

type run struct {
	testing.TB
	bed  *testbed.Bed
	take Take
}

// Run asks the Services of Rows. Each connection is to be told as what it was, once, and answers only if they are asked
// for.
func Run(t testing.TB, bed *testbed.Bed, take Take) {
	t.Helper()
	r := run{t, bed, take}
	r.taken(false)
	answers, refusals := r.all(1, "10.244.1.2:80", "answered"), r.all(3, "10.244.1.2:81", "refused")
	r.ask(testbed.DefaultTimeout, 1, 3)
	r.equal("if only failures are asked for", refusals, r.taken(true))
	r.ask(testbed.DefaultTimeout, 1, 3)
	r.equal("if answers are asked for, too", append(answers, refusals...), r.taken(true))
	r.equal("twice", nil, r.taken(false))
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.ask(4*time.Second, 2) // in which a client sends three times
	}()
	var silent []string
	eventually.Taking(time.Second).True(t, "all are told", func() bool {
		silent = append(silent, r.taken(false)...)
		return len(silent) >= 6
	})
	<-done
	r.equal("of silence", r.all(2, "10.244.1.3:80", "unanswered"), append(silent, r.taken(false)...))
}

func places() []testbed.Place { return []testbed.Place{testbed.Node, "client", testbed.Outside} }

// service is the address of one, in both families.
func service(n int) [2]netip.AddrPort {
	v4 := netip.AddrFrom4([4]byte{10, 96, 0, byte(n)})
	return [2]netip.AddrPort{netip.AddrPortFrom(v4, 80), netip.AddrPortFrom(testbed.EmbedV6(v4), 80)}
}

// ask has all clients ask Services at the same time.
func (r run) ask(patience time.Duration, services ...int) {
	done := make(chan error)
	n := 0
	for _, from := range places() {
		for _, s := range services {
			for _, to := range service(s) {
				n++
				go func() {
					_, err := r.bed.Probe(r.Context(), testbed.Probe{From: from, To: to, Timeout: patience})
					done <- err
				}()
			}
		}
	}
	for range n {
		if err := <-done; err != nil {
			r.Error(err)
		}
	}
}

// all are the lines for all clients of a Service.
func (r run) all(s int, backend, result string) (lines []string) {
	at := netip.MustParseAddrPort(backend)
	for i, to := range service(s) {
		b := at
		if i == 1 {
			b = netip.AddrPortFrom(testbed.EmbedV6(at.Addr()), at.Port())
		}
		for _, from := range places() {
			lines = append(lines, fmt.Sprintf("tcp %s by %s %s from %s", to, b, result, from))
		}
	}
	return lines
}

func (r run) taken(answers bool) (lines []string) {
	r.Helper()
	err := r.take(answers, func(o model.Outcome) {
		from := r.bed.Owner(o.Client)
		lines = append(lines, fmt.Sprintf("%s %s by %s %s from %s", o.Protocol, o.To, o.Backend, o.Result, from))
	})
	if err != nil {
		r.Fatal(err)
	}
	return lines
}

func (r run) equal(when string, want, got []string) {
	r.Helper()
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(want, got) {
		r.Errorf("%s, told:\n%s\nwant:\n%s", when, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
