package model

import "net/netip"

// Outcome is what became of one connection that began through a Frontend. Kernels and planes observe it. Package
// service decides what follows.
type Outcome struct {
	To       netip.AddrPort // the Frontend's
	Protocol Protocol
	Backend  netip.AddrPort
	Client   netip.Addr
	Result   Result
}

// Result is how a backend has answered.
type Result uint8

const (
	// Answered: a packet came back that begins a connection.
	Answered Result = iota
	// Unanswered: the client has sent its first packet again, as nothing came back.
	Unanswered
	// Refused: a reset came back, or an ICMP error that says that the backend cannot be reached.
	Refused
)

func (r Result) String() string { return [...]string{"answered", "unanswered", "refused"}[r] }
