// Package hns is what Fairlead uses of the Host Networking Service (HNS), which programs the virtual switch of Windows:
//
//	kernelspace ─► HNS ─┬─ System (Windows): hnslib ─► computenetwork.dll ─► the service
//	                    └─ package hnssim (anywhere): a simulator
//
// Documents have the fields of HNS's own JSON, of schema 2.0, as far as Fairlead reads or writes them.
package hns

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
)

// HNS is the service. Implementations are for one goroutine at a time. Ids come back in capitals. An error wraps one of
// those of this package, if there is one for it.
type HNS interface {
	Version(ctx context.Context) (Version, error)
	// Network has a name. There may be none: ErrNoNetwork.
	Network(ctx context.Context, name string) (Network, error)
	// EndpointIDs are those of all endpoints of a network.
	EndpointIDs(ctx context.Context, network string) ([]string, error)
	Endpoint(ctx context.Context, id string) (Endpoint, error)
	// CreateEndpoint makes an endpoint in e.Network. It comes back with its id.
	CreateEndpoint(ctx context.Context, e Endpoint) (Endpoint, error)
	DeleteEndpoint(ctx context.Context, id string) error
	LoadBalancerIDs(ctx context.Context) ([]string, error)
	LoadBalancer(ctx context.Context, id string) (LoadBalancer, error)
	CreateLoadBalancer(ctx context.Context, b LoadBalancer) (LoadBalancer, error)
	// ModifyLoadBalancer replaces the document with that id. It returns what HNS has then, for versions of HNS are known
	// that report success and do nothing.
	ModifyLoadBalancer(ctx context.Context, b LoadBalancer) (LoadBalancer, error)
	DeleteLoadBalancer(ctx context.Context, id string) error
}

// Error is a failure of HNS, by its HRESULT. See winerror.h of the Windows SDK.
type Error uint32

// The failures that Fairlead tells apart.
const (
	ErrNoNetwork  Error = 0x803B0001 // HCN_E_NETWORK_NOT_FOUND
	ErrNoEndpoint Error = 0x803B0002 // HCN_E_ENDPOINT_NOT_FOUND
	ErrPortInUse  Error = 0x803B0013 // HCN_E_PORT_ALREADY_EXISTS
	ErrNotFound   Error = 0x80070490 // ERROR_NOT_FOUND
	ErrExists     Error = 0x800700B7 // ERROR_ALREADY_EXISTS
	ErrInUse      Error = 0x800700AA // ERROR_BUSY: a load balancer has the endpoint
	ErrInvalid    Error = 0x80070057 // E_INVALIDARG
	ErrMissing    Error = 0x80004001 // E_NOTIMPL: this version of HNS cannot do it
	ErrNotRunning Error = 0x800706B5 // RPC_S_UNKNOWN_IF: the service does not run
)

func (e Error) Error() string {
	words := map[Error]string{
		ErrNoNetwork: "there is no such network", ErrNoEndpoint: "there is no such endpoint",
		ErrPortInUse: "another load balancer has the port", ErrNotFound: "there is no such object",
		ErrExists: "there is one already", ErrInUse: "it is in use", ErrInvalid: "HNS refuses the document",
		ErrMissing: "this version of HNS cannot do it", ErrNotRunning: "HNS does not run",
	}[e]
	if words == "" {
		return fmt.Sprintf("HNS error %#x", uint32(e))
	}
	return fmt.Sprintf("%s (HNS error %#x)", words, uint32(e))
}

// Version is that of HNS, not of Windows.
type Version struct{ Major, Minor int }

func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }

// Features are what versions of HNS differ in. The bounds are those of hnslib's hcn/hcnglobals.go.
type Features struct {
	Documents bool // schema 2.0: nothing works without it
	DSR       bool // direct server return: a backend sees its client's address
	DualStack bool
	Affinity  bool // a load balancer can remember its clients
	Modify    bool // a load balancer can be changed
}

// Features are those of a version.
func (v Version) Features() Features {
	from := func(major, minor int) bool { return v.in(major, minor, math.MaxInt) }
	return Features{
		Documents: from(9, 2), DSR: v.in(9, 3, 9) || from(10, 2), DualStack: from(11, 10),
		Affinity: from(12, 0), Modify: from(15, 5),
	}
}

