package service_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/allocs"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// dice draws objects in which everything collides: few names, addresses and ports. Its numbers come
// from a seed or from a fuzzer.
type dice struct{ roll func() byte }

func seeded(seed uint64) dice {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	source := rand.NewChaCha8(key)
	return dice{func() byte { return byte(source.Uint64()) }}
}

// fuzzed takes its numbers from data, then only zeros.
func fuzzed(data []byte) dice {
	return dice{func() byte {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return b
	}}
}

func (d dice) n(n int) int     { return int(d.roll()) % n }
func (d dice) one(in int) bool { return d.n(in) == in-1 } // false when the numbers are used up

func pick[T any](d dice, of ...T) T { return of[d.n(len(of))] }

// some is a subset, in any order.
func some[T any](d dice, of ...T) []T {
	var out []T
	for _, v := range of {
		if d.one(3) {
			out = append(out, v)
		}
	}
	if d.one(2) {
		slices.Reverse(out)
	}
	return out
}

func (d dice) meta(names ...string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: pick(d, "ns1", "ns2"), Name: pick(d, names...)}
}

func (d dice) service() *corev1.Service {
	o := &corev1.Service{ObjectMeta: d.meta("a", "b", "c")}
	if d.one(3) {
		o.Annotations = map[string]string{"fairlead.dev/scheduler": pick(d, "rr", "mh", "best", "")}
	}
	if d.one(3) {
		metav1.SetMetaDataAnnotation(&o.ObjectMeta, "fairlead.dev/external-failover-policy", pick(d, "Passthrough", "None"))
	}
	o.CreationTimestamp = metav1.NewTime(time.Unix(int64(d.n(3)), 0))
	if d.one(10) {
		o.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "other"}
	}
	s := &o.Spec
	s.Type = pick(d, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, "")
	s.ClusterIPs = pick(d, []string{"10.96.0.1"}, []string{"10.96.0.2", "fd00::a60:2"}, []string{"fd00::a60:1"},
		[]string{"fd00::a60:3", "10.96.0.3"}, []string{"10.244.1.2"}, []string{"10.96.0.1", "10.96.0.2"}, nil,
		[]string{"None"}, []string{"ten"}, []string{"10.244.1.3"})
	for _, name := range some(d, "http", "dns", "x", "y") {
		s.Ports = append(s.Ports, corev1.ServicePort{
			Name:     pick(d, name, name, name, ""),
			Protocol: pick(d, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP, "", "IP"),
			Port:     pick[int32](d, 80, 81, 30000, 30001, 0),
			NodePort: pick[int32](d, 0, 30000, 30001, 70000),
		})
	}
	s.ExternalIPs = some(d, "198.51.100.1", "192.0.2.1", "203.0.113.1", "fd00::c633:6401", "198.51.100.01")
	for _, ip := range some(d, "203.0.113.1", "203.0.113.2", "fd00::cb00:7101", "192.0.2.1") {
		o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{
			IP: ip, IPMode: pick(d, nil, new(corev1.LoadBalancerIPModeProxy), new(corev1.LoadBalancerIPModeVIP)),
		})
	}
	s.LoadBalancerSourceRanges = some(d, " 192.0.2.0/24 ", "192.0.2.9/32", "fd00::/96", "0.0.0.0/0", "ten/8")
	s.InternalTrafficPolicy = pick(d, nil, new(corev1.ServiceInternalTrafficPolicyLocal))
	s.ExternalTrafficPolicy = pick(d, "", corev1.ServiceExternalTrafficPolicyLocal, "", "Nowhere")
	s.HealthCheckNodePort = pick[int32](d, 0, 31000, 30000)
	s.SessionAffinity = pick(d, "", corev1.ServiceAffinityClientIP)
	return o
}

