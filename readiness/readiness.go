// Package readiness has pods become ready only when their node reaches them. Such a pod names the condition
// fairlead.dev/routed as a readiness gate.
//
//	WatchPods ─► Gate ─ a route, a SYN, any answer ─► SetRouted ─► condition True ─► kubelet: ready
//	               └─── none for some seconds ──────► condition False, and why
//
// The route is not the default one: a router there may answer for anybody. A SYN works with every network plugin:
// NetworkPolicies let packets of the pod's node pass, and each kernel answers, be it by a reset. ICMP needs a right,
// and not every device uses ARP. The condition names the addresses, so that it holds over restarts of the agent.
package readiness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

// API is what a kube.Client does.
type API interface {
	WatchPods(node string, changed func(service.Name, *kube.Pod)) kube.PodWatch
	SetRouted(ctx context.Context, p *kube.Pod, now kube.Routed) error
}

const (
	// anyPort is asked where a pod declares no port of TCP. A closed port is answered as well.
	anyPort = 1
	// answerTime leaves the kernel the three seconds in which it looks for a neighbour, so that the error is its own.
	answerTime = 4 * time.Second
	// tolerance is until an address that is not reached is told.
	tolerance             = 5 * time.Second
	leastPause, mostPause = 250 * time.Millisecond, 5 * time.Second // between two attempts
	words                 = 40                                      // about pods, in a minute
)

// Gate sets the conditions of a node's pods from Open to Close.
type Gate struct {
	Node string
	API  API
	Log  *slog.Logger
	Emit func(kube.Event)

	kube.PodWatch // since Open

	reach   func(context.Context, netip.AddrPort) error
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	running sync.WaitGroup
	asked   map[service.Name]attempt // of the goroutine of the watch

	mu   sync.Mutex
	said said.Share
}

// attempt is to reach a pod, which delays no other one: each has a goroutine, and a kubelet bounds how many there are.
// When it is over, its ctx has ended.
type attempt struct {
	pod    string // its UID and addresses
	ctx    context.Context
	cancel context.CancelFunc
}

// Open begins.
func (g *Gate) Open() *Gate {
	if g.reach == nil {
		g.reach = reach
	}
	g.asked, g.said = map[service.Name]attempt{}, said.Share{Words: words, While: time.Minute}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.PodWatch = g.API.WatchPods(g.Node, g.changed)
	return g
}

// Close leaves all conditions as they are.
func (g *Gate) Close() error {
	err := g.PodWatch.Close()
	g.cancel()
	g.running.Wait()
	return err
}

// changed is told of a pod; nil: it is gone.
func (g *Gate) changed(name service.Name, p *kube.Pod) {
	a, known := g.asked[name]
	if known && (p == nil || a.pod != identity(p)) {
		a.cancel()
		delete(g.asked, name)
	}
	if p == nil || p.Routed == shown(p) || known && a.ctx.Err() == nil {
		return
	}
	a = attempt{pod: identity(p)}
	a.ctx, a.cancel = context.WithCancel(g.ctx)
	g.asked[name] = a
	g.running.Go(func() {
		defer a.cancel()
		g.show(a.ctx, *p)
	})
}

func identity(p *kube.Pod) string { return fmt.Sprint(p.UID, p.Addrs) }

// show returns when the condition says that all addresses were reached.
func (g *Gate) show(ctx context.Context, p kube.Pod) {
	began := time.Now()
	pauses := wait.Backoff{Duration: leastPause, Factor: 2, Cap: mostPause, Steps: math.MaxInt32}.DelayFunc()
	_ = pauses.Until(ctx, true, true, func(ctx context.Context) (shows bool, _ error) {
		now := g.look(ctx, &p)
		say := now.Is || p.Routed.Is || time.Since(began) > tolerance
		if ctx.Err() == nil && say && now != p.Routed && g.API.SetRouted(ctx, &p, now) == nil {
			g.tell(&p, now)
			p.Routed = now
		}
		g.tellMore()
		return p.Routed == shown(&p), nil
	})
}

// look says whether all addresses of a pod are reached.
func (g *Gate) look(ctx context.Context, p *kube.Pod) kube.Routed {
	for _, a := range p.Addrs {
		if err := g.reach(ctx, netip.AddrPortFrom(a, cmp.Or(p.Port, anyPort))); err != nil {
			return kube.Routed{Why: err.Error()}
		}
	}
	return shown(p)
}

// shown is the condition of a pod whose addresses were reached.
func shown(p *kube.Pod) kube.Routed {
	return kube.Routed{Is: true, Why: fmt.Sprintf("%v answered", p.Addrs)}
}

// tell says that a pod is not reached and why, or that it is after all.
func (g *Gate) tell(p *kube.Pod, now kube.Routed) {
	if now.Is && p.Routed.Why == "" {
		return // it was reached at once, which takes no word
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch object := "Pod " + p.Name.String(); {
	case !g.said.May(p.Name.Namespace, time.Now()):
	case now.Is:
		g.Log.Info("this node reaches a pod at last", "object", object)
	default:
		g.Log.Warn("this node does not reach a pod; it stays unready", "object", object, "error", now.Why)
		g.Emit(kube.Event{Object: object, Warning: true, Reason: "NotRouted", Message: now.Why})
	}
}

// tellMore says of how many there was no room to tell.
func (g *Gate) tellMore() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if more, of := g.said.Withheld(); more > 0 {
		g.Log.Warn("more pods that this node does not reach, or reaches at last", "count", more, "total", of)
	}
}

// reach returns nil if an address has a route of its own and answers.
func reach(ctx context.Context, to netip.AddrPort) error {
	if err := findRoute(to.Addr()); err != nil {
		return err
	}
	conn, err := (&net.Dialer{Timeout: answerTime}).DialContext(ctx, "tcp", to.String())
	switch {
	case err == nil:
		return conn.Close()
	case errors.Is(err, refused):
		return nil
	}
	return err
}
