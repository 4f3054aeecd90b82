package readiness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"fairlead.dev/fairlead/lab/bubble"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source/kube"
)

// node is one with a Gate, and its pods.
type node struct {
	*Gate
	began  time.Time
	log    strings.Builder
	events []string // their objects

	mu       sync.Mutex
	tell     func(service.Name, *kube.Pod)
	pods     map[service.Name]*kube.Pod
	broken   map[netip.Addr]error
	asked    []netip.AddrPort
	writes   []string
	refusing error // of the API server
}

func newNode(t *testing.T, test func(*node)) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{began: time.Now(), pods: map[service.Name]*kube.Pod{}, broken: map[netip.Addr]error{}}
		n.Gate = &Gate{
			Node: "node", API: n, Log: slog.New(slog.NewTextHandler(&n.log, nil)), Emit: n.event,
			reach: n.answers,
		}
		n.Open()
		test(n)
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
}

func (n *node) WatchPods(_ string, changed func(service.Name, *kube.Pod)) kube.PodWatch {
	n.tell = changed
	return unclosed{}
}

type unclosed struct{ kube.PodWatch }

func (unclosed) Close() error { return nil }

// SetRouted keeps the condition, and has the watch tell of it.
func (n *node) SetRouted(_ context.Context, p *kube.Pod, now kube.Routed) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refusing != nil {
		return n.refusing
	}
	is := n.pods[p.Name]
	if is == nil || is.UID != p.UID {
		return errors.New("it is gone")
	}
	n.writes = append(n.writes, fmt.Sprintf("%s: %t %s", p.Name, now.Is, now.Why))
	next := *is
	next.Routed = now
	n.pods[p.Name] = &next
	return nil
}

func (n *node) answers(_ context.Context, to netip.AddrPort) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked = append(n.asked, to)
	return n.broken[to.Addr()]
}

func (n *node) event(e kube.Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.events = append(n.events, e.Object)
}

// has the watch tell what a pod is now. It is in default.
func (n *node) has(name string, uid types.UID, addrs ...string) {
	n.hasIn("default", name, uid, addrs...)
}

func (n *node) hasIn(namespace, name string, uid types.UID, addrs ...string) {
	p := &kube.Pod{Name: service.Name{Namespace: namespace, Name: name}, UID: uid, Port: 8080}
	for _, a := range addrs {
		p.Addrs = append(p.Addrs, netip.MustParseAddr(a))
	}
	n.mu.Lock()
	if was := n.pods[p.Name]; was != nil && was.UID == uid {
		p.Routed = was.Routed
	}
	n.pods[p.Name] = p
	n.mu.Unlock()
	n.tell(p.Name, p)
	synctest.Wait()
}

// echo has the watch tell of all pods as they are now.
func (n *node) echo() {
	n.mu.Lock()
	var all []*kube.Pod
	for _, p := range n.pods {
		all = append(all, p)
	}
	n.mu.Unlock()
	for _, p := range all {
		n.tell(p.Name, p)
	}
	synctest.Wait()
}

// fails has an address answer no more; nil: it answers.
func (n *node) fails(addr string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.broken[netip.MustParseAddr(addr)] = err
}

func (n *node) want(t *testing.T, what string, writes ...string) {
	t.Helper()
	n.echo()
	n.mu.Lock()
	defer n.mu.Unlock()
	if got, want := strings.Join(n.writes, "\n"), strings.Join(writes, "\n"); got != want {
		t.Errorf("%s, after %s: written is\n%s\nwant\n%s", what, time.Since(n.began), got, want)
	}
	n.writes = nil
}

var errNoRoute = errors.New("no route")

func TestGate_once(t *testing.T) {
	newNode(t, func(n *node) {
		n.has("a", "1", "10.244.1.2", "fd00::2")
		n.want(t, "all answer", "default/a: true [10.244.1.2 fd00::2] answered")
		n.fails("10.244.1.2", errNoRoute)
		bubble.Pass(time.Hour)
		n.want(t, "it is not asked again")
		n.has("a", "2", "10.244.1.2", "fd00::2")
		n.want(t, "a new pod")
		bubble.Pass(10 * time.Second)
		n.want(t, "a new pod", "default/a: false no route")
		if got := fmt.Sprint(n.asked[:2]); got != "[10.244.1.2:8080 [fd00::2]:8080]" {
			t.Errorf("asked are %s", got)
		}
	})
}

