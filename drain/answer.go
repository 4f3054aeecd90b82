package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
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
	answerTime = 10 * time.Second // until a pod has taken its answer
	// maxWaits leaves connections of the listener to others, and has room for all pods of a node.
	maxWaits      = 200
	maxWaitsOfOne = 2
	// settle is for packets on their way: a client whose first packet was lost sends it again after a second, and
	// connection tracking leads that to the same backend.
	settle = 1200 * time.Millisecond
	// leastLook is between two looks at the Leases, of all pods together, and leastHeartbeat at those of kubelets.
	leastLook      = 250 * time.Millisecond
	leastHeartbeat = time.Minute / watchedPart
	// watchedPart of the time for which a node counts is enough for a kubelet to renew its Lease: see kube.Heartbeats.
	watchedPart = 5
	// confirmed is for how long an agent lives that has confirmed something, whatever its node's kubelet does.
	confirmed = time.Minute
	// Unconfirmed is how long nodes are waited for that confirm nothing, as by a preStop hook that sleeps.
	Unconfirmed = 15 * time.Second
	// Path is where pods ask.
	Path = "/drained"
)

// ServeHTTP answers a pod, which is known by its address, when no node sends it new connections any more. Status 404
// says that it is no endpoint of such a Service, 429 that too many ask, and 503 that the time is up.
func (b *Barrier) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text := cmp.Or(r.FormValue("timeout"), Timeout.String())
	timeout, err := time.ParseDuration(text)
	if err != nil || timeout <= 0 || timeout > maxTimeout {
		http.Error(w, fmt.Sprintf("timeout: %q is no time up to %s", text, maxTimeout), http.StatusBadRequest)
		return
	}
	from, _ := netip.ParseAddrPort(r.RemoteAddr) // of TCP it is one
	pod := from.Addr().Unmap().WithZone("")
	if !b.count(pod, 1) {
		http.Error(w, "too many wait; ask again", http.StatusTooManyRequests)
		return
	}
	defer b.count(pod, -1)
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(timeout + answerTime))
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

// count counts a request of a pod that begins (1), or ends (-1). It returns false for one too many.
func (b *Barrier) count(pod netip.Addr, n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n > 0 && (b.waits == maxWaits || b.waiting[pod] == maxWaitsOfOne) {
		return false
	}
	b.waits += n
	if b.waiting[pod] += n; b.waiting[pod] == 0 {
		delete(b.waiting, pod)
	}
	return true
}

var errNoEndpoint = errors.New("no Service with the annotation fairlead.dev/drain-barrier: \"true\" has this endpoint")

// await returns when no node uses the pod, and a time has passed for packets on their way.
func (b *Barrier) await(ctx context.Context, pod netip.Addr) (verdict, error) {
	began := time.Now()
	e, err := b.ends(ctx, pod)
	if err != nil {
		return verdict{}, err
	}
	v, start := b.view(), time.Now()
	if v.api != nil && v.spread > leastLook {
		_, _ = b.list(ctx, v) // judge lists again: then it is known for how long a dead node has said nothing
	}
	wait(ctx, nil, v.spread-time.Since(start)) // until then all nodes write
	for gone, services := false, -1; ; {
		if n := b.view().Services; n != services { // else there is no need to ask the engine
			services = n
			_ = b.look(ctx, func(t *service.Table) { gone = !slices.ContainsFunc(e.Services, t.HasBarrier) })
		}
		found := verdict{gone: gone}
		if !gone { // else other nodes confirm nothing, and clients expect no answer
			found, err = b.judge(ctx, e)
		}
		if err == nil && found.drained(time.Since(began)) {
			wait(ctx, nil, settle)
			return found, nil
		}
		if wait(ctx, b.view().changed, leastLook); ctx.Err() != nil {
			return found, cmp.Or(err, errors.New(found.String()))
		}
	}
}

