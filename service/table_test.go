package service_test

import (
	"maps"
	"net/netip"
	"strings"
	"testing"
	"unsafe"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// Two Services want one NodePort. The younger one is told once, however often things change, and gets
// it when the older one leaves.
func TestTable_conflict(t *testing.T) {
	table := newTable(t, defaultOptions())
	objects := readObjects(t, []byte(conflict))
	old, young := service.Name{Namespace: "default", Name: "old"}, service.Name{Namespace: "default", Name: "young"}
	step := func(what string, b service.Batch, frontend, problem string) {
		t.Helper()
		state, _, problems := table.Update(b)
		if !strings.Contains(state.String(), "\nfrontend "+frontend+"\n") {
			t.Errorf("%s: there is no row %q in\n%s", what, frontend, state)
		}
		if got := problemLines(problems); got != problem {
			t.Errorf("%s: the problems are\n%s\nshould be\n%s", what, got, problem)
		}
	}
	only := func(name service.Name, s *service.Service) service.Batch {
		return service.Batch{Services: service.One(name, s)}
	}
	const lost = "Service default/young: NodePort 30080/tcp: " +
		"belongs to Service default/old, which came first; this one is not reached there\n"
	first := only(young, find(objects.Services, young))
	first.Slices, first.Node = objects.Slices, testNode()
	step("the younger one is alone", first, "192.0.2.1:30080/tcp any forward default/young cluster snat always", "")
	step("the older one comes", only(old, find(objects.Services, old)), "192.0.2.1:30080/tcp any reject default/old", lost)
	step("the younger one changes", only(young, find(objects.Services, young)), "192.0.2.1:30080/tcp any reject default/old", "")
	step("the node gets an address", service.Batch{Addrs: []netip.Addr{addr("192.0.2.1"), addr("192.0.2.7")}},
		"192.0.2.7:30080/tcp any reject default/old", lost)
	step("the older one leaves", only(old, nil), "192.0.2.1:30080/tcp any forward default/young cluster snat always", "")
	step("the older one is back", only(old, find(objects.Services, old)), "192.0.2.1:30080/tcp any reject default/old", lost)
}

// In modes ebpf and userspace, which see packets first, no guard covers the ClusterIPs of Services that other proxies
// handle. In others, what these have left is guarded.
func TestTable_others(t *testing.T) {
	objects := readObjects(t, []byte(`
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.96.0.0/16, "fd00::a60:0/112"]}
---
kind: Service
metadata: {name: theirs, namespace: default, labels: {service.kubernetes.io/service-proxy-name: other}}
spec: {clusterIPs: [10.96.0.10, "fd00::a60:a"], ports: [{port: 80}]}
---
kind: Service
metadata: {name: ours, namespace: default}
spec: {clusterIP: 10.96.0.11, ports: [{port: 80}]}
`))
	options, mode := defaultOptions(), ""
	options.Mode = func() string { return mode }
	table, name := newTable(t, options), service.Name{Namespace: "default", Name: "theirs"}
	theirs := service.Batch{Services: service.One(name, find(objects.Services, name))}
	taken := *find(objects.Services, name)
	taken.Ignored = ""
	for _, c := range []struct {
		what, mode string
		batch      service.Batch
		want       model.Verdict
	}{
		{"at first", "nftables", objects, model.Drop},
		{"in another mode", "ebpf", service.Batch{}, model.Pass},
		{"without its label", "ebpf", service.Batch{Services: service.One(name, &taken)}, model.Reject},
		{"with its label", "ebpf", theirs, model.Pass},
		{"deleted", "ebpf", service.Batch{Services: service.One[service.Service](name, nil)}, model.Drop},
		{"anew", "userspace", theirs, model.Pass},
		{"in the mode before", "nftables", service.Batch{}, model.Drop},
	} {
		mode = c.mode
		state, _, _ := table.Update(c.batch)
		for at, want := range map[string]model.Verdict{
			"10.96.0.10:81": c.want, "[fd00::a60:a]:81": c.want, "10.96.0.9:81": model.Drop, "10.96.0.11:81": model.Reject,
			"10.96.0.12:81": model.Drop, "[fd00::a60:b]:81": model.Drop, "10.96.255.255:81": model.Drop,
		} {
			packet := model.Packet{Destination: netip.MustParseAddrPort(at), Protocol: model.TCP}
			if got := state.Lookup(packet).Verdict; got != want {
				t.Errorf("%s: %s of %s, want %s", c.what, got, at, want)
			}
		}
	}
}

func find[T any](objects service.Objects[T], name service.Name) *T {
	return maps.Collect(objects.All())[name]
}

// A problem that Compile finds is told once, as long as it lasts.
func TestTable_problemOnce(t *testing.T) {
	table := newTable(t, service.Options{})
	objects := readObjects(t, []byte(conflict))
	find(objects.Slices, service.Name{Namespace: "default", Name: "young-1"}).Endpoints[0].Addr = addr("10.96.0.1")
	old := service.Name{Namespace: "default", Name: "old"}
	for i, want := range []int{1, 0, 1} {
		_, _, problems := table.Update(objects)
		if len(problems) != want {
			t.Errorf("update %d: the problems are\n%s\nshould be %d", i, problemLines(problems), want)
		}
		if i == 1 {
			table.Update(service.Batch{Services: service.One[service.Service](old, nil)})
			objects.Services.Set(old, nil)
			objects.ServiceCIDRs = []netip.Prefix{prefix("10.96.0.0/16")}
		}
	}
}

// If this node has no name, an endpoint without a node is not local.
func TestTable_noName(t *testing.T) {
	objects := readObjects(t, []byte(conflict))
	for _, s := range objects.Services.All() {
		s.InternalLocal = true
	}
	state, _, _ := newTable(t, service.Options{}).Update(objects)
	if !strings.Contains(state.String(), " drop default/young\n") {
		t.Errorf("there is a local endpoint:\n%s", state)
	}
}

const conflict = `
kind: Service
metadata: {name: old, namespace: default, creationTimestamp: "2026-01-01T00:00:00Z"}
spec: {type: NodePort, clusterIP: 10.96.0.1, ports: [{port: 80, nodePort: 30080}]}
---
kind: Service
metadata: {name: young, namespace: default, creationTimestamp: "2026-01-02T00:00:00Z"}
spec: {type: NodePort, clusterIP: 10.96.0.2, ports: [{port: 80, nodePort: 30080}]}
---
kind: EndpointSlice
metadata: {name: young-1, namespace: default, labels: {kubernetes.io/service-name: young}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.1.2]}]
`

func TestNewTable_options(t *testing.T) {
	for _, c := range []struct {
		name    string
		options service.Options
		want    string // in the error; empty: none
	}{
		{"none", service.Options{}, ""},
		{"all words", service.Options{NodePortAddresses: []string{"primary", "localhost", "all", "10.0.0.0/8"}}, ""},
		{"word", service.Options{NodePortAddresses: []string{"10.0.0.0/8", "first"}},
			`nodePortAddresses (--nodeport-addresses): "first" is neither a CIDR nor one of primary, localhost, all`},
		{"node IPs", service.Options{NodeIPs: []netip.Addr{addr("192.0.2.1"), addr("192.0.2.2")}}, "(--node-ip): 192.0.2.2"},
		{"mode", service.Options{DetectLocal: service.DetectLocal{Mode: "Magic"}}, `(--detect-local-mode): "Magic"`},
		{"no bridge", service.Options{DetectLocal: service.DetectLocal{Mode: service.LocalBridgeInterface}},
			`(--detect-local-mode BridgeInterface): ""`},
		{"long prefix", service.Options{DetectLocal: service.DetectLocal{
			Mode: service.LocalInterfacePrefix, Interface: "0123456789abcdef"}}, "is not the name of an interface"},
		{"cluster CIDR", service.Options{DetectLocal: service.DetectLocal{
			Mode: service.LocalClusterCIDR, ClusterCIDRs: make([]netip.Prefix, 1)}}, "(--cluster-cidr)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := service.NewTable(c.options)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, should have %q", err, c.want)
			}
		})
	}
}

