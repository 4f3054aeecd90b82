package service

import "fmt"

// ownNode is what the Table knows of this machine's own Node.
type ownNode struct {
	node        Node // the last one that there was
	deleted     bool // and it is no more
	podsUnknown bool // it was said that its pods cannot be told from others
}

// setNode takes in a Node. One that was deleted leaves behind what is known of it: addresses and pods do not vanish
// with the object, and a user may have deleted it by mistake. That there never was one is said as often as the source
// says it.
func (t *Table) setNode(n *Node) {
	switch own := &t.own; {
	case n.missing() && own.node.Name == "":
		t.nodeProblem(t.options.NodeName, "metadata.name", "there is no such Node; is hostnameOverride "+
			"(--hostname-override) right, and has the kubelet registered it? Until there is one, /healthz says 503, and the "+
			"zone is not known; addresses and pods are known only from the configuration and the interfaces; under a wrong "+
			"name no endpoint counts as local")
	case n.missing():
		if !own.deleted {
			t.nodeProblem(own.node.Name, "", "was deleted; /healthz says 503 until it is back, and "+
				"its addresses, zone and pod CIDRs are taken to be what they were")
		}
		own.deleted = true
	case n.Name != "" && n.Name != t.options.NodeName:
		t.nodeProblem(n.Name, "metadata.name",
			fmt.Sprintf("this node's name is %q (--hostname-override); the object is ignored", t.options.NodeName))
	default:
		if own.deleted || own.node.Name == "" {
			t.ceased = append(t.ceased, "Node "+t.options.NodeName)
			own.podsUnknown = false // it is said again if it remains
		}
		own.node, own.deleted = *n, false
	}
}

// missing reports whether there should be a Node and is none.
func (n *Node) missing() bool { return n.Name == "" && !n.Eligible }

// checkPods says so when pods cannot be told from other clients, though the configuration wants it.
func (t *Table) checkPods() {
	unknown := t.options.DetectLocal.Mode == LocalNodeCIDR && len(t.view.Pods.Prefixes) == 0
	if unknown && !t.own.podsUnknown {
		t.nodeProblem(t.options.NodeName, "spec.podCIDRs", "there is none, which detectLocalMode (--detect-local-mode) "+
			"NodeCIDR needs; until it has one, pods are not recognised, and connections of others to ClusterIPs are not "+
			"masqueraded")
	}
	if !unknown && t.own.podsUnknown {
		t.ceased = append(t.ceased, "Node "+t.options.NodeName)
	}
	t.own.podsUnknown = unknown
}

func (t *Table) nodeProblem(node, field, reason string) {
	t.problems = append(t.problems, Problem{Object: "Node " + node, Field: field, Reason: reason})
}
