// Package drain lets a pod wait until no node sends it new connections any more.
//
//	engine ── Round ──► Barrier ── Run ──► Lease of this node: kube.Confirmation
//	                      ▲                       │
//	                      │                       ▼
//	pod ── GET /drained ──┘ ◄── judge ◄── Leases of agents and of kubelets
//
// Agents write only while endpoints of Services with the annotation fairlead.dev/drain-barrier terminate. All of them
// have the same news at the same moment. So each waits for a random part of nodes/500 seconds, and for as long between
// two writes. Together they write at most 500 times a second, as the kubelets of 5,000 nodes do to show that they live.
// An agent lists the Leases only while a pod of its node waits: at first to tell dead nodes later, and once all nodes
// have had the time to write. If one did not, it lists them again every nodes/1000 seconds.
package drain

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

// API is what a kube.Client does, in bounded time.
type API interface {
	Confirm(ctx context.Context, node string, says kube.Confirmation) error
	Confirmations(context.Context) (map[string]kube.Confirmation, error)
	Heartbeats(context.Context) (map[string]kube.Heartbeat, error)
	CountNodes(context.Context) (int, error)
}

const (
	writesPerSecond = 500 // of all nodes
	manyNodes       = 5000
	leastPause      = time.Second     // between two writes of a node
	renewal         = 5 * time.Minute // of a Lease without news
	countInterval   = 10 * time.Minute
	retryPause      = 10 * time.Second
)

// Barrier confirms what this node's kernel has, and answers pods.
type Barrier struct {
	look func(context.Context, func(*service.Table)) error
	log  *slog.Logger

	mu      sync.Mutex
	now     view
	waiting map[netip.Addr]int // requests of each pod
	waits   int                // in all

	listing sync.Mutex // held while the API server is asked
	listed  listing
	failure said.Condition // of Run
}

// view is what is known at a moment.
type view struct {
	engine.InForce
	node    string
	api     API           // nil: there is none
	changed chan struct{} // closed when the view is out of date
	spread  time.Duration // nodes/writesPerSecond
}

// New makes a Barrier. look has the engine's goroutine read the Table.
func New(look func(context.Context, func(*service.Table)) error, log *slog.Logger) *Barrier {
	return &Barrier{look: look, log: log, waiting: map[netip.Addr]int{}, now: view{
		changed: make(chan struct{}), spread: manyNodes * time.Second / writesPerSecond, // until they are counted
	}}
}

// Use has an API used in the name of a node; nil: there is none, and no other node.
func (b *Barrier) Use(node string, api API) {
	b.change(func(v *view) { v.node, v.api = node, api })
}

// Round is told of each round of the engine.
func (b *Barrier) Round(r engine.Round) {
	v := b.view()
	if unused := v.Services+r.InForce.Services == 0; unused || reflect.DeepEqual(v.InForce, r.InForce) {
		return
	}
	b.change(func(v *view) { v.InForce = r.InForce })
}

func (b *Barrier) view() view {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now
}

// change has those who wait for a change look again.
func (b *Barrier) change(f func(*view)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.now.changed)
	b.now.changed = make(chan struct{})
	f(&b.now)
}

// Run confirms until ctx ends.
func (b *Barrier) Run(ctx context.Context) {
	var confirmed engine.InForce
	var written, counted time.Time
	for ctx.Err() == nil {
		v := b.view()
		unused := v.api == nil || v.Services == 0 || v.Version == 0
		if unused || time.Since(written) < renewal && suffices(confirmed, v.InForce) {
			wait(ctx, v.changed, renewal)
			continue
		}
		if time.Since(counted) > countInterval {
			counted = time.Now()
			if n, err := v.api.CountNodes(ctx); err == nil {
				b.change(func(v *view) { v.spread = time.Duration(n) * time.Second / writesPerSecond })
			}
		}
		spread := b.view().spread
		wait(ctx, nil, max(rand.N(spread+1), max(leastPause, spread)-time.Since(written)))
		v.InForce = b.view().InForce
		if !b.confirm(ctx, v) {
			wait(ctx, nil, retryPause+rand.N(spread+1))
			continue
		}
		confirmed, written = v.InForce, time.Now()
	}
}

// suffices reports whether there is no news: what a node has confirmed has all endpoints that terminate, or is all that
// is in force. A slice may be in force while older changes of other namespaces wait. After a restore of etcd, versions
// count anew.
func suffices(confirmed, now engine.InForce) bool {
	all := now.Ended <= confirmed.Version && confirmed.Version <= now.Version
	return slices.Equal(confirmed.Used, now.Used) && (all || confirmed.Version == now.Version)
}

// confirm reports success.
func (b *Barrier) confirm(ctx context.Context, v view) bool {
	err := v.api.Confirm(ctx, v.node, kube.Confirmation{Version: v.Version, Used: v.Used, Renewed: time.Now()})
	switch {
	case err == nil && b.failure.Cleared():
		b.log.Info("this node confirms again which endpoints it does not use any more")
	case err != nil && b.failure.Changed(err.Error()):
		b.log.Warn("cannot confirm which endpoints this node does not use any more; pods wait for it", "error", err,
			"retry", retryPause, "advice", "let the agent list, create and patch Leases: see docs/install.md")
	}
	return err == nil
}

// wait returns when changed is closed, or after a time.
func wait(ctx context.Context, changed <-chan struct{}, d time.Duration) {
	select {
	case <-changed:
	case <-time.After(d):
	case <-ctx.Done():
	}
}