func (d dice) slice() *discoveryv1.EndpointSlice {
	o := &discoveryv1.EndpointSlice{ObjectMeta: d.meta("s1", "s2", "s3", "s4"), AddressType: pick(d,
		discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeFQDN)}
	o.Labels = map[string]string{discoveryv1.LabelServiceName: pick(d, "a", "b", "c")}
	for _, name := range some(d, "http", "dns", "x", "y", "") {
		o.Ports = append(o.Ports, discoveryv1.EndpointPort{
			Name:     &name,
			Protocol: new(pick(d, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)),
			Port:     new(pick[int32](d, 8080, 8081, 0)),
		})
	}
	if d.one(2) {
		o.Annotations = map[string]string{"fairlead.dev/weights": pick(d, "0", "3", "10.244.1.2=5,10.244.2.2=0",
			"0,10.244.1.3=256", "fd00::af4:102=0, 7", "257", "10.244.1.2", "1,2", "")}
	}
	for range d.n(6) {
		o.Endpoints = append(o.Endpoints, d.endpoint(o.AddressType))
	}
	return o
}

func (d dice) endpoint(family discoveryv1.AddressType) discoveryv1.Endpoint {
	ip := pick(d, "10.244.1.2", "10.244.1.3", "10.244.2.2", "10.244.2.3", "10.96.0.1", "10.96.0.9", "127.0.0.1")
	if family == discoveryv1.AddressTypeIPv6 {
		ip = pick(d, "fd00::af4:102", "fd00::af4:103", "fd00::af4:202", "fd00::a60:1", "10.244.1.2", "fe80::1")
	}
	e := discoveryv1.Endpoint{
		Addresses: []string{ip},
		NodeName:  pick(d, nil, new("node"), new("node-b")),
		Conditions: discoveryv1.EndpointConditions{
			Ready:       pick(d, nil, new(true), new(false)),
			Serving:     pick(d, nil, new(true), new(false)),
			Terminating: pick(d, nil, new(true), new(false)),
		},
	}
	if d.one(2) {
		e.Hints = &discoveryv1.EndpointHints{}
		for _, zone := range some(d, "zone-a", "zone-b") {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: zone})
		}
		for _, node := range some(d, "node", "node-b") {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: node})
		}
	}
	return e
}

func (d dice) options() service.Options {
	o := defaultOptions()
	o.NodePortAddresses = some(d, "primary", "localhost", "all", "10.244.1.0/24", "127.0.0.0/8")
	o.MasqueradeAll, o.ExternalIPs, o.Manifests = d.one(4), !d.one(4), d.one(2)
	o.Mode = pick(d, nil, func() string { return "ebpf" })
	o.Listeners = some(d, netip.MustParseAddrPort("0.0.0.0:30001"), netip.MustParseAddrPort("192.0.2.1:31000"))
	switch d.n(4) {
	case 1:
		o.DetectLocal = service.DetectLocal{Mode: service.LocalNodeCIDR}
	case 2:
		o.DetectLocal = service.DetectLocal{Mode: service.LocalInterfacePrefix, Interface: "cali"}
	case 3:
		o.DetectLocal = service.DetectLocal{}
	}
	return o
}

// batch changes up to n objects.
func (d dice) batch(n int) service.Batch {
	b := service.Batch{}
	for range 1 + d.n(n) {
		switch d.n(8) {
		case 0:
			b.Services.Set(name(d.meta("a", "b", "c")), nil)
		case 1:
			b.Slices.Set(name(d.meta("s1", "s2", "s3", "s4")), nil)
		case 2:
			d.environment(&b)
		case 3, 4:
			s, _ := service.FromService(d.service())
			b.Services.Set(s.Name, s)
		default:
			o := d.slice()
			s, _ := service.FromSlice(o)
			b.Slices.Set(name(o.ObjectMeta), s)
		}
	}
	return b
}

