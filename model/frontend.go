// Package model is the vocabulary of Fairlead: flat rows that say exactly what a node does with a
// packet to a Service address. Kubernetes words end above it, kernel words begin below it:
//
//	service.Table ──► State ──► Diff ──► Change ──► dataplane
//	                    │
//	                    ├──► Lookup: what must happen to one packet (the executable specification)
//	                    └──► String: one sorted line per row (golden files, "fairlead dump")
//
// Rows are values. A slice inside a row is never modified once the row is part of a State, so rows
// may be shared between States and kept by their readers.
package model

import (
	"cmp"
	"net/netip"
	"slices"
)

// Protocol is an IANA protocol number, so that it goes into kernel structures unchanged.
type Protocol uint8

// The protocols a Service can have.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// Scope says which clients a Frontend serves.
type Scope uint8

const (
	// Any is every client that no Internal row of the same address, port and protocol takes.
	Any Scope = iota
	// Internal is this node itself and the pods that State.Pods recognises.
	Internal
)

// Key names a Frontend: a destination, and the clients it is meant for.
type Key struct {
	Addr     netip.Addr
	Port     uint16
	Protocol Protocol
	Scope    Scope
}

// AddrPort is the destination without protocol and scope.
func (k Key) AddrPort() netip.AddrPort { return netip.AddrPortFrom(k.Addr, k.Port) }

// Compare orders keys by address, port, protocol and scope.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.AddrPort().Compare(o.AddrPort()),
		cmp.Compare(k.Protocol, o.Protocol), cmp.Compare(k.Scope, o.Scope))
}

// Verdict is what happens to a packet.
type Verdict uint8

const (
	// Pass leaves the packet alone: its destination is no concern of Fairlead's. No row says it.
	Pass Verdict = iota
	// Forward sends the connection to a backend.
	Forward
	// Reject answers: TCP with a reset, all others with an ICMP error.
	Reject
	// Drop is silent.
	Drop
)

// SNAT says whose source address is replaced by the node's.
type SNAT uint8

const (
	// Never keeps the client's address (but for hairpin connections, see Decision.Masquerade).
	Never SNAT = iota
	// OffCluster replaces the address of clients that State.Pods does not recognise, this node included.
	OffCluster
	// Always replaces the address of every client.
	Always
)

// Kind says what the address of a Frontend is in the words of Kubernetes. To packets it makes no difference: only a
// kernel asks for it that has objects of different types, as that of Windows has.
type Kind uint8

// The kinds of addresses at which a Service is reached.
const (
	ClusterIP Kind = iota
	LoadBalancerIP
	ExternalIP
	NodePort
	HealthCheckNodePort // where the load balancer asks for the Service's health
)

func (k Kind) String() string {
	return [...]string{"ClusterIP", "LoadBalancer IP", "external IP", "NodePort", "healthCheckNodePort"}[k]
}

// Frontend is what happens to packets for one Key. It leaves a data plane nothing to decide.
type Frontend struct {
	Service string         // namespace/name:port, for people
	Pool    PoolID         // Forward only: a row of State.Pools
	Allow   []netip.Prefix // sorted and disjoint; nil: everyone, otherwise all others are dropped
	Verdict Verdict        // Forward, Reject or Drop
	SNAT    SNAT           // Forward only
	Kind    Kind           // of the address
	Kept    bool           // Kind LoadBalancerIP: backends see this address as the destination, not their own
	Hooked  bool           // Forward only: each packet passes the kernel's hooks; no flowtable forwards it
}

// Equal reports whether two rows say the same.
func (f Frontend) Equal(o Frontend) bool {
	return f.Service == o.Service && f.Verdict == o.Verdict && f.Pool == o.Pool && f.SNAT == o.SNAT &&
		f.Kind == o.Kind && f.Kept == o.Kept && f.Hooked == o.Hooked &&
		(f.Allow == nil) == (o.Allow == nil) && slices.Equal(f.Allow, o.Allow)
}

// Allows reports whether clients with that source address are served at all.
func (f Frontend) Allows(source netip.Addr) bool {
	return f.Allow == nil || contains(f.Allow, source)
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