// A pod that is not reached for a moment is not told of. One that is not reached for long is, with its reason.
func TestGate_late(t *testing.T) {
	newNode(t, func(n *node) {
		n.fails("fd00::2", errNoRoute)
		n.has("a", "1", "10.244.1.2", "fd00::2")
		bubble.Pass(3 * time.Second)
		n.want(t, "at first")
		n.has("b", "2", "10.244.1.3")
		n.want(t, "another one", "default/b: true [10.244.1.3] answered")
		bubble.Pass(10 * time.Second)
		n.want(t, "it lasts", "default/a: false no route")
		bubble.Pass(time.Hour)
		n.want(t, "it lasts for an hour")
		n.fails("fd00::2", errors.New("silent"))
		bubble.Pass(mostPause)
		n.want(t, "another reason", "default/a: false silent")
		n.fails("fd00::2", nil)
		bubble.Pass(mostPause)
		n.want(t, "at last", "default/a: true [10.244.1.2 fd00::2] answered")
		for word, times := range map[string]int{"level=WARN": 2, "object=\"Pod default/a\" error=silent": 1, "at last": 1} {
			if got := strings.Count(n.log.String(), word); got != times {
				t.Errorf("%d times %s in\n%s", got, word, &n.log)
			}
		}
		if asks := len(n.asked); len(n.events) != 2 || asks > 2*(3600/5+30) {
			t.Errorf("Events of %s, %d probes", n.events, asks)
		}
	})
}

// Another agent has left conditions, one of addresses that a restart of the machine has replaced.
func TestGate_restart(t *testing.T) {
	newNode(t, func(n *node) {
		same, other := service.Name{Namespace: "default", Name: "same"}, service.Name{Namespace: "default", Name: "other"}
		n.pods[same] = &kube.Pod{Name: same, UID: "1", Routed: kube.Routed{Is: true, Why: "[10.244.1.2] answered"}}
		n.pods[other] = &kube.Pod{Name: other, UID: "2", Routed: kube.Routed{Is: true, Why: "[10.244.1.3] answered"}}
		n.fails("10.244.1.4", errNoRoute)
		n.has("same", "1", "10.244.1.2")
		n.has("other", "2", "10.244.1.4")
		n.want(t, "at once", "default/other: false no route")
		n.fails("10.244.1.4", nil)
		bubble.Pass(mostPause)
		n.want(t, "then", "default/other: true [10.244.1.4] answered")
	})
}

// While the API server refuses, and where a pod goes, nothing is lost and nothing remains.
func TestGate_refused(t *testing.T) {
	newNode(t, func(n *node) {
		n.refusing = errors.New("forbidden")
		n.has("a", "1", "10.244.1.2")
		bubble.Pass(time.Minute)
		n.want(t, "refused")
		n.mu.Lock()
		n.refusing = nil
		n.mu.Unlock()
		bubble.Pass(mostPause)
		n.want(t, "granted", "default/a: true [10.244.1.2] answered")
		n.fails("10.244.1.3", errNoRoute)
		n.has("b", "2", "10.244.1.3")
		n.mu.Lock()
		delete(n.pods, service.Name{Namespace: "default", Name: "b"})
		before := len(n.asked)
		n.mu.Unlock()
		n.tell(service.Name{Namespace: "default", Name: "b"}, nil)
		bubble.Pass(time.Hour)
		if len(n.asked) != before || len(n.Gate.asked) != 1 {
			t.Errorf("%d probes of a pod that is gone; %d remain", len(n.asked)-before, len(n.Gate.asked))
		}
	})
}

// However many pods of a namespace are not reached, there are few lines, which say how many more there are. That of
// another namespace is told.
func TestGate_many(t *testing.T) {
	newNode(t, func(n *node) {
		for i := range 200 {
			a := fmt.Sprintf("10.244.1.%d", i+2)
			n.fails(a, errNoRoute)
			n.has(fmt.Sprint("pod-", i), types.UID(a), a)
		}
		bubble.Pass(30 * time.Second)
		n.fails("10.244.2.2", errNoRoute)
		n.hasIn("other", "bad", "bad", "10.244.2.2")
		bubble.Pass(time.Minute)
		told := strings.Count(n.log.String(), "stays unready")
		if told == 0 || told > words || len(n.events) != told || len(n.writes) != 201 || n.events[told-1] != "Pod other/bad" {
			t.Errorf("%d lines, %d conditions, Events of %s", told, len(n.writes), n.events)
		}
		withheld := 0
		for _, line := range strings.Split(n.log.String(), "\n") {
			if _, rest, ok := strings.Cut(line, " count="); ok {
				var more int
				if _, err := fmt.Sscan(rest, &more); err != nil {
					t.Error(err)
				}
				withheld += more
			}
		}
		if told+withheld != 201 {
			t.Errorf("%d pods are told of, %d counted in\n%s", told, withheld, &n.log)
		}
	})
}

// Pods that are reached at once take no words from those that are not.
func TestGate_good(t *testing.T) {
	newNode(t, func(n *node) {
		n.fails("10.244.2.2", errNoRoute)
		n.fails("10.244.2.3", errNoRoute)
		for i := range 40 {
			a := fmt.Sprintf("10.244.1.%d", i+2)
			n.has(fmt.Sprint("good-", i), types.UID(a), a)
		}
		n.has("bad", "1", "10.244.2.2")
		n.hasIn("other", "bad", "2", "10.244.2.3")
		bubble.Pass(30 * time.Second)
		slices.Sort(n.events)
		if got := fmt.Sprint(n.events); got != "[Pod default/bad Pod other/bad]" || len(n.writes) != 42 {
			t.Errorf("Events of %s, %d conditions", got, len(n.writes))
		}
	})
}
