package drain

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

const (
	// Timeout is how long a pod waits that names no time. Five seconds of the default grace period remain. In this time
	// 12,500 nodes can write at most: see writesPerSecond.
	Timeout    = 25 * time.Second
	maxTimeout = 10 * time.Minute
	// maxWaits leaves connections of the listener to others, and has room for all pods of a node.
	maxWaits      = 200
	maxWaitsOfOne = 2
	// settle is for packets on their way: a client whose first packet was lost sends it again after a second, and
	// connection tracking leads that to the same backend.
	settle = 1200 * time.Millisecond
	// leastLook is between two looks at the Leases, of all pods together.
	leastLook = 250 * time.Millisecond
	// heartbeat is for how long a node lives without one: a kubelet renews its Lease every ten seconds.
	heartbeat = time.Minute
	// Unconfirmed is how long nodes are waited for that confirm nothing, as by a preStop hook that sleeps.
	Unconfirmed = 15 * time.Second
)

// Path is where pods ask.
const Path = "/drained"

// ServeHTTP answers a pod, which is known by its address, when no node sends it new connections any more. Status 404
// says that it is no endpoint of such a Service, 429 that too many ask, and 503 that the time is up.
func (b *Barrier) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	timeout := Timeout
	if text := r.FormValue("timeout"); text != "" {
		if timeout, err = time.ParseDuration(text); err != nil || timeout <= 0 || timeout > maxTimeout {
			http.Error(w, fmt.Sprintf("timeout: %q is no time up to %s", text, maxTimeout), http.StatusBadRequest)
			return
		}
	}
	pod := from.Addr().Unmap().WithZone("")
	if !b.enter(pod) {
		http.Error(w, "too many wait; ask again", http.StatusTooManyRequests)
		return
	}
	defer b.leave(pod)
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(timeout + requestTime))
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	switch found, err := b.await(ctx, pod); {
	case errors.Is(err, errNoEndpoint):
		http.Error(w, err.Error(), http.StatusNotFound)
	case err != nil:
		http.Error(w, fmt.Sprintf("not drained within %s: %v", timeout, err), http.StatusServiceUnavailable)
	default:
		fmt.Fprintf(w, "drained: %s\n", found)
	}
}

func (b *Barrier) enter(pod netip.Addr) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.waits == maxWaits || b.waiting[pod] == maxWaitsOfOne {
		return false
	}
	b.waits++
	b.waiting[pod]++
	return true
}

func (b *Barrier) leave(pod netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waits--
	if b.waiting[pod]--; b.waiting[pod] == 0 {
		delete(b.waiting, pod)
	}
}

var errNoEndpoint = errors.New("no Service with the annotation fairlead.dev/drain-barrier: \"true\" has this endpoint")

// await returns when no node uses the pod, and a time has passed for packets on their way.
func (b *Barrier) await(ctx context.Context, pod netip.Addr) (verdict, error) {
	began := time.Now()
	e, err := b.ends(ctx, pod)
	if err != nil {
		return verdict{}, err
	}
	wait(ctx, nil, b.view().spread) // until then all nodes write
	for {
		found, err := b.judge(ctx, e)
		if err == nil && found.drained(time.Since(began)) {
			wait(ctx, nil, settle)
			return found, nil
		}
		wait(ctx, b.view().changed, leastLook)
		switch {
		case ctx.Err() == nil:
		case err != nil:
			return found, err
		default:
			return found, errors.New(found.String())
		}
	}
}

// ends returns when this node has heard that the pod terminates.
func (b *Barrier) ends(ctx context.Context, pod netip.Addr) (e service.Ending, err error) {
	for known := false; ; known = true {
		v := b.view()
		err := b.look(ctx, func(t *service.Table) { e = t.Ending(pod) })
		switch {
		case err != nil:
			return e, err
		case len(e.Namespaces) == 0 && !known:
			return e, errNoEndpoint
		case len(e.Namespaces) == 0: // it is gone
			e.Version = v.Version
			return e, nil
		case e.All:
			return e, nil
		}
		wait(ctx, v.changed, time.Second)
		if ctx.Err() != nil {
			return e, errors.New("this node has not heard that the pod terminates")
		}
	}
}

// verdict names the nodes of each kind.
type verdict struct {
	confirmed            int
	silent, using, other []string // without a confirmation, using the pod, without Fairlead
}

func (v verdict) drained(waited time.Duration) bool {
	return len(v.silent)+len(v.using) == 0 && (len(v.other) == 0 || waited >= Unconfirmed)
}

func (v verdict) String() string {
	parts := []string{said.Count(v.confirmed, "node") + " confirmed it"}
	for _, kind := range []struct {
		what  string
		nodes []string
	}{
		{"not confirmed by", v.silent},
		{"still used, for want of ready endpoints, by", v.using},
		{"without Fairlead", v.other},
	} {
		if len(kind.nodes) > 0 {
			slices.Sort(kind.nodes)
			parts = append(parts, kind.what+": "+said.List(kind.nodes))
		}
	}
	return strings.Join(parts, "; ")
}

// judge compares what all living nodes confirm with what an ending pod needs.
func (b *Barrier) judge(ctx context.Context, e service.Ending) (found verdict, err error) {
	v := b.view()
	l := listing{}
	if v.api != nil {
		if l, err = b.list(ctx, v); err != nil {
			return found, err
		}
	}
	check := func(node string, says kube.Confirmation) {
		switch {
		case says.Version < e.Version:
			found.silent = append(found.silent, node)
		case e.In(says.Used):
			found.using = append(found.using, node)
		default:
			found.confirmed++
		}
	}
	check(v.node, kube.Confirmation{Version: v.Version, Used: v.Used})
	for node, beat := range l.heartbeats {
		says, known := l.confirmations[node]
		switch {
		case node == v.node || l.at.Sub(beat) > heartbeat:
		case !known || l.at.Sub(says.Renewed) > kube.LeaseTime:
			found.other = append(found.other, node)
		default:
			check(node, says)
		}
	}
	return found, nil
}

// listing is what the API server said.
type listing struct {
	confirmations map[string]kube.Confirmation
	heartbeats    map[string]time.Time
	at            time.Time
	beat          time.Time // when the heartbeats were listed
}

// list asks the API server, unless it was asked not long ago.
func (b *Barrier) list(ctx context.Context, v view) (listing, error) {
	b.listing.Lock()
	defer b.listing.Unlock()
	last, now := b.listed, time.Now()
	if now.Sub(last.at) < max(leastLook, v.spread/2) {
		return last, nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	all, err := v.api.Confirmations(ctx)
	if err != nil {
		return last, err
	}
	if now.Sub(last.beat) > retryPause {
		if last.heartbeats, err = v.api.Heartbeats(ctx); err != nil {
			return last, err
		}
		last.beat = now
	}
	last.confirmations, last.at = all, now
	b.listed = last
	return last, nil
}
