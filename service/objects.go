package service

import (
	"net/netip"
	"slices"
	"strings"
	"time"
	"unique"

	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/model"
)

// Name is the namespace and name of an object.
type Name = types.NamespacedName

// Service is what Compile needs of a Kubernetes Service, validated. FromService makes it. There are many: the order
// of its fields leaves no gaps.
type Service struct {
	Name                Name
	Created             int64 // in microseconds since 1970: decides who gets an address and port that two Services claim
	ClusterIPs          []netip.Addr
	ExternalIPs         []netip.Addr   // sorted
	LoadBalancerIPs     []netip.Addr   // status.loadBalancer.ingress with ipMode VIP only; sorted
	SourceRanges        []netip.Prefix // loadBalancerSourceRanges; nil: all clients, otherwise these alone
	Ports               []Port
	Affinity            time.Duration // ClientIP affinity's timeout; 0: none
	Rebalance           time.Duration // annotation rebalance; 0: none
	HealthCheckNodePort uint16        // 0: none
	Scheduler           Scheduler     // 0: the one that is configured
	ciliums             bool          // Cilium's annotation says so
	health              HealthMode    // empty: as configured
	slow                uint8         // seconds of slow start, and one more; 0: as configured
	InternalLocal       bool          // internalTrafficPolicy: Local
	ExternalLocal       bool          // externalTrafficPolicy: Local
	Passthrough         bool          // externalFailoverPolicy: Passthrough (KEP-6272), which needs ExternalLocal
	Preserve            bool          // annotation preserve-destination, of which only HNS knows
	Barrier             bool          // annotation drain-barrier
	Hooked              bool          // annotation flowtable is off
	Ignored             string        // why this proxy has nothing to do with it; empty: it has
}

// Port is one port of a Service.
type Port struct {
	Name     string
	Protocol model.Protocol
	Port     uint16
	NodePort uint16 // 0: none
}

// Slice is what Compile needs of an EndpointSlice, validated. FromSlice makes it. There are many, as of Services.
type Slice struct {
	Name      Name
	Service   string      // the name of the Service, in the same namespace
	Ports     []SlicePort // sorted by their names
	Endpoints []Endpoint
	// Changed is when what the slice tells happened in the cluster, by the annotation that the endpoint
	// controller writes, in microseconds since 1970; 0: unknown.
	Changed  int64
	Version  uint64 // resourceVersion, if it tells which of two slices changed later; 0: it does not
	Mirrored bool   // made of Endpoints; not used if the Service has real slices
}

// SlicePort says on which port the slice's endpoints serve a port of the Service.
type SlicePort struct {
	Name     string // of the Service's port
	Protocol model.Protocol
	Port     uint16
}

// Endpoint is one address of a Slice.
type Endpoint struct {
	Addr        netip.Addr
	Node        NodeName // of its node; the zero value: unknown
	Ready       bool
	Serving     bool
	Terminating bool
	Weight      uint16 // share of new connections, relative to others; 0: none. 1 without an annotation
	Hints       *Hints // nil: none
}

// NodeName is a name of which there is one copy. It takes half of what a string does: there may be a million endpoints.
type NodeName struct{ unique.Handle[string] }

// NodeNamed makes it; empty: the zero value.
func NodeNamed(name string) (n NodeName) {
	if name != "" {
		n.Handle = unique.Make(name)
	}
	return n
}

func (n NodeName) String() string {
	if n == (NodeName{}) {
		return ""
	}
	return n.Value()
}

// Hints are the nodes and zones that the endpoint is meant to serve.
type Hints struct{ Nodes, Zones []string }

// Node is what matters of this machine's own Node object. FromNode makes it. Without a Name there is no such object: it
// is missing or, if Eligible, not needed, as where there is no API server.
type Node struct {
	Name     string
	Zone     string       // label topology.kubernetes.io/zone; empty: unknown
	IPs      []netip.Addr // primary addresses, one for each family it has
	PodCIDRs []netip.Prefix
	Eligible bool // for load balancers: neither being deleted nor tainted so by the cluster autoscaler
}

// Problem is something wrong with one object. It never stops the others.
type Problem struct {
	Object string `json:"object"`          // kind and name: "Service default/web"; or a file
	Field  string `json:"field,omitempty"` // path in the object: "spec.ports[0].port"; empty: all of it
	Reason string `json:"reason"`          // what is wrong, and what happens therefore
	Cause  Cause  `json:"cause,omitempty"`
	File   string `json:"file,omitempty"` // where it is written, with the line: "web.yaml:12"; empty: in no file
}

// ObjectOf splits the Object of a Problem. A kind without namespaces has none, and a file has no kind of ours.
func ObjectOf(object string) (kind string, name Name) {
	kind, text, _ := strings.Cut(object, " ")
	namespace, inNamespace, namespaced := strings.Cut(text, "/")
	if !namespaced {
		return kind, Name{Name: text}
	}
	return kind, Name{Namespace: namespace, Name: inNamespace}
}

// Cause is the class of a Problem.
type Cause string

// The zero value is that an object says what it may not, or cannot be read.
const (
	Invalid     Cause = ""
	Share       Cause = "share"       // the namespace's share of what the node has is used up
	Precedence  Cause = "precedence"  // what is claimed belongs to the node, or to another Service
	Unsupported Cause = "unsupported" // this node's kernel, or its data plane, cannot do it
	Warning     Cause = "warning"     // it is valid, but probably a mistake
	Unhealthy   Cause = "unhealthy"   // it does not answer clients of this node
)

// Causes are all of them.
func Causes() []Cause { return []Cause{Invalid, Share, Precedence, Unsupported, Warning, Unhealthy} }

func (c Cause) String() string {
	if c == Invalid {
		return "invalid"
	}
	return string(c)
}

// Word is what a line about it begins with.
func (p Problem) Word() string {
	if p.Cause == Warning {
		return "warning"
	}
	return "problem"
}

func (p Problem) Error() string {
	words := slices.DeleteFunc([]string{p.File, p.Object, p.Field, p.Reason}, func(s string) bool { return s == "" })
	return strings.Join(words, ": ")
}
