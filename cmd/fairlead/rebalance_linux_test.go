package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// TestRun_rebalance has twenty clients hold connections to two backends when a third one comes. Idle connections move
// until the three have equal shares, and no client waits for an answer in vain. Busy connections stay. Those of a
// Service without the annotation do, too.
func TestRun_rebalance(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables", "userspace", "ipvs"} {
		t.Run(mode, func(t *testing.T) {
			if mode == "ipvs" && needIPVS(t) {
				return
			}
			testRebalance(newWorld(t), mode, map[testbed.Place]netip.AddrPort{testbed.Node: clusterIP, testbed.Outside: nodePort})
		})
	}
	t.Run("ebpf", func(t *testing.T) {
		w := newMachine(t).world
		process := w.bed.Command(t.Context(), "pod-a", "sleep", "infinity") // as a pod has, but not one of a testbed
		if err := process.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = process.Process.Kill(), process.Wait() })
		testRebalance(w, "ebpf", map[testbed.Place]netip.AddrPort{testbed.Node: clusterIP, "pod-a": clusterIP})
	})
}

// idle is for how long nothing has passed over connections that may be closed.
const idle = 2 * time.Second

func testRebalance(w *world, mode string, callers map[testbed.Place]netip.AddrPort) {
	annotation := ", annotations: {fairlead.dev/rebalance: " + idle.String() + "}"
	annotated := strings.Replace(web, "metadata: {name: web", "metadata: {name: web"+annotation, 1)
	w.write("web.yaml", annotated)
	other := strings.NewReplacer("web", "other", "30080", "30081", "10.96.0.10", "10.96.0.11").Replace(web)
	w.write("other.yaml", other)
	w.start("--proxy-mode", mode)
	h := &holders{world: w, backends: map[int]string{}}
	var stop context.CancelFunc
	h.ctx, stop = context.WithCancel(w.Context())
	w.Cleanup(func() { stop(); h.group.Wait() })
	const each = 10 // of them two are busy
	for from, to := range callers {
		for i := range each {
			h.hold(from, to, i < 2)
		}
	}
	var calm []net.Conn
	for range each {
		calm = append(calm, w.dial(testbed.Node, netip.MustParseAddrPort("10.96.0.11:80")))
	}
	eventually.True(w, "all clients are connected", func() bool { return h.total() == len(callers)*each })
	if _, err := w.bed.AddPod(w.Context(), testbed.PodSpec{
		Name: "pod-c", Node: testbed.Node, Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}},
	}); err != nil {
		w.Fatal(err)
	}
	third := "- addresses: [" + w.bed.Addr("pod-c", false).String() + "]\n"
	w.write("web.yaml", annotated+third)
	w.write("other.yaml", other+third)
	eventually.Taking(2*time.Minute).True(w, "all backends have as many connections", h.even)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, wrong := range h.wrong {
		w.Error(wrong)
	}
	w.Logf("%d connections moved: %v", h.moved, h.shares())
	if h.moved > 3*len(callers)*each {
		w.Errorf("%d connections of %d were closed", h.moved, len(callers)*each)
	}
	for _, c := range calm {
		w.talksOver(c, "without the annotation")
		_ = c.Close()
	}
}

// holders are clients that connect again as soon as they have no connection any more. They ask something now and then:
// the busy ones all the time, the others so that their connections are idle in between.
type holders struct {
	*world
	ctx   context.Context
	group sync.WaitGroup

	mu       sync.Mutex
	backends map[int]string // of each client; it has none while it connects
	clients  int
	moved    int
	wrong    []string
}

func (h *holders) hold(from testbed.Place, to netip.AddrPort, busy bool) {
	h.clients++
	me := h.clients
	pause := 5 * time.Second
	if busy {
		pause = 100 * time.Millisecond
	}
	h.group.Go(func() {
		for h.ctx.Err() == nil {
			asked, stood, err := h.once(me, from, to, pause)
			h.mu.Lock()
			delete(h.backends, me)
			if h.ctx.Err() == nil {
				h.moved++
				if (busy || asked) && !stood {
					h.wrong = append(h.wrong, fmt.Sprintf("from %s: busy: %t, waits for an answer: %t: %v", from, busy, asked, err))
				}
			}
			h.mu.Unlock()
		}
	})
}

// once connects, and returns when the connection has ended, and whether the client was waiting for an answer. It stood
// still, and was idle, if client or server were held up.
func (h *holders) once(me int, from testbed.Place, to netip.AddrPort, pause time.Duration) (asked, stood bool, err error) {
	c, err := h.bed.Dial(h.ctx, from, model.TCP, to)
	if err != nil {
		return true, false, err
	}
	used, before := time.Now(), time.Duration(0)
	defer c.Close()
	defer context.AfterFunc(h.ctx, func() { _ = c.Close() })()
	answer := make([]byte, 128)
	for asked = true; ; { // the server speaks first
		patience := pause
		if asked {
			patience = eventually.Patience()
		}
		_ = c.SetReadDeadline(time.Now().Add(patience))
		n, err := c.Read(answer)
		switch {
		case !asked && errors.Is(err, os.ErrDeadlineExceeded):
			asked = true
			_, err = c.Write([]byte("more\n"))
		case err == nil:
			asked = false
			h.mu.Lock()
			h.backends[me], _, _ = strings.Cut(string(answer[:n]), " ")
			h.mu.Unlock()
		}
		if err != nil {
			return asked, time.Since(used) >= idle || pause < idle && before >= idle, err
		}
		used, before = time.Now(), time.Since(used)
	}
}

func (h *holders) total() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.backends)
}

// shares are how many connections each backend has.
func (h *holders) shares() map[string]int {
	shares := map[string]int{}
	for _, b := range h.backends {
		shares[b]++
	}
	return shares
}

// even reports whether three backends have six or seven of twenty connections.
func (h *holders) even() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	shares := h.shares()
	for _, n := range shares {
		if n < 6 || n > 7 {
			return false
		}
	}
	return len(shares) == 3
}
