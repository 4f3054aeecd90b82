package service_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/service"
)

// wishes are ways in which a Service can want an address and port, by the place that is wanted.
var wishes = map[string]map[string]string{
	"10.96.0.5:53/udp": {
		"ClusterIP":   "{clusterIP: 10.96.0.5, ports: [{port: 53, protocol: UDP}]}",
		"external IP": "{clusterIP: %s, externalIPs: [10.96.0.5], ports: [{port: 53, protocol: UDP}]}",
		"status":      "{clusterIP: %s, type: LoadBalancer, ports: [{port: 53, protocol: UDP}]}",
	},
	"192.0.2.1:31000/tcp": {
		"NodePort":     "{clusterIP: %s, type: NodePort, ports: [{port: 80, nodePort: 31000}]}",
		"health check": "{clusterIP: %s, type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 31000, ports: [{port: 80}]}",
		"external IP":  "{clusterIP: %s, externalIPs: [192.0.2.1], ports: [{port: 31000}]}",
		"status":       "{clusterIP: %s, type: LoadBalancer, ports: [{port: 31000}]}",
	},
}

// givenOut are the ways that come first, however young the Service is.
var givenOut = map[string]bool{"ClusterIP": true, "NodePort": true, "health check": true}

// An address that the control plane gives out takes the place of an older Service's wish at once. Otherwise the older
// Service has it, and the other one when that is gone. The test tries each pair of wishes, in each order.
func TestTable_precedence(t *testing.T) {
	for place, ways := range wishes {
		for older, spec := range ways {
			for younger, other := range ways {
				t.Run(fmt.Sprintf("%s %s before %s", place, older, younger), func(t *testing.T) {
					a := wishing(t, "older", 1, place, older, spec)
					b := wishing(t, "younger", 2, place, younger, other)
					winner, loser := "older", "younger"
					if givenOut[younger] && !givenOut[older] {
						winner, loser = loser, winner
					}
					for _, order := range [][2]*service.Service{{a, b}, {b, a}} {
						testPrecedence(t, place, order, winner, loser)
					}
				})
			}
		}
	}
}

func testPrecedence(t *testing.T, place string, order [2]*service.Service, winner, loser string) {
	table := newTable(t, defaultOptions())
	table.Update(service.Batch{Node: testNode(), Addrs: []netip.Addr{addr("192.0.2.1")}})
	var told string
	for _, s := range order {
		_, _, problems := table.Update(service.Batch{Services: service.One(s.Name, s)})
		told += problemLines(problems)
	}
	if got := owner(t, table, place); got != winner {
		t.Errorf("after %s, %s: %s belongs to %q, should to %q", order[0].Name, order[1].Name, place, got, winner)
	}
	if !strings.Contains(told, "Service shop/"+loser+": ") || !strings.Contains(told, "belongs to Service shop/"+winner+", ") {
		t.Errorf("%s is told\n%s", loser, told)
	}
	name := service.Name{Namespace: "shop", Name: winner}
	table.Update(service.Batch{Services: service.One[service.Service](name, nil)})
	if got := owner(t, table, place); got != loser {
		t.Errorf("when %s is gone, %s belongs to %q, should to %q", winner, place, got, loser)
	}
}

// wishing is a Service that wants a place in one way.
func wishing(t *testing.T, name string, created int64, place, way, spec string) *service.Service {
	t.Helper()
	if strings.Contains(spec, "%s") {
		spec = fmt.Sprintf(spec, fmt.Sprintf("10.96.1.%d", created))
	}
	status := ""
	if way == "status" {
		host, _, _ := strings.Cut(place, ":")
		status = fmt.Sprintf("\nstatus: {loadBalancer: {ingress: [{ip: %s}]}}", host)
	}
	b := readObjects(t, []byte(fmt.Sprintf("kind: Service\nmetadata: {name: %s, namespace: shop}\nspec: %s%s\n", name, spec, status)))
	s := find(b.Services, service.Name{Namespace: "shop", Name: name})
	s.Created = created
	return s
}

// owner is whose row or health check server is at a place.
func owner(t *testing.T, table *service.Table, place string) string {
	t.Helper()
	state, _, _ := table.Update(service.Batch{})
	for line := range strings.SplitSeq(state.String(), "\n") {
		if !strings.Contains(line, place) && !strings.HasPrefix(line, "health "+strings.TrimSuffix(place, "/tcp")) {
			continue
		}
		for _, name := range []string{"older", "younger"} {
			if strings.Contains(line, "shop/"+name) {
				return name
			}
		}
	}
	return ""
}

