package study

import (
	"fmt"
	"testing"
)

// TestServiceRules reads a list as kube-proxy's mode iptables makes it.
func TestServiceRules(t *testing.T) {
	const rules = `*nat
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.12/32 -p tcp -m comment --comment "default/svc-2:tcp cluster IP" -m tcp --dport 80 -j KUBE-SVC-C
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "default/svc-0:tcp cluster IP" -m tcp --dport 81 -j KUBE-SVC-A
-A KUBE-SERVICES -d 203.0.113.7/32 -p tcp -m comment --comment "default/svc-0:tcp loadbalancer IP" -m tcp --dport 81 -j KUBE-EXT-A
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule" -j KUBE-NODEPORTS
-A KUBE-SVC-A -m comment --comment "default/svc-0:tcp -> 10.244.64.1:8080" -j KUBE-SEP-A
COMMIT
`
	got, err := serviceRules(rules)
	if want := "[10.96.0.12:80 10.96.0.10:81]"; err != nil || fmt.Sprint(got) != want {
		t.Errorf("got %v, %v; want %s", got, err, want)
	}
	if got, err := serviceRules("*nat\nCOMMIT\n"); err == nil {
		t.Errorf("an empty list has Services: %v", got)
	}
}
