// Package httpserve is how the agent listens for HTTP. All servers of a kind have one Pool, which bounds their
// connections in all and for each source, and the time of each step. Clients that are slow, idle or many thus keep
// neither the agent's files nor other clients' answers.
//
//	listener ─► Pool ─────────────────────► http.Server ─► handler
//	listener ─►  │ too many? closes one of     │ header, request, answer, idle: each has its time
//	             ▼ the source that has most    ▼
//	           told(listener, reason)     closed
//
// A new connection is always accepted. An old one is closed for it. An accept loop could wait for a free place, as
// netutil.LimitListener does. Then the kubelet would have to wait for the clients that hold all places.
package httpserve

import (
	"net/netip"
	"time"
)

// Limits are those of all servers of a Pool together.
type Limits struct {
	Listener    string // names the Pool in metrics
	Connections int    // in all
	Source      int    // connections of one source
	HeaderBytes int    // of a request, approximately
	BodyBytes   int64  // of a request other than GET and HEAD; 0: no body is read
	// Header and Request bound the time until the header of a request, and all of it, has arrived. Answer bounds the time
	// from the header to the last byte of the answer; 0: nothing does. Idle is the time between two requests.
	Header, Request, Answer, Idle time.Duration
	// Pace is the pause after a connection for which another one was closed. A flood then costs little processor time.
	// Clients of that listener wait for the flood: where they must not, it is 0.
	Pace time.Duration
}

// Health are the limits of /healthz, /livez and all health check ports together. Answers are short and at hand.
func Health() Limits {
	return Limits{
		Listener: "health", Connections: 256, Source: 64, HeaderBytes: 16 << 10,
		Header: 5 * time.Second, Request: 5 * time.Second, Answer: 5 * time.Second, Idle: time.Minute,
	}
}

// Metrics are the limits of the listener for operators. An answer takes memory, so there are few connections. Profiles
// extend the time of their answer themselves.
func Metrics() Limits {
	return Limits{
		Listener: "metrics", Connections: 32, Source: 16, HeaderBytes: 64 << 10, BodyBytes: 64 << 10,
		Header: 10 * time.Second, Request: 30 * time.Second, Answer: time.Minute, Idle: 2 * time.Minute,
		Pace: time.Millisecond,
	}
}

// Control are the limits of the control socket. Only root reaches it. A change of the data plane answers for minutes.
func Control() Limits {
	return Limits{
		Listener: "control", Connections: 32, Source: 32, HeaderBytes: 64 << 10, BodyBytes: 64 << 10,
		Header: 10 * time.Second, Request: 10 * time.Second, Idle: 10 * time.Second,
	}
}

// The reasons for which a Pool closes a connection.
const (
	Source    = "source"    // a newer connection of the same source takes the place
	Total     = "total"     // a newer connection takes the place
	Busy      = "busy"      // all other connections are being answered
	Slow      = "slow"      // the request does not come, or the answer is not taken, in its time
	Body      = "body"      // the request has a body that is not read, or too large
	Malformed = "malformed" // the request is no HTTP, or its header is too large
)

// Listeners are the names of all Limits.
func Listeners() []string { return []string{Health().Listener, Metrics().Listener, Control().Listener} }

// Reasons are all reasons.
func Reasons() []string { return []string{Source, Total, Busy, Slow, Body, Malformed} }

const ipv6Source = 64 // bits: the smallest network that one client has

// sourceOf is what counts as one client: an IPv4 address, all of 127.0.0.0/8, an IPv6 network of 64 bits, or all
// clients of a Unix socket.
func sourceOf(remote string) netip.Prefix {
	client, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Prefix{}
	}
	switch a := client.Addr().Unmap().WithZone(""); {
	case a.Is4() && a.IsLoopback():
		return netip.PrefixFrom(a, 8).Masked()
	case a.Is4():
		return netip.PrefixFrom(a, a.BitLen())
	default:
		return netip.PrefixFrom(a, ipv6Source).Masked()
	}
}
