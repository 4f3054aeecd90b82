package service_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
)

// TestHNS is of rows that Windows' HNS can have, and of what is said about the rest.
func TestHNS(t *testing.T) {
	t.Parallel()
	table, err := service.NewTable(service.Options{
		NodeName: "node", ExternalIPs: true, MasqueradeAll: true,
		HNS: &service.HNS{HealthVIPs: true, Healthz: 10256},
	})
	if err != nil {
		t.Fatal(err)
	}
	batch := readObjects(t, []byte(hnsObjects))
	batch.Addrs = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("127.0.0.1")}
	state, _, problems := table.Update(batch)
	if err := state.Validate(); err != nil {
		t.Error(err)
	}
	var have []string
	for k, f := range state.Frontends {
		line := "frontend " + k.String() + " " + f.String() + " at " + f.Kind.String()
		if f.Kept {
			line += " kept"
		}
		have = append(have, line)
	}
	for id, p := range state.Pools {
		for _, b := range p.Backends {
			have = append(have, "backend "+id.String()+" "+b.String())
		}
	}
	for _, p := range problems {
		have = append(have, "problem ("+p.Cause.String()+") "+p.Error())
	}
	for k := range state.Frontends { // of which each has an explanation
		to := netip.AddrPortFrom(k.Addr, k.Port)
		if e := table.Explain(model.Packet{Destination: to, Protocol: k.Protocol}); !strings.HasPrefix(e.Row, "frontend ") {
			t.Errorf("%s: %+v", k, e)
		}
	}
	slices.Sort(have)
	if got := strings.Join(have, "\n"); got != strings.TrimSpace(hnsRows) {
		t.Errorf("rows:\n%s", got)
	}
}

const hnsObjects = `
kind: Service
metadata: {name: web, namespace: shop, annotations: {preserve-destination: "true"}}
spec:
  type: LoadBalancer
  clusterIPs: [10.96.0.10]
  clusterIP: 10.96.0.10
  loadBalancerSourceRanges: [198.51.100.0/24]
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}
  ports: [{name: http, port: 80, nodePort: 30080, protocol: TCP}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.10}]}}
---
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}, annotations: {fairlead.dev/weights: "3"}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.244.1.11], nodeName: node}
- {addresses: [10.244.2.13], nodeName: node-b}
---
kind: EndpointSlice
metadata: {name: web-2, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8081, protocol: TCP}]
endpoints:
- {addresses: [10.244.2.14], nodeName: node-b}
---
kind: Service
metadata: {name: local, namespace: shop}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: 32000
  clusterIPs: [10.96.0.11]
  clusterIP: 10.96.0.11
  ports: [{port: 80, protocol: TCP}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.10, ipMode: Proxy}, {ip: 203.0.113.11}]}}
---
kind: EndpointSlice
metadata: {name: local-1, namespace: shop, labels: {kubernetes.io/service-name: local}}
addressType: IPv4
ports: [{name: "", port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.244.1.11], nodeName: node}
- {addresses: [10.244.2.13], nodeName: node-b}
---
kind: Service
metadata: {name: empty, namespace: shop, annotations: {fairlead.dev/rebalance: 10s}}
spec: {clusterIPs: [10.96.0.12], clusterIP: 10.96.0.12, type: LoadBalancer, ports: [{port: 81, protocol: TCP}]}
status: {loadBalancer: {ingress: [{ip: 203.0.113.10}]}}
---
kind: EndpointSlice
metadata: {name: empty-1, namespace: shop, labels: {kubernetes.io/service-name: empty}, annotations: {fairlead.dev/weights: "0"}}
addressType: IPv4
ports: [{name: "", port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.244.2.13], nodeName: node-b}
`

const hnsRows = `
backend shop/empty:healthCheckNodePort local 192.0.2.1:10256 local
backend shop/local cluster 10.244.1.11:8080 local
backend shop/local cluster 10.244.2.13:8080
backend shop/local local 10.244.1.11:8080 local
backend shop/local:healthCheckNodePort local 192.0.2.1:32000 local
backend shop/web:http cluster 10.244.1.11:8080 local
backend shop/web:http cluster 10.244.2.13:8080
backend shop/web:http local 10.244.1.11:8080 local
frontend 10.96.0.10:80/tcp any forward shop/web:http cluster snat always at ClusterIP
frontend 10.96.0.11:80/tcp any forward shop/local cluster snat always at ClusterIP
frontend 10.96.0.12:81/tcp any reject shop/empty at ClusterIP
frontend 192.0.2.1:30080/tcp any forward shop/web:http local snat always at NodePort
frontend 203.0.113.10:10256/tcp any forward shop/empty:healthCheckNodePort local snat always at healthCheckNodePort
frontend 203.0.113.10:80/tcp any forward shop/web:http local snat never at LoadBalancer IP kept
frontend 203.0.113.10:81/tcp any reject shop/empty at LoadBalancer IP
frontend 203.0.113.11:32000/tcp any forward shop/local:healthCheckNodePort local snat always at healthCheckNodePort
frontend 203.0.113.11:80/tcp any forward shop/local local snat never at LoadBalancer IP
problem (unsupported) Service shop/empty: metadata.annotations[fairlead.dev/rebalance]: HNS does not tell which connections are idle; they stay where they are
problem (unsupported) Service shop/empty: spec.ports: port 81/tcp has no endpoints; HNS cannot refuse connections, so clients get no answer
problem (unsupported) Service shop/local: spec.externalTrafficPolicy: port 80/tcp: HNS gives clients of this node, too, only its own endpoints there
problem (unsupported) Service shop/web: metadata.annotations[fairlead.dev/weights]: port 80/tcp: HNS has no weights; its endpoints get equal shares
problem (unsupported) Service shop/web: spec.loadBalancerSourceRanges: HNS lets in clients from everywhere
problem (unsupported) Service shop/web: spec.ports: port 80/tcp: HNS serves one target port; endpoints at others, such as 10.244.2.14:8081, are left out
problem (unsupported) Service shop/web: spec.sessionAffinityConfig.clientIP.timeoutSeconds: HNS has no such time; clients keep their endpoints
`