// A slice with thousands of bad endpoints must not fill the log.
func TestFromSlice_manyProblems(t *testing.T) {
	o := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4}
	o.Name, o.Labels = "web-1", map[string]string{discoveryv1.LabelServiceName: "web"}
	o.Endpoints = make([]discoveryv1.Endpoint, 1000)
	_, problems := service.FromSlice(o)
	last := problems[len(problems)-1].Error()
	if want := "EndpointSlice default/web-1: 980 more problems"; len(problems) != 21 || last != want {
		t.Errorf("there are %d problems, the last is %q, should be 21 and %q", len(problems), last, want)
	}
}

// An endpoint costs little, and those of a slice share their hints.
func TestFromSlice_size(t *testing.T) {
	if size := unsafe.Sizeof(service.Endpoint{}); size > 48 {
		t.Errorf("an Endpoint has %d bytes", size)
	}
	o := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4}
	o.Labels = map[string]string{discoveryv1.LabelServiceName: "web"}
	for range 2 {
		o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{"10.244.1.2"},
			Hints:     &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "zone-a"}}},
		})
	}
	s, _ := service.FromSlice(o)
	if s.Endpoints[0].Hints != s.Endpoints[1].Hints {
		t.Error("equal hints are not shared")
	}
}

func TestFromNode_eligible(t *testing.T) {
	tainted := &corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}}}}
	deleted := &corev1.Node{}
	deleted.DeletionTimestamp = &metav1.Time{}
	for what, c := range map[string]struct {
		node *corev1.Node
		want bool
	}{"plain": {&corev1.Node{}, true}, "tainted": {tainted, false}, "deleted": {deleted, false}} {
		if n, _ := service.FromNode(c.node); n.Eligible != c.want {
			t.Errorf("%s: eligible is %v", what, n.Eligible)
		}
	}
}

