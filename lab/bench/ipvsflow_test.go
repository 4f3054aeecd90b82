package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

// sourceNet are addresses of the client: of pods, for every proxy. IPVS remembers a connection for a while
// after its end, so that one from the same address and port would not be new; no source is used twice.
var sourceNet = netip.MustParsePrefix("10.244.64.0/18")

// newFlowArena is a treeArena whose client has all addresses of sourceNet, too.
func newFlowArena(b *testing.B) *arena {
	b.Helper()
	a := newTreeArena(b)
	command(b, a.bed, clientPod, "ip", "route", "add", "local", sourceNet.String(), "dev", "lo")
	pod := a.bed.Addr(clientPod, false)
	command(b, a.bed, testbed.Node, "ip", "route", "add", sourceNet.String(), "via", pod.String(), "onlink",
		"dev", device(b, a.bed, pod))
	return a
}

// sources hands out addresses and ports that were not used before.
type sources struct{ n int }

const firstPort, lastPort = 1024, 65535

func (s *sources) bind(fd int) error {
	const ports = lastPort - firstPort + 1
	to := &unix.SockaddrInet4{Port: firstPort + s.n%ports, Addr: nth(sourceNet.Addr(), s.n/ports).As4()}
	s.n++
	if err := unix.Bind(fd, to); err != nil {
		return fmt.Errorf("bind to %s port %d: %w", netip.AddrFrom4(to.Addr), to.Port, err)
	}
	return nil
}

// flowsTo are those of an arena's client to one address.
func (a *arena) flowsTo(to netip.AddrPort, from *sources) *client {
	c := a.target(to)
	c.bind = from.bind
	return c
}

// flowsToEach are those to each of n Services in turn.
func (a *arena) flowsToEach(n int, from *sources) *client {
	return a.client(client{place: clientPod, protocol: tcp, bind: from.bind}, n)
}

// An established flow is asked so often in a slice, after some that do not count.
const (
	roundTrips = 1000
	unasked    = 100
)

// established is a slice of round trips on one connection: a byte to the server and one back. The calling thread
// is both ends, so that they cost no switches of tasks.
func (c *client) established() (took []time.Duration, err error) {
	err = c.bed.Do(c.place, func() error {
		if err := blockSignals(); err != nil {
			return err
		}
		here, there, err := c.open()
		if err != nil {
			return err
		}
		defer unix.Close(there)
		defer unix.Close(here) // first, by a reset
		for range roundTrips + unasked {
			begin := time.Now()
			if err := errors.Join(pass(here, there), pass(there, here)); err != nil {
				return err
			}
			took = append(took, time.Since(begin))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return took[unasked:], nil
}

// open returns both ends of a new connection.
func (c *client) open() (here, there int, err error) {
	here, err = c.socket(&c.targets[c.next])
	if err != nil {
		return 0, 0, err
	}
	if _, err = c.dial(here, &c.targets[c.next]); err == nil {
		there, err = c.accept()
	}
	if err == nil {
		err = unix.SetNonblock(here, true)
	}
	if err != nil {
		unix.Close(here)
		return 0, 0, fmt.Errorf("an established flow: %w", err)
	}
	c.next = (c.next + 1) % len(c.targets)
	return here, there, nil
}

// accept takes a connection at the first server. Where it is carried by a process, it comes a little later.
func (c *client) accept() (there int, err error) {
	for begin := time.Now(); ; {
		there, _, err = unix.Accept4(c.tcp[0], unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		if !errors.Is(err, unix.EAGAIN) || time.Since(begin) > 10*time.Second {
			return there, err
		}
	}
}

// pass sends a byte from one socket to another. The kernel has carried it there when write returns, as a rule.
func pass(from, to int) error {
	var b [1]byte
	if _, err := unix.Write(from, b[:]); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	for begin := time.Now(); ; {
		_, err := unix.Read(to, b[:])
		if !errors.Is(err, unix.EAGAIN) || time.Since(begin) > time.Second {
			return err
		}
	}
}

// flowKind is a kind of flow that is compared.
type flowKind struct{ name, title string }

func flowKinds() []flowKind {
	return []flowKind{
		{"last", "a new flow to one Service, the last of a list: connect()"},
		{"each", "a new flow to each Service in turn: connect()"},
		{"established", "an established flow: a byte there and back"},
	}
}

const directAgain = "direct again (A/A)"

// ipvsFlows compares flows through all that is programmed with those to a pod on a node without any rules.
func ipvsFlows(b *testing.B, sizes []int, all []*ipvsEntry) {
	var variants []Variant
	add := func(name string, last, each *client) {
		slices := []func() ([]time.Duration, error){last.slice, each.slice, last.established}
		for i, kind := range flowKinds() {
			variants = append(variants, Variant{kind.name + name, slices[i]})
		}
	}
	for _, name := range []string{direct, directAgain} {
		c := newFlowArena(b).flowsTo(netip.AddrPortFrom(podAddrs[openPod], podPort), &sources{})
		add(name, c, c)
	}
	for _, e := range all {
		from := &sources{}
		add(e.at(), e.arena.flowsTo(e.last, from), e.arena.flowsToEach(e.services, from))
	}
	runtime.GC()
	samples, err := Interleave(variants, rounds(b, 20))
	if err != nil {
		b.Fatal(err)
	}
	for _, kind := range flowKinds() {
		reportFlows(b, kind, sizes, samples)
	}
}

func (e *ipvsEntry) at() string { return fmt.Sprint(e.name, e.services) }

// reportFlows prints a kind of flow: what it takes, as ratios to the control, and how that grows.
func reportFlows(b *testing.B, kind flowKind, sizes []int, samples Samples) {
	b.Helper()
	control := samples.Series(kind.name+direct, 0.5)
	head := []string{kind.title}
	for _, n := range sizes {
		head = append(head, fmt.Sprint(n))
	}
	rows := [][]string{append(head, "largest / smallest", "more than direct, at the largest")}
	for _, r := range ipvsRivals() {
		row := []string{r.name}
		for _, n := range sizes {
			row = append(row, samples.Series(kind.name+fmt.Sprint(r.name, n), 0.5).Ratio(control).String())
		}
		least := samples.Series(kind.name+fmt.Sprint(r.name, sizes[0]), 0.5)
		most := samples.Series(kind.name+fmt.Sprint(r.name, sizes[len(sizes)-1]), 0.5)
		growth := most.Ratio(least)
		rows = append(rows, append(row, growth.String(), show(most.minus(control).Duration())))
		b.ReportMetric(growth.Median, compact("growth-"+kind.name+"-"+r.name))
	}
	again := samples.Series(kind.name+directAgain, 0.5).Ratio(control)
	rows = append(rows, []string{directAgain, again.String()})
	printTable(fmt.Sprintf("ratios to direct, which takes %s: medians of %d rounds of %d",
		show(control.Duration()), len(control), len(samples[kind.name+direct][0])), rows...)
}