func (d dice) environment(b *service.Batch) {
	b.Node = pick(d, testNode(), &service.Node{}, &service.Node{Eligible: true},
		&service.Node{Name: "node", IPs: []netip.Addr{addr("192.0.2.1")}, PodCIDRs: []netip.Prefix{prefix("10.244.1.0/24")}})
	b.Addrs = some(d, addr("192.0.2.1"), addr("fd00::c000:201"), addr("127.0.0.1"), addr("10.244.1.1"), addr("10.96.0.7"))
	b.ServiceCIDRs = some(d, prefix("10.96.0.0/28"), prefix("10.96.0.1/32"), prefix("fd00::a60:0/112"))
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func name(m metav1.ObjectMeta) service.Name {
	return service.Name{Namespace: m.Namespace, Name: m.Name}
}

// world is the sum of all batches.
type world struct{ service.Batch }

func (w *world) add(b service.Batch) {
	w.Services = present(w.Services, b.Services)
	w.Slices = present(w.Slices, b.Slices)
	if b.Node != nil && (b.Node.Name != "" || b.Node.Eligible || w.Node == nil) { // what was deleted is remembered
		w.Node = b.Node
	}
	if b.Addrs != nil {
		w.Addrs = b.Addrs
	}
	if b.ServiceCIDRs != nil {
		w.ServiceCIDRs = b.ServiceCIDRs
	}
}

// present are the objects that are there after others have changed.
func present[T any](before, changed service.Objects[T]) (now service.Objects[T]) {
	all := maps.Collect(before.All())
	maps.Insert(all, changed.All())
	for name, is := range all {
		if is != nil {
			now.Set(name, is)
		}
	}
	return now
}

// TestTable_incremental compares a State after many Updates, with other options now and then, with that of a new Table.
// Each Change must be exactly the difference, and no problem of the final State may have been kept silent.
func TestTable_incremental(t *testing.T) {
	first := sample.Seed(t)
	for seed := first; seed < first+uint64(sample.Seeds(300)); seed++ {
		testIncremental(t, seed)
		if t.Failed() {
			t.Fatalf("%s=%d %s=1 repeats it", sample.SeedVariable, seed, sample.SeedsVariable)
		}
	}
}

func testIncremental(t *testing.T, seed uint64) {
	d := seeded(seed)
	options := d.options()
	table, w, told := newTable(t, options), world{}, map[service.Problem]bool{}
	before := newState(t, options)
	for range 30 {
		b := d.batch(4)
		w.add(b)
		if d.one(4) {
			name := options.NodeName
			options = d.options()
			checkConfigure(t, table, options)
			options.NodeName = name // which stays
		}
		state, change, problems := table.Update(b)
		checkChange(t, before, state, change)
		checkState(t, state)
		checkExplain(t, d, table, state)
		checkNear(t, table, state)
		for _, p := range problems {
			told[p] = true
		}
		fresh, _, problems := newTable(t, options).Update(w.Batch)
		if got, want := state.String(), fresh.String(); got != want {
			t.Errorf("after a chain of Updates the State differs from a new one:\n%s", lineDiff(got, want))
		}
		for _, p := range problems {
			if !told[p] {
				t.Errorf("never told: %v", p)
			}
		}
		if before = state.Clone(); t.Failed() {
			return
		}
	}
	gone := service.Batch{}
	for name := range w.Services.All() {
		gone.Services.Set(name, nil)
	}
	for name := range w.Slices.All() {
		gone.Slices.Set(name, nil)
	}
	state, _, _ := table.Update(gone)
	if len(state.Frontends)+len(state.Pools)+len(state.Health) > 0 || len(state.Guards) > len(w.ServiceCIDRs) {
		t.Errorf("rows are left when all objects are gone:\n%s", state)
	}
}

// checkNear checks that a Table finds all Frontends that lead to each pool.
func checkNear(t *testing.T, table *service.Table, state *model.State) {
	t.Helper()
	for id := range state.Pools {
		found := maps.Collect(table.Near(slices.Values([]model.PoolID{id})))
		for key, f := range state.Frontends {
			if _, ok := found[key]; f.Verdict == model.Forward && f.Pool == id && !ok {
				t.Errorf("%v leads to %v, and is not found", key, id)
			}
		}
	}
}

// checkConfigure gives a Table other options, and then some which it must refuse.
func checkConfigure(t *testing.T, table *service.Table, o service.Options) {
	t.Helper()
	o.NodeName = "elsewhere"
	if err := table.Configure(o); err != nil {
		t.Error(err)
	}
	o.MasqueradeAll, o.NodePortAddresses = !o.MasqueradeAll, []string{"everywhere"}
	if err := table.Configure(o); err == nil {
		t.Error("no error for nodePortAddresses everywhere")
	}
}

// checkChange checks that a Change is the difference between two States, no more and no less.
func checkChange(t *testing.T, from, to *model.State, change model.Change) {
	t.Helper()
	want := model.Diff(from, to)
	for _, c := range []*model.Change{&want, &change} {
		sortDelta(&c.Frontends, model.Key.Compare)
		sortDelta(&c.Pools, model.PoolID.Compare)
		sortDelta(&c.Guards, func(a, b netip.Prefix) int { return strings.Compare(a.String(), b.String()) })
		sortDelta(&c.Health, netip.AddrPort.Compare)
		maps.DeleteFunc(c.PoolsBefore, func(id model.PoolID, was *model.Pool) bool {
			return was == nil || was.Equal(to.Pools[id]) // rows that went away and came back are nothing new
		})
	}
	if len(change.PoolsBefore) == 0 && len(want.PoolsBefore) == 0 {
		change.PoolsBefore, want.PoolsBefore = nil, nil
	}
	if !reflect.DeepEqual(change, want) {
		t.Errorf("the Change is\n%+v\nshould be\n%+v", change, want)
	}
}

func sortDelta[K comparable, V any](d *model.Delta[K, V], compare func(a, b K) int) {
	slices.SortFunc(d.Set, func(a, b model.Row[K, V]) int { return compare(a.Key, b.Key) })
	slices.SortFunc(d.Delete, compare)
}

// checkState checks what holds for every State: it keeps its promises, has no unused pool, and its text can be read.
func checkState(t *testing.T, s *model.State) {
	t.Helper()
	if err := s.Validate(); err != nil {
		t.Errorf("%v in\n%s", err, s)
	}
	needed := map[model.PoolID]bool{}
	for _, row := range s.Frontends {
		needed[row.Pool] = true
	}
	for id := range s.Pools {
		if !needed[id] {
			t.Errorf("pool %s is not needed in\n%s", id, s)
		}
	}
	parsed, err := model.ParseState(s.String())
	if err != nil {
		t.Errorf("%v in\n%s", err, s)
	} else if got := parsed.String(); got != s.String() {
		t.Errorf("read back the State is different:\n%s", lineDiff(got, s.String()))
	}
}

// checkExplain checks that explanations agree with Lookup, for some packets.
func checkExplain(t *testing.T, d dice, table *service.Table, s *model.State) {
	t.Helper()
	for range 5 {
		p := d.packet()
		x, decision := table.Explain(p), s.Lookup(p)
		var got, want []string
		for _, c := range x.Backends {
			got = append(got, fmt.Sprintf("%.3f %s %v", c.Probability, c.Backend, c.Masquerade))
		}
		if decision.Verdict == model.Forward {
			serving := s.Pools[decision.Pool].Serving()
			sum := 0
			for _, b := range serving {
				sum += int(b.Weight)
			}
			for _, b := range serving {
				want = append(want, fmt.Sprintf("%.3f %s %v", float64(b.Weight)/float64(sum), b.AddrPort(), decision.Masquerade(b)))
			}
		}
		if x.Verdict != decision.Verdict.String() || !slices.Equal(got, want) {
			t.Errorf("Lookup says %v %q, but the explanation is\n%s\nin\n%s", decision, want, x, s)
		}
		for _, e := range x.Excluded {
			if e.Reason == "" {
				t.Errorf("there is no reason why %s is left out:\n%s", e.Endpoint, x)
			}
		}
	}
}

func (d dice) packet() model.Packet {
	source := pick(d, [2]string{"192.0.2.9", "eth0"}, [2]string{"10.244.1.2", "cali1"}, [2]string{"192.0.2.1"},
		[2]string{"fd00::af4:102", "eth0"}, [2]string{"127.0.0.1"})
	return model.Packet{
		Protocol:  pick(d, model.TCP, model.UDP, model.SCTP),
		Source:    addr(source[0]),
		Interface: source[1],
		Destination: netip.AddrPortFrom(addr(pick(d, "10.96.0.1", "10.96.0.2", "fd00::a60:1", "fd00::a60:3", "127.0.0.1",
			"192.0.2.1", "203.0.113.1", "203.0.113.2", "198.51.100.1", "10.96.0.9", "192.0.2.9")),
			pick[uint16](d, 80, 81, 30000, 30001, 31000)),
	}
}

// lineDiff shows the lines that only one of two texts has.
func lineDiff(got, want string) string {
	a, b := strings.Split(got, "\n"), strings.Split(want, "\n")
	var out strings.Builder
	for _, line := range a {
		if !slices.Contains(b, line) {
			fmt.Fprintln(&out, "-", line)
		}
	}
	for _, line := range b {
		if !slices.Contains(a, line) {
			fmt.Fprintln(&out, "+", line)
		}
	}
	return out.String()
}

// FuzzCompile builds objects from the fuzzer's bytes. In whatever batches they come, the rows are the same, and so is
// what they say of packets when their text is read back. Memory is bounded.
func FuzzCompile(f *testing.F) {
	f.Add([]byte{})
	for seed := range uint64(8) {
		d, data := seeded(seed), make([]byte, 400)
		for i := range data {
			data[i] = d.roll()
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d := fuzzed(data)
		options := d.options()
		table := newTable(t, options)
		before, w := newState(t, options), world{}
		for range 3 {
			b := d.batch(12)
			w.add(b)
			state, change, _ := table.Update(b)
			checkState(t, state)
			checkChange(t, before, state, change)
			checkExplain(t, d, table, state)
			before.Apply(change)
			checkSame(t, d, before, state)
		}
		checkOrders(t, d, options, w, before)
		allocs.Bound(t, len(data), func() { newTable(t, options).Update(w.Batch) })
	})
}

// checkSame checks that two States have the same rows, and that these say the same of packets when they are read back.
func checkSame(t *testing.T, d dice, got, want *model.State) {
	t.Helper()
	if got.String() != want.String() {
		t.Errorf("the rows differ:\n%s", lineDiff(got.String(), want.String()))
	}
	read, err := model.ParseState(got.String())
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		p := d.packet()
		if got, want := read.Lookup(p), want.Lookup(p); got != want {
			t.Errorf("of %+v the rows that are read back say %+v, should say %+v", p, got, want)
		}
	}
}

// checkOrders checks that the objects of a world mean the same rows when they come all at once, and one by one in any
// order.
func checkOrders(t *testing.T, d dice, o service.Options, w world, want *model.State) {
	t.Helper()
	atOnce, _, _ := newTable(t, o).Update(w.Batch)
	checkSame(t, d, atOnce, want)
	batches := []service.Batch{{Node: w.Node}, {Addrs: w.Addrs}, {ServiceCIDRs: w.ServiceCIDRs}}
	for name, is := range w.Services.All() {
		batches = append(batches, service.Batch{Services: service.One(name, is)})
	}
	for name, is := range w.Slices.All() {
		batches = append(batches, service.Batch{Slices: service.One(name, is)})
	}
	table, state := newTable(t, o), newState(t, o)
	for n := len(batches); n > 0; n-- {
		i := d.n(n)
		_, change, _ := table.Update(batches[i])
		state.Apply(change)
		batches[i] = batches[n-1]
	}
	checkSame(t, d, state, want)
}