// Where clients come back to their endpoints by the scheduler in force, no connections are closed for the sake of others.
func TestTable_rebalance(t *testing.T) {
	objects := readObjects(t, []byte(`
kind: Service
metadata: {name: hashed, namespace: default, annotations: {fairlead.dev/scheduler: mh, fairlead.dev/rebalance: 10s}}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
---
kind: EndpointSlice
metadata: {name: hashed-1, namespace: default, labels: {kubernetes.io/service-name: hashed}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [10.244.2.2]}]
---
kind: Service
metadata: {name: plain, namespace: default, annotations: {fairlead.dev/rebalance: 10s}}
spec: {clusterIP: 10.96.0.2, ports: [{port: 80}]}
---
kind: EndpointSlice
metadata: {name: plain-1, namespace: default, labels: {kubernetes.io/service-name: plain}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [10.244.2.2]}]
`))
	for _, c := range []struct{ mode, configured, not string }{
		{"ipvs", "", "hashed mh"}, {"ipvs", "sh", "hashed mh, plain sh"}, {"ebpf", "sh", "hashed mh"}, {"nftables", "sh", ""},
		{"userspace", "", ""}, {"", "", ""},
	} {
		options := defaultOptions()
		options.Mode, options.Scheduler = func() string { return c.mode }, c.configured
		state, _, problems := newTable(t, options).Update(objects)
		var not, said []string
		for _, p := range problems {
			const of, reason = "Service default/", "has no effect: by scheduler "
			if _, scheduler, ok := strings.Cut(p.Reason, reason); ok && p.Field == "metadata.annotations[fairlead.dev/rebalance]" {
				scheduler, _, _ = strings.Cut(scheduler, " ")
				said = append(said, strings.TrimPrefix(p.Object, of)+" "+scheduler)
			}
		}
		for id, pool := range state.Pools {
			if pool.Rebalance == 0 {
				not = append(not, id.Service)
			}
		}
		if got := strings.Join(said, ", "); got != c.not || len(not) != len(said) {
			t.Errorf("in mode %s with %q: problems are %q, and these are not rebalanced: %q", c.mode, c.configured, got, not)
		}
	}
}

