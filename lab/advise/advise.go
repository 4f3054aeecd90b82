// Package advise finds the data plane that suits a node. It measures what the kernel can do, and how fast that is with
// the node's own rows. Where nothing can be measured, it uses published figures.
//
//	State ─► sample ─► for each plane: scratch (a virtual cluster) ─► Sync, Apply, connections, requests ─► Finding
//	                                                                                                          │
//	published figures ──────────────────────────────────────────────────────────────► Choose: pure ◄──────────┘
//	                                                                                    │
//	                                                                                    └─► Choice, and why
//
// The measurements run in network namespaces without a name, with their own cgroup and file system for programs. The
// machine's own rules, addresses and Services are not touched, and the kernel removes all of it with the process,
// however that ends. That needs root; without it there are the published figures.
package advise

import (
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/lab/bench"
)

// Plane is a data plane that may be chosen.
type Plane struct {
	Name string
	// Open makes it, with all that wraps it, in the network namespace of the calling thread, which has nothing in
	// it. The caller closes it.
	Open func(Place) (dataplane.Dataplane, error)
}

// Place is what a plane finds in a scratch cluster beside the network. Nil fields are not there.
type Place struct {
	Cgroup string // of all sockets there
	BPF    string // a directory in a file system of that type
}

// Finding is what is known of a plane on this machine.
type Finding struct {
	Plane string `json:"plane"`
	// Missing says why it cannot run here; empty: it can, as far as is known.
	Missing string `json:"missing,omitempty"`
	// Unserved says which of the node's rows it does not serve; empty: it serves them all.
	Unserved string `json:"unserved,omitempty"`
	// Figures were measured; nil: they were not, and Unmeasured says why.
	Figures    *Figures `json:"figures,omitempty"`
	Unmeasured string   `json:"unmeasured,omitempty"`
}

// Ratio is how many times as long as without a proxy something takes, with the bounds between which that lies with a
// probability of 95 %.
type Ratio struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

func (r Ratio) String() string { return bench.Ratio(r).String() }

// Figures are what a plane was measured to do. Ratios compare with two pods without a proxy.
type Figures struct {
	Services   int           `json:"services"`          // ports of Services among which it was measured
	Fill       time.Duration `json:"fillNanoseconds"`   // until an empty kernel held all their rows
	Change     time.Duration `json:"changeNanoseconds"` // until it held one change of an endpoint
	Connection Ratio         `json:"connection"`        // time of a connection with one request
	Request    Ratio         `json:"request"`           // time of a request on an open connection
	Rounds     int           `json:"rounds"`            // of connections and requests
}
