package model

import "net/netip"

// Packet is the first packet of a connection or flow.
type Packet struct {
	Protocol    Protocol
	Source      netip.Addr
	Destination netip.AddrPort
	Interface   string // on which it arrived; empty: a process of this node sends it
}

// Decision is what must happen to a Packet, and which row says so.
type Decision struct {
	Verdict    Verdict
	Key        Key          // the Frontend that took the packet; zero if none did
	Guard      netip.Prefix // the guard that took it; zero if none did
	Pool       PoolID       // Forward: the connection goes to one of its serving backends
	NotAllowed bool         // Drop: the source is not among those the Frontend allows
	snat       bool
	source     netip.Addr
}

// Masquerade reports whether the backend sees the node's address in place of the client's. One reason is the row. The
// other is a hairpin: the backend is the client, on this node. Its answer to itself would otherwise never pass the node
// and be translated back.
func (d Decision) Masquerade(b Backend) bool { return d.snat || b.Local && b.Addr == d.source }

// Lookup says what must happen to a packet. It is the specification of every data plane.
func (s *State) Lookup(p Packet) Decision {
	pod := s.Pods.Contain(p.Source, p.Interface)
	key, row, ok := s.frontend(p, pod || p.Interface == "")
	switch {
	case !ok:
		return s.guard(p.Destination.Addr())
	case !row.Allows(p.Source):
		return Decision{Verdict: Drop, Key: key, NotAllowed: true}
	case row.Verdict != Forward:
		return Decision{Verdict: row.Verdict, Key: key}
	}
	return Decision{
		Verdict: Forward,
		Key:     key,
		Pool:    row.Pool,
		snat:    row.SNAT == Always || row.SNAT == OffCluster && !pod,
		source:  p.Source,
	}
}

// frontend finds the row for a packet: an Internal one before one for Any client.
func (s *State) frontend(p Packet, internal bool) (Key, Frontend, bool) {
	key := Key{p.Destination.Addr(), p.Destination.Port(), p.Protocol, Internal}
	if internal {
		if row, ok := s.Frontends[key]; ok {
			return key, row, true
		}
	}
	key.Scope = Any
	row, ok := s.Frontends[key]
	return key, row, ok
}

// guard is the verdict of the longest prefix that contains an address to which no Frontend belongs.
func (s *State) guard(a netip.Addr) Decision {
	for bits := a.BitLen(); bits >= 0; bits-- {
		prefix, err := a.Prefix(bits)
		if err != nil { // not an address
			break
		}
		if verdict, ok := s.Guards[prefix]; ok {
			return Decision{Verdict: verdict, Guard: prefix}
		}
	}
	return Decision{Verdict: Pass}
}
