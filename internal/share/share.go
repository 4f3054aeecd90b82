// Package share divides what a process has only so much of, such as connections, flows and memory for datagrams. The
// division is max-min fair: one namespace alone may have all of it. When it is full, the one that has most gives way.
//
//	Enter ─► room? ─ yes ─────────────────────────────────────────────────────────────► in
//	           └ no ─► namespace with most ─► its Service with most ─► its client with most
//	                     that is the newcomer's own client ─► refused, or in the place of that client's quietest
//	                     that is another ─► the quietest of that one yields ─────────────► in
//
// What is within its share stays as if there were no others, and finds a place as if there were no others.
package share

import (
	"net/netip"
	"strings"
)

// Owner is whose something is.
type Owner struct {
	Namespace string
	Service   string // of the namespace
	// Unproven is a connection without an answer yet. All of it together counts as one client of the Service, because a
	// sender may invent as many clients as it likes.
	Unproven bool
	Client   Client
}

// Client is what counts as one client. The zero value is a client of whom nothing is known.
type Client struct{ network netip.Prefix }

const ipv6Network = 64 // bits: the smallest network that one client has

// At is the client at an address: the address itself, or its IPv6 network of 64 bits. All of 127.0.0.0/8 is one.
func At(a netip.Addr) Client {
	a, bits := a.Unmap().WithZone(""), ipv6Network
	if a.Is4() {
		bits = a.BitLen()
	}
	if a.Is4() && a.IsLoopback() {
		bits = 8
	}
	network, _ := a.Prefix(bits) // fails only without an address
	return Client{network: network}
}

// Of is the owner of what a client has with a Service. The name of that is "namespace/name", or "namespace/name:port".
func Of(service string, c Client) Owner {
	namespace, rest, _ := strings.Cut(service, "/")
	name, _, _ := strings.Cut(rest, ":")
	return Owner{Namespace: namespace, Service: name, Client: c}
}

// A Holder has a place. Its methods may be called from any goroutine, and do not call the Pool, but for Leave.
type Holder interface {
	// Used is when the place was used last, as any number that grows.
	Used() int64
	// Yield is called when the place was given to another. It does not wait.
	Yield()
}
