package bench

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(m.Run))
}

// rounds counts the rounds of a benchmark, which are its iterations: at least so many, whatever
// -benchtime says.
func rounds(b *testing.B, atLeast int) (next func() bool) {
	n, more := 0, true
	return func() bool {
		n++
		more = more && b.Loop()
		return more || n <= atLeast
	}
}

// newPlane is the data plane on the node of a cluster, as the daemon has it.
func newPlane(b *testing.B, bed *testbed.Bed) dataplane.Dataplane {
	b.Helper()
	var plane dataplane.Dataplane
	err := bed.Do(testbed.Node, func() (err error) {
		plane, err = localhost.Wrap(conntrack.Wrap(nftables.New))(dataplane.Config{})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := plane.Close(); err != nil {
			b.Error(err)
		}
	})
	return plane
}

// fleet is a number of Services that are alike.
type fleet struct {
	services  int
	endpoints func(service int) []netip.Addr // IPv4; empty: no slice of that family
	dual      bool                           // with IPv6 twins
}

// ports on which each Service listens and its endpoints serve.
const (
	servicePort = 80
	podPort     = 8080
)

func serviceAddr(i int) netip.Addr { return nth(testbed.ServiceCIDRs()[0].Addr(), i+10) }

func serviceName(i int) service.Name {
	return service.Name{Namespace: "default", Name: fmt.Sprintf("svc-%d", i)}
}

// nth is the n-th address after an IPv4 address.
func nth(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(n)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// apart gives every Service m endpoints of its own, outside the pod network of the cluster.
func apart(m int) func(int) []netip.Addr {
	first := netip.MustParseAddr("10.130.0.0")
	return func(i int) (addrs []netip.Addr) {
		for j := range m {
			addrs = append(addrs, nth(first, i*m+j))
		}
		return addrs
	}
}

// batch are the objects of a fleet, and the node.
func (f fleet) batch(bed *testbed.Bed) service.Batch {
	ips := []netip.Addr{bed.Addr(testbed.Node, false), bed.Addr(testbed.Node, true)}
	b := service.Batch{
		Services:     make(service.Objects[service.Service], 0, f.services),
		Slices:       make(service.Objects[service.Slice], 0, f.services),
		Node:         &service.Node{Name: string(testbed.Node), IPs: ips, PodCIDRs: testbed.PodCIDRs(testbed.Node), Eligible: true},
		ServiceCIDRs: testbed.ServiceCIDRs(),
		Addrs:        ips,
	}
	for i := range f.services {
		f.add(&b, i)
	}
	return b
}

func (f fleet) add(b *service.Batch, i int) {
	s := &service.Service{Name: serviceName(i), Created: 1, ClusterIPs: []netip.Addr{serviceAddr(i)}}
	for _, p := range []model.Protocol{model.TCP, model.UDP} {
		if p == model.TCP || f.dual {
			s.Ports = append(s.Ports, service.Port{Name: p.String(), Protocol: p, Port: servicePort})
		}
	}
	addSlice(b, s, f.endpoints(i))
	if f.dual {
		s.ClusterIPs = append(s.ClusterIPs, testbed.EmbedV6(s.ClusterIPs[0]))
		var twins []netip.Addr
		for _, a := range f.endpoints(i) {
			twins = append(twins, testbed.EmbedV6(a))
		}
		addSlice(b, s, twins)
	}
	b.Services.Set(s.Name, s)
}

func addSlice(b *service.Batch, s *service.Service, addrs []netip.Addr) {
	slice := &service.Slice{Name: s.Name, Service: s.Name.Name}
	slice.Name.Name += "-4"
	for _, p := range s.Ports {
		slice.Ports = append(slice.Ports, service.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: podPort})
	}
	for _, a := range addrs {
		if a.Is6() {
			slice.Name.Name = s.Name.Name + "-6"
		}
		e := service.Endpoint{Addr: a, Node: service.NodeNamed(string(testbed.NodeB)), Ready: true, Serving: true, Weight: 1}
		if testbed.PodCIDRs(testbed.Node)[0].Contains(a) {
			e.Node = service.NodeNamed(string(testbed.Node))
		}
		slice.Endpoints = append(slice.Endpoints, e)
	}
	b.Slices.Set(slice.Name, slice)
}

// tableOptions are those that most clusters have.
func tableOptions() service.Options {
	return service.Options{
		NodeName:    string(testbed.Node),
		DetectLocal: service.DetectLocal{Mode: service.LocalClusterCIDR, ClusterCIDRs: testbed.ClusterCIDRs()},
	}
}

func newTable(b *testing.B) *service.Table {
	b.Helper()
	table, err := service.NewTable(tableOptions())
	if err != nil {
		b.Fatal(err)
	}
	return table
}

// state is what the fleet means.
func (f fleet) state(b *testing.B, table *service.Table, bed *testbed.Bed) *model.State {
	b.Helper()
	state, _, problems := table.Update(f.batch(bed))
	if len(problems) > 0 {
		b.Fatal(problems)
	}
	return state
}

// install makes the node of a cluster serve a fleet.
func (f fleet) install(b *testing.B, bed *testbed.Bed) (dataplane.Dataplane, *service.Table) {
	b.Helper()
	plane, table := newPlane(b, bed), newTable(b)
	if err := plane.Sync(context.Background(), f.state(b, table, bed)); err != nil {
		b.Fatal(err)
	}
	return plane, table
}

// sizesOf are the numbers of Services that the environment names, or else these.
func sizesOf(b *testing.B, otherwise string) []int {
	b.Helper()
	return numbersOf(b, sizesVariable, otherwise)
}

// numbersOf are those in a variable of the environment, or else these.
func numbersOf(b *testing.B, variable, otherwise string) (numbers []int) {
	b.Helper()
	for word := range strings.SplitSeq(cmp.Or(os.Getenv(variable), otherwise), ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 {
			b.Fatalf("%s: %q is not a number", variable, word)
		}
		numbers = append(numbers, n)
	}
	return numbers
}

// roundsOf is how many rounds the environment wants, or else so many.
func roundsOf(b *testing.B, otherwise int) int {
	b.Helper()
	text := os.Getenv(roundsVariable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		b.Fatalf("%s: %q is not a number of rounds", roundsVariable, text)
	}
	return n
}

// printTable prints rows as Markdown.
func printTable(title string, rows ...[]string) {
	var text strings.Builder
	fmt.Fprintf(&text, "\n%s\n\n", title)
	for i, row := range rows {
		fmt.Fprintf(&text, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			fmt.Fprintf(&text, "|%s\n", strings.Repeat("---|", len(row)))
		}
	}
	fmt.Println(text.String())
}

// show rounds to three digits, about.
func show(d time.Duration) string {
	for unit := time.Nanosecond; ; unit *= 10 {
		if d < 1000*unit {
			return d.Round(unit).String()
		}
	}
}

// compact makes a name fit for the unit of a metric.
func compact(name string) string {
	return strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), ",", "")
}