// The node comes before all Services: no ClusterIP is its address or, in manifests, one of its pods, and nothing is where
// the process listens.
func TestTable_nodeFirst(t *testing.T) {
	options := defaultOptions()
	options.Manifests = true
	options.Listeners = []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:10256")}
	options.DetectLocal.ClusterCIDRs = []netip.Prefix{prefix("10.244.0.0/16")}
	for spec, want := range map[string]string{
		"{clusterIP: 192.0.2.1, ports: [{port: 80}]}":                                                                               "ClusterIP: 192.0.2.1:80/tcp is an address of this node or of its pods, and cannot be a ClusterIP",
		"{clusterIP: 192.0.2.7, ports: [{port: 80}]}":                                                                               "ClusterIP: 192.0.2.7:80/tcp is an address of this node or of its pods, and cannot be a ClusterIP",
		"{clusterIP: 10.244.1.9, ports: [{port: 80}]}":                                                                              "ClusterIP: 10.244.1.9:80/tcp is an address of this node or of its pods, and cannot be a ClusterIP",
		"{clusterIP: 10.96.0.1, externalIPs: [10.244.1.9], ports: [{port: 80}]}":                                                    "external IP: 10.244.1.9:80/tcp is an address of pods",
		"{clusterIP: 10.96.0.1, externalIPs: [192.0.2.1], ports: [{port: 10256}]}":                                                  "external IP: 192.0.2.1:10256/tcp is where the node's proxy itself listens",
		"{clusterIP: 10.96.0.1, type: NodePort, ports: [{port: 80, nodePort: 10256}]}":                                              "NodePort: 192.0.2.1:10256/tcp is where the node's proxy itself listens",
		"{clusterIP: 10.96.0.1, type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 10256, ports: [{port: 80}]}": "healthCheckNodePort: 192.0.2.1:10256/tcp is where the node's proxy itself listens",
	} {
		t.Run(spec, func(t *testing.T) {
			table := newTable(t, options)
			s := wishing(t, "older", 1, "", "", spec)
			state, _, problems := table.Update(service.Batch{
				Services: service.One(s.Name, s), Node: testNode(), Addrs: []netip.Addr{addr("192.0.2.1"), addr("192.0.2.7")},
			})
			for _, p := range problems {
				if p.Cause != service.Precedence {
					t.Errorf("the cause of %q is %v", p, p.Cause)
				}
			}
			if got := problemLines(problems); !strings.Contains(got, "Service shop/older: "+want) {
				t.Errorf("the problems are\n%s\nshould be %s", got, want)
			}
			place, _, _ := strings.Cut(strings.SplitN(want, ": ", 2)[1], " ")
			for line := range strings.SplitSeq(state.String(), "\n") {
				host, _, _ := strings.Cut(place, ":")
				if strings.HasPrefix(line, "frontend "+place) || strings.HasPrefix(line, "guard "+host) || strings.HasPrefix(line, "health "+host) {
					t.Errorf("there is a row for it: %s", line)
				}
			}
		})
	}
}

// In manifests a ClusterIP can be the address of another namespace's pod. The pod's other ports are not refused, and it
// goes on being an endpoint, whichever comes first. In one namespace it is a mistake of which the owner is told.
func TestTable_clusterIPOfPod(t *testing.T) {
	objects := readObjects(t, []byte(`
kind: Service
metadata: {name: web, namespace: victim}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
---
kind: EndpointSlice
metadata: {name: web-1, namespace: victim, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.1.2.3]}]
`))
	options := service.Options{Manifests: true}
	const row, guard = "frontend 10.96.0.1:80/tcp any forward victim/web ", "guard 10.1.2.3/32 "
	for _, namespace := range []string{"other", "victim"} {
		s := *wishing(t, "older", 1, "", "", "{clusterIP: 10.1.2.3, ports: [{port: 22}]}")
		s.Name.Namespace = namespace
		claim := service.Batch{Services: service.One(s.Name, &s)}
		for _, order := range [][]service.Batch{{objects, claim}, {claim, objects}} {
			table := newTable(t, options)
			table.Update(order[0])
			state, _, _ := table.Update(order[1])
			serves := strings.Contains(state.String(), row)
			if guarded := strings.Contains(state.String(), guard); serves != (namespace == "other") || guarded == serves {
				t.Errorf("of namespace %s: serves %v, guarded %v in\n%s", namespace, serves, guarded, state)
			}
		}
	}
}