// ends returns when this node has heard that the pod terminates.
func (b *Barrier) ends(ctx context.Context, pod netip.Addr) (e service.Ending, err error) {
	for {
		v, now := b.view(), e
		err := b.look(ctx, func(t *service.Table) { now = t.Ending(pod) })
		switch {
		case err != nil:
			return e, err
		case len(now.Services)+len(e.Services) == 0:
			return e, errNoEndpoint
		case len(now.Services) == 0: // it is gone
			e.Version = v.Version
			return e, nil
		case now.All:
			return now, nil
		}
		e = now
		wait(ctx, v.changed, time.Second)
		if ctx.Err() != nil {
			return e, errors.New("this node has not heard that the pod terminates")
		}
	}
}

// verdict names the nodes of each kind.
type verdict struct {
	gone                 bool // the Services are
	confirmed            int
	silent, using, other []string // without a confirmation, using the pod, without Fairlead
}

func (v verdict) drained(waited time.Duration) bool {
	return len(v.silent)+len(v.using) == 0 && (len(v.other) == 0 || waited >= Unconfirmed)
}

func (v verdict) String() string {
	if v.gone {
		return "its Services are gone"
	}
	text := said.Count(v.confirmed, "node") + " confirmed it"
	add := func(what string, nodes []string) {
		if slices.Sort(nodes); len(nodes) > 0 {
			text += "; " + what + ": " + said.List(nodes)
		}
	}
	add("not confirmed by", v.silent)
	add("still used, for want of ready endpoints, by", v.using)
	add("without Fairlead", v.other)
	return text
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
		switch dead := l.kubelets[node].silent(beat.Counts, l.livingAt); {
		case node == v.node || dead && l.agents[node].silent(confirmed, l.at):
		case !known || beat.Renewed.Sub(says.Renewed) > kube.LeaseTime: // by the same clock
			found.other = append(found.other, node)
		default:
			check(node, says)
		}
	}
	return found, nil
}

// listing is what the API server said.
type listing struct {
	confirmations    map[string]kube.Confirmation
	heartbeats       map[string]kube.Heartbeat
	agents, kubelets map[string]heard // of those
	at, livingAt     time.Time        // when they were listed
}

// heard is when a node was heard of. The clock of another node may be wrong, so what counts is that it says something
// new, and when that was seen. Of what was seen once its clock must do.
type heard struct {
	says, seen time.Time // by its clock, and by that of this node
	again      bool      // it had said something else not long before
}

// hear is what is known when a node says something; the last look was at another time.
func (h heard) hear(says, last, now time.Time) heard {
	if known := !h.seen.IsZero(); !known || !h.says.Equal(says) {
		h = heard{says, now, known && now.Sub(last) < confirmed}
	}
	return h
}

// silent reports whether nothing new has come for that long. Its clock alone does not say so.
func (h heard) silent(long time.Duration, now time.Time) bool {
	watched := now.Sub(h.seen)
	return watched > long || !h.again && watched >= long/watchedPart && now.Sub(h.says) > long
}

// list asks the API server, unless it was asked not long ago.
func (b *Barrier) list(ctx context.Context, v view) (last listing, err error) {
	b.listing.Lock()
	defer b.listing.Unlock()
	now, before := time.Now(), b.listed
	if last = before; now.Sub(last.at) < max(leastLook, v.spread/2) {
		return last, nil
	}
	last.at = now
	last.confirmations, err = v.api.Confirmations(ctx)
	agents, kubelets := map[string]heard{}, map[string]heard{}
	for node, says := range last.confirmations {
		agents[node] = before.agents[node].hear(says.Renewed, before.at, now)
	}
	last.agents = agents
	if err == nil && now.Sub(last.livingAt) >= leastHeartbeat {
		last.livingAt = now
		last.heartbeats, err = v.api.Heartbeats(ctx)
		for node, beat := range last.heartbeats {
			kubelets[node] = before.kubelets[node].hear(beat.Renewed, before.livingAt, now)
		}
		last.kubelets = kubelets
	}
	if err == nil {
		b.listed = last
	}
	return last, err
}
