// Package traffic has servers and clients in the places of a virtual cluster: it measures, and it watches. A client
// waits for its answer (a closed loop), or keeps to a rate (an open one), and is one of three, as its purpose is.
//
//	StartWorker ─► this program once more, in a place: Main
//	     │ Serve ─► HTTP (delayed, limited, many ports), bulk data
//	     │ Run ───► Load: many clients that are measured ─► Result: counts, errors by kind, histograms
//	     └ CPU ───► processor time
//	StartWatch ─► clients in many places, of the servers of a testbed ─► Report: what each noticed, after which step
//	Loop ───────► a client and its server in one thread ─► what each connection and request took
//
// Workers are processes of their own, so that the proxy's cost is told apart from theirs, and no goroutine changes
// namespaces. The clients of a Watch are goroutines: they are everywhere at once, and are not measured.
//
// Requests reach a worker, and results come back, as JSON-RPC on its standard input and output. It ends with them, and
// so with the process that has started it.
//
// With a Rate, requests begin when their time has come, and times count from then. So waiting for a client, or for the
// client's processor, counts. A closed loop, as that of ab, asks the less the slower the answers are. It does not see
// how long a request would have waited that it did not send.
//
// HTTP is that of net/http as far as messages are read. Its client and its server are not used: with 10,000 connections
// and two processors they would be most of what is measured. A request here is the same bytes each time, and so is an
// answer; a connection is a goroutine with a buffer of a kilobyte.
//
// Kernel work for packets counts as time of the process that it interrupts. Within one machine the sender's processor
// carries a packet through all namespaces, up to the receiver's queue.
package traffic

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Protocol is what a server and its clients speak.
type Protocol string

// Protocols.
const (
	// HTTP is HTTP/1.1.
	HTTP Protocol = "http"
	// Bulk is data without end by TCP, from the client to the server.
	Bulk Protocol = "bulk"
)

// Server describes what a worker serves, on all addresses of its place.
type Server struct {
	Protocol Protocol // empty: HTTP
	// Ports are one backend each, with a Limit and a Served of its own.
	Ports []uint16
	Bytes int           // of the body of each answer of HTTP
	Delay time.Duration // of each answer of HTTP
	Limit Limit         // of HTTP
	// Workers is how many requests of HTTP each port serves at once, from the beginning of the Delay until the answer
	// is written. The others wait, in the order of their arrival. 0: any number.
	Workers int
}

// Limit is nginx's limit_req: each backend answers Rate requests per second, one after the other. Burst more than
// those may wait; further requests are answered with status 503 at once.
type Limit struct {
	Rate  float64 // per second; 0: no limit
	Burst int
}

// Ports are count ports, beginning with first.
func Ports(first uint16, count int) []uint16 {
	ports := make([]uint16, count)
	for i := range ports {
		ports[i] = first + uint16(i)
	}
	return ports
}

// Served is what a backend has served.
type Served struct {
	Connections int64 // accepted
	Answered    int64 // requests of HTTP with status 200
}

// Load describes what clients do. It ends with whichever of Requests and Duration comes first, or by Running.Stop.
type Load struct {
	Protocol Protocol // empty: HTTP
	// Targets are asked in turn.
	Targets []netip.AddrPort
	// Requests is how many there are in all. It does not matter to Bulk.
	Requests int
	// Duration is the time in which requests begin. Those under way are awaited.
	Duration time.Duration
	// Concurrency is the number of clients; of connections, with Bulk. 0: 1.
	Concurrency int
	// Rate is how many requests begin in a second, evenly spread, by whichever client is free; 0: each client asks when
	// it has been answered. It does not matter to Bulk.
	Rate float64
	// KeepAlive has clients keep their connections: one to each target that they have asked.
	KeepAlive bool
	// FIN has clients of HTTP end connections in order. Otherwise all reset them, and leave nothing that waits.
	FIN bool
	// Sources are ports to connect from, in turn, so that they are used again soon; empty: the kernel chooses.
	Sources []uint16
	// Addresses are those that clients of HTTP have, each its own as far as there are as many; empty: the place's.
	Addresses []netip.Addr
	// Timeout is how long a request may take, connecting included; 0: 10 s.
	Timeout time.Duration
	// Each has Result.Each tell of each request of HTTP.
	Each bool
	// Interval is that of Result.Intervals, of Bulk; 0: none.
	Interval time.Duration
}

func (l Load) withDefaults() (Load, error) {
	l.Protocol, l.Timeout = cmp.Or(l.Protocol, HTTP), cmp.Or(l.Timeout, 10*time.Second)
	l.Concurrency = max(l.Concurrency, 1)
	switch {
	case len(l.Targets) == 0:
		return l, errors.New("a load needs a target")
	case l.Rate < 0 || l.Requests < 0 || l.Duration < 0 || l.Interval < 0:
		return l, errors.New("a load's rate, requests, duration and interval must not be negative")
	case len(l.Addresses) > 0 && (l.Protocol != HTTP || len(l.Sources) > 0):
		return l, errors.New("clients with addresses of their own are those of HTTP, and choose no ports")
	case l.Protocol != HTTP && l.Protocol != Bulk:
		return l, fmt.Errorf("there is no protocol %q", l.Protocol)
	}
	return l, nil
}

// files is how many files the clients need at the same time.
func (l Load) files() int {
	if l.KeepAlive {
		return l.Concurrency * len(l.Targets)
	}
	return l.Concurrency
}