// Lacks names the features that users may miss.
func (f Features) Lacks() (words []string) {
	for word, has := range map[string]bool{"DSR": f.DSR, "IPv6": f.DualStack, "session affinity": f.Affinity} {
		if !has {
			words = append(words, word)
		}
	}
	slices.Sort(words)
	return words
}

// in reports whether the version is at least major.minor, and no more than last in its first part.
func (v Version) in(major, minor, last int) bool {
	return v.Major <= last && (v.Major > major || v.Major == major && v.Minor >= minor)
}

// SchemaVersion is that of a document.
type SchemaVersion struct{ Major, Minor int }

// Schema is the one of all documents here.
func Schema() SchemaVersion { return SchemaVersion{2, 0} }

// Network is a virtual switch's network. The container network plugin makes it.
type Network struct {
	ID            string `json:"ID,omitempty"`
	Name          string `json:",omitempty"`
	Type          string `json:",omitempty"` // L2Bridge or Overlay
	Policies      []Policy
	SchemaVersion SchemaVersion
}

// Overlay is the Type of networks whose packets go to other nodes in VXLAN.
const Overlay = "Overlay"

// Policy is a setting of a network or endpoint.
type Policy struct {
	Type     string
	Settings json.RawMessage `json:",omitempty"`
}

// The types of policies, and their settings.
const (
	RemoteSubnetRoute = "RemoteSubnetRoute" // of an overlay network: the node that has a prefix of pods
	ProviderAddress   = "ProviderAddress"   // of a remote endpoint: the node that it is on
)

// Route is the setting of a RemoteSubnetRoute.
type Route struct {
	DestinationPrefix           string
	IsolationID                 uint16 `json:"IsolationId"`
	ProviderAddress             string
	DistributedRouterMacAddress string
}

// Provider is the setting of a ProviderAddress.
type Provider struct{ ProviderAddress string }

// Endpoint is a port of the switch, as a pod has one, or what stands for an address elsewhere.
type Endpoint struct {
	ID               string     `json:"ID,omitempty"`
	Name             string     `json:",omitempty"`
	Network          string     `json:"HostComputeNetwork,omitempty"`
	IPConfigurations []IPConfig `json:"IpConfigurations,omitempty"`
	MACAddress       string     `json:"MacAddress,omitempty"`
	Policies         []Policy   `json:",omitempty"`
	Flags            uint32     `json:",omitempty"`
	SchemaVersion    SchemaVersion
}

// Remote is the flag of an endpoint that is not on this node.
const Remote = 1

// IPConfig is an address of an endpoint.
type IPConfig struct {
	Address string `json:"IpAddress"`
}

// LoadBalancer sends connections to an address and port to one of its endpoints.
type LoadBalancer struct {
	ID            string        `json:"ID,omitempty"`
	Endpoints     []string      `json:"HostComputeEndpoints,omitempty"` // ids
	SourceVIP     string        `json:",omitempty"`
	FrontendVIPs  []string      `json:",omitempty"` // none: the node's own addresses
	PortMappings  []PortMapping `json:",omitempty"`
	SchemaVersion SchemaVersion
	Flags         uint32 `json:",omitempty"`
}

// Flags of a load balancer.
const (
	DSR  = 1
	IPv6 = 2
)

// PortMapping is the port of clients, and that of backends.
type PortMapping struct {
	Protocol         uint32 `json:",omitempty"` // IANA's number
	InternalPort     uint16 `json:",omitempty"`
	ExternalPort     uint16 `json:",omitempty"`
	DistributionType uint32 `json:",omitempty"`
	Flags            uint32 `json:",omitempty"`
}

// SourceIP is the distribution by which a client keeps its endpoint.
const SourceIP = 2

// Flags of a port mapping.
const (
	LocalRoutedVIP = 2 // the port of a node
	UseMux         = 4
	PreserveDIP    = 8
	VIPExternalIP  = 16 // clients are outside of the cluster
)
