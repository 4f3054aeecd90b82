package service_test

import (
	"net/netip"
	"strings"
	"testing"

	"fairlead.dev/fairlead/service"
)

// A Node that never was is reported as often as the source says so. One that is deleted is reported once, and what was
// known of it stays. Where none is needed, nothing is reported.
func TestTable_node(t *testing.T) {
	options := defaultOptions()
	options.DetectLocal = service.DetectLocal{Mode: service.LocalNodeCIDR}
	table := newTable(t, options)
	node := func(ip, pods string) *service.Node {
		n := &service.Node{Name: "node", Zone: "zone-a", IPs: []netip.Addr{addr(ip)}, Eligible: true}
		if pods != "" {
			n.PodCIDRs = []netip.Prefix{prefix(pods)}
		}
		return n
	}
	batch := readObjects(t, []byte(conflict))
	batch.Addrs = []netip.Addr{addr("192.0.2.1"), addr("192.0.2.2")}
	missing, other := &service.Node{}, &service.Node{Name: "other", Eligible: true}
	const (
		absent  = "Node node: metadata.name: there is no such Node; is hostnameOverride (--hostname-override) right"
		deleted = "Node node: was deleted; /healthz says 503 until it is back"
		noPods  = "Node node: spec.podCIDRs: there is none, which detectLocalMode (--detect-local-mode) NodeCIDR needs"
		ignored = `Node other: metadata.name: this node's name is "node"`
	)
	before := ""
	for _, step := range []struct {
		what     string
		node     *service.Node
		pods     string
		problems []string
	}{
		{"there is none", missing, "", []string{absent, noPods}},
		{"there still is none", missing, "", []string{absent}},
		{"it comes without pods", node("192.0.2.1", ""), "", []string{noPods}},
		{"it has pods", node("192.0.2.1", "10.244.1.0/24"), "10.244.1.0/24", nil},
		{"it is deleted", missing, "10.244.1.0/24", []string{deleted}},
		{"it is still deleted", missing, "10.244.1.0/24", nil},
		{"another one", other, "10.244.1.0/24", []string{ignored}},
		{"it is back, as another one", node("192.0.2.2", "10.244.7.0/24"), "10.244.7.0/24", nil},
		{"it is deleted again", missing, "10.244.7.0/24", []string{deleted}},
		{"it is back without pods", node("192.0.2.2", ""), "", []string{noPods}},
		{"nobody needs one", &service.Node{Eligible: true}, "", nil},
	} {
		batch.Node = step.node
		state, _, problems := table.Update(batch)
		if got := state.Pods.Prefixes; len(got) > 1 || len(got) == 1 != (step.pods != "") ||
			len(got) == 1 && got[0].String() != step.pods {
			t.Errorf("%s: pods are in %v, should be in %q", step.what, got, step.pods)
		}
		lines := strings.Split(strings.TrimSuffix(problemsOfNode(problems), "\n"), "\n")
		ceases := strings.HasPrefix(step.what, "it comes") || strings.HasPrefix(step.what, "it is back") ||
			strings.HasPrefix(step.what, "it has pods")
		if got := strings.Join(table.Ceased(), ", "); ceases != (got == "Node node") {
			t.Errorf("%s: problems of %q ceased", step.what, got)
		}
		if len(step.problems) == 0 {
			step.problems = []string{""}
		}
		same := len(lines) == len(step.problems)
		for i := range step.problems {
			same = same && strings.HasPrefix(lines[i], step.problems[i]) && (lines[i] == "") == (step.problems[i] == "")
		}
		if !same {
			t.Errorf("%s: the problems are\n%s\nshould begin with\n%s", step.what, strings.Join(lines, "\n"),
				strings.Join(step.problems, "\n"))
		}
		if after := state.String(); step.problems[0] == deleted && after != before {
			t.Errorf("%s: that changed the rows:\n%s", step.what, lineDiff(before, after))
		}
		before = state.String()
	}
}

// problemsOfNode are those of Nodes alone.
func problemsOfNode(all []service.Problem) string {
	var own []service.Problem
	for _, p := range all {
		if strings.HasPrefix(p.Object, "Node ") {
			own = append(own, p)
		}
	}
	return problemLines(own)
}

// Manifests need no Node; but what was configured and does not work without one is said.
func TestTable_standalone(t *testing.T) {
	for mode, want := range map[service.LocalMode]string{
		service.LocalNone:     "",
		service.LocalNodeCIDR: "spec.podCIDRs",
	} {
		table := newTable(t, service.Options{NodeName: "node", DetectLocal: service.DetectLocal{Mode: mode}})
		for i := range 2 {
			_, _, problems := table.Update(readObjects(t, []byte(alone)))
			if got := problemLines(problems); got == "" != (want == "" || i > 0) || i == 0 && !strings.Contains(got, want) {
				t.Errorf("mode %q, update %d: %q, want %q once", mode, i, got, want)
			}
		}
	}
}

const alone = `
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
`