// A scheduler that the data plane in force does not have is a problem, which comes and goes with the data plane.
func TestTable_schedulers(t *testing.T) {
	objects := readObjects(t, []byte(`
kind: Service
metadata: {name: hashed, namespace: default, annotations: {service.cilium.io/lb-algorithm: maglev}}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
---
kind: Service
metadata: {name: least, namespace: default, annotations: {fairlead.dev/scheduler: least-of-two}}
spec: {clusterIP: 10.96.0.2, ports: [{port: 80}]}
---
kind: Service
metadata: {name: sticky, namespace: default, annotations: {fairlead.dev/scheduler: twos}}
spec: {clusterIP: 10.96.0.3, sessionAffinity: ClientIP, ports: [{port: 80}]}
---
kind: Service
metadata: {name: weighted, namespace: default, annotations: {fairlead.dev/scheduler: wlc}}
spec: {clusterIP: 10.96.0.4, ports: [{port: 80}]}
---
kind: Service
metadata: {name: plain, namespace: default}
spec: {clusterIP: 10.96.0.5, ports: [{port: 80}]}
`))
	options, mode := defaultOptions(), ""
	options.Mode = func() string { return mode }
	table := newTable(t, options)
	table.Update(objects)
	const (
		cilium = `Service default/hashed: metadata.annotations[service.cilium.io/lb-algorithm]: `
		least  = `Service default/least: metadata.annotations[fairlead.dev/scheduler]: `
		sticky = `Service default/sticky: metadata.annotations[fairlead.dev/scheduler]: `
		wlc    = `Service default/weighted: metadata.annotations[fairlead.dev/scheduler]: `
	)
	var ceased []string
	for _, c := range []struct{ mode, arise string }{
		{"ipvs", ""},
		{"ebpf", sticky + `mode ebpf has no scheduler "twos" with session affinity and chooses endpoints at random by weight; ` +
			"it is in modes ipvs and userspace\n" +
			wlc + `mode ebpf has no scheduler "wlc" and chooses endpoints at random by weight; it is in mode ipvs` + "\n"},
		{"nftables", cilium + `mode nftables has no scheduler "mh" and chooses endpoints at random by weight; ` +
			"it is in modes ebpf and ipvs\n" +
			least + `mode nftables has no scheduler "twos" and chooses endpoints at random by weight; ` +
			"it is in modes ebpf, ipvs and userspace\n" +
			sticky + `mode nftables has no scheduler "twos" and chooses endpoints at random by weight; ` +
			"it is in modes ebpf, ipvs and userspace\n" +
			wlc + `mode nftables has no scheduler "wlc" and chooses endpoints at random by weight; it is in mode ipvs` + "\n"},
		{"userspace", cilium + `mode userspace has no scheduler "mh" and chooses endpoints in turn by weight; ` +
			"it is in modes ebpf and ipvs\n" +
			wlc + `mode userspace has no scheduler "wlc" and chooses endpoints in turn by weight; it is in mode ipvs` + "\n"},
		{"ipvs", ""},
	} {
		mode = c.mode
		_, change, problems := table.Update(service.Batch{})
		if got := problemLines(problems); got != c.arise {
			t.Errorf("in mode %s arise\n%s\nnot\n%s", mode, got, c.arise)
		}
		if !change.Empty() {
			t.Errorf("mode %s changes rows", mode)
		}
		ceased = table.Ceased()
	}
	if len(ceased) != 2 {
		t.Errorf("in the end cease %q", ceased)
	}
}
