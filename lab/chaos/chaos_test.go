package chaos

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/programtest"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

var agent string // the program's path

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(func() int {
		return programtest.WithAgent(func(path string) int {
			agent = path
			return m.Run()
		})
	}))
}

const userspace = "userspace"

// Modes of the two worlds. Only the test kernel has IPVS everywhere; it is its most frequent mode.
var (
	here = []string{"nftables", "iptables", "ebpf", userspace}
	inVM = []string{"ipvs", "nftables", "ipvs", "iptables", "ipvs", userspace}
)

// TestChaos lets faults happen in two worlds, for as long as FAIRLEAD_CHAOS says.
func TestChaos(t *testing.T) {
	d := 20 * time.Second
	if text := os.Getenv("FAIRLEAD_CHAOS"); text != "" {
		var err error
		if d, err = time.ParseDuration(text); err != nil {
			t.Fatal("FAIRLEAD_CHAOS: ", err)
		}
	}
	seed := sample.Seed(t)
	t.Run("kernel", func(t *testing.T) {
		t.Parallel()
		run(t, seed, d, here)
	})
	t.Run("IPVS", func(t *testing.T) {
		t.Parallel()
		if _, err := os.Stat("/proc/net/ip_vs"); err != nil && !inTestKernel() {
			if out := vm.Replay(t, "IPVS"); !t.Failed() {
				t.Log(out)
			}
			return
		}
		run(t, seed, d, inVM)
	})
}

// inTestKernel reports whether the kernel is a User-Mode Linux.
func inTestKernel() bool {
	text, err := os.ReadFile("/proc/cpuinfo")
	return err == nil && bytes.Contains(text, []byte("User Mode Linux"))
}

// run has a plan happen in a world.
func run(t *testing.T, seed uint64, d time.Duration, modes []string) {
	w := newWorld(t, slices.Contains(modes, "ebpf"))
	w.began = time.Now()
	w.say("seed %d: %s, first in mode %s", seed, d, modes[0])
	w.require(w.do(event{do: start, how: modes[0]}))
	var group sync.WaitGroup
	w.began, w.felt = time.Now(), time.Now()
	w.ask(func(f func()) { group.Go(f) })
	group.Go(w.look)
	group.Go(w.pulse)
	for _, e := range newPlan(seed, d, modes) {
		if !w.wait(e.at) {
			break
		}
		w.say("%v", e)
		if err := w.do(e); err != nil && w.ctx.Err() == nil {
			w.mu.Lock()
			w.breaks("%s: %v", e, err)
			w.mu.Unlock()
		}
	}
	w.wait(d)
	w.broken()
	group.Wait()
	w.say("answered %v; failed at dead backends %v; late on a busy machine %d", w.answered, w.excuses, w.spared)
	if w.proxy != nil {
		w.require(w.proxy.Kill())
	}
}

// wait returns at a time of the plan. It reports whether to go on.
func (w *world) wait(until time.Duration) bool {
	return w.pause(until - time.Since(w.began))
}

// pause returns after a time, or when the world ends. It reports whether to go on.
func (w *world) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-w.ctx.Done():
	}
	return w.ctx.Err() == nil
}

// beat is how often pulse looks.
const beat = 50 * time.Millisecond

// pulse notes when the machine is too busy: this process has lost a tenth of the last ten seconds. Timeouts then say
// nothing.
func (w *world) pulse() {
	const some = 10
	for w.pause(beat) {
		w.mu.Lock()
		first, took := false, time.Since(w.felt).Seconds()
		w.felt = time.Now()
		if w.lost += max(0, took-beat.Seconds()); w.lost < 1 {
			w.lost = max(0, w.lost-took/some)
		} else {
			first = time.Since(w.still) > mostOut
			w.still, w.lost = time.Now(), 0.9
		}
		w.mu.Unlock()
		if first {
			w.say("the machine is too busy")
		}
	}
}

// busy reports whether it was a moment ago, or is: pulse may be as late as others. The model is locked.
func (w *world) busy() bool {
	return time.Since(w.still) < mostOut || w.lost+(time.Since(w.felt)-beat).Seconds() >= 1
}

// TestBusy has the machine stop for a moment. Where a client is the first to go on, its timeout says nothing either.
func TestBusy(t *testing.T) {
	w := &world{felt: time.Now()}
	if w.busy() {
		t.Error("it is busy from the beginning")
	}
	if w.felt = w.felt.Add(-2 * time.Second); !w.busy() {
		t.Error("it is not busy, but two seconds are lost")
	}
}

// say prints a line at once.
func (w *world) say(format string, args ...any) {
	line := fmt.Sprintf("%8.3f %-6s %s", time.Since(w.began).Seconds(), strings.TrimPrefix(w.Name(), "TestChaos/"),
		fmt.Sprintf(format, args...))
	fmt.Println(line)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.history = append(w.history, line)
}

// late breaks an invariant in which time matters, unless the machine is too busy.
func (w *world) late(format string, args ...any) {
	if w.busy() {
		w.spared++
		return
	}
	w.breaks(format, args...)
}

// breaks ends the world, and says all that is known. The model is locked.
func (w *world) breaks(format string, args ...any) {
	if w.wrong {
		return
	}
	w.wrong = true
	now, still := time.Since(w.began).Seconds(), time.Since(w.still).Round(time.Millisecond)
	w.broken()
	var said strings.Builder
	for _, args := range [][]string{
		{"services", "-n", "chaos", "-o", "wide"}, {"status"},
		{"explain", w.bed.Addr(client, false).String(), "svc/chaos/web:80"}, {"explain", "node", "svc/chaos/own:80"},
	} {
		out, err := w.tell(args...)
		fmt.Fprintf(&said, "$ fairlead %s %v\n%s\n", strings.Join(args, " "), err, out)
	}
	for name, pods := range w.last {
		for pod, at := range pods {
			fmt.Fprintf(&said, "%s answered by %s %s ago\n", name, pod, time.Since(at).Round(time.Millisecond))
		}
	}
	const most = 30
	log := w.proxy.Log()
	w.Errorf("broken after %.3f s: %s\nthe machine was too busy %s ago, and has lost %.3f s lately\nthe model: %+v\n"+
		"last events:\n%s\n%s\nthe agent's log:\n%s", now, fmt.Sprintf(format, args...), still, w.lost,
		w.model, strings.Join(w.history[max(0, len(w.history)-most):], "\n"), said.String(), log[max(0, len(log)-8000):])
}

// do has an event happen. The model knows a fault before it begins, and until it is over.
func (w *world) do(e event) error {
	place := testbed.Place(pods[e.pod])
	b := &w.pods[e.pod]
	change := func(f func()) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.turn(f)
	}
	switch e.do {
	case die:
		change(func() { b.dead = true })
		return w.die(place, e.how)
	case revive:
		err := w.revive(place, e.how)
		change(func() { b.dead = false })
		return err
	case slow:
		return w.slow(place, 400*time.Millisecond)
	case fast:
		return w.slow(place, 0)
	case remove, add:
		change(func() { b.listed, b.told = e.do == add, time.Now() })
		return w.publish()
	case partition:
		change(func() { w.cut = true })
		return w.at(testbed.NodeB, "nft table inet cut { chain in { type filter hook prerouting priority -500; policy drop; } ; }")
	case heal:
		err := w.at(testbed.NodeB, "nft delete table inet cut")
		change(func() { w.cut = false })
		return err
	case kill:
		change(func() {
			w.ready, w.killed = time.Time{}, time.Now()
			if w.mode == userspace {
				w.losses = append(w.losses, w.killed)
			}
		})
		return w.proxy.Kill()
	case start:
		err := w.startAgent(e.how)
		change(func() { w.inForce(e.how); w.outage = time.Now() })
		return err
	default:
		began := time.Now()
		change(func() { w.changing = true })
		out, err := w.tell("switch", e.how)
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		change(func() {
			if w.mode == userspace {
				w.leaves = append(w.leaves, span{began, time.Now()})
			}
			w.inForce(e.how)
		})
		return err
	}
}

// inForce notes the mode from now on.
func (m *model) inForce(mode string) {
	if m.mode == userspace {
		m.relaying = time.Now()
	}
	m.mode, m.ready, m.changing = mode, time.Now(), false
}

func (w *world) die(pod testbed.Place, how string) error {
	switch how {
	case deaths[0]:
		return w.at(pod, "nft table inet silent { chain in { type filter hook input priority 0; policy drop; } ; }")
	case deaths[1]:
		w.served[string(pod)].end()
		return nil
	}
	return w.at(pod, "ip link set eth0 down")
}

// revive has a pod answer again. One that has lost its link is another one with its addresses.
func (w *world) revive(pod testbed.Place, how string) error {
	switch how {
	case deaths[0]:
		return w.at(pod, "nft delete table inet silent")
	case deaths[1]:
		return w.serve(string(pod))
	}
	w.served[string(pod)].end()
	spec := testbed.PodSpec{Name: string(pod), Node: testbed.Node}
	if pod[0] == 'b' {
		spec.Node = testbed.NodeB
	}
	for _, v6 := range []bool{false, true} {
		spec.Addrs = append(spec.Addrs, w.bed.Addr(pod, v6))
	}
	if err := w.bed.RemovePod(string(pod)); err != nil {
		return err
	}
	if _, err := w.bed.AddPod(w.ctx, spec); err != nil {
		return err
	}
	return w.serve(string(pod))
}

// slow delays a pod's packets, or, where the kernel has no netem, its answers.
func (w *world) slow(pod testbed.Place, delay time.Duration) error {
	command := "tc qdisc add dev eth0 root netem delay 400ms"
	if delay == 0 {
		command = "tc qdisc del dev eth0 root"
	}
	if w.at(pod, command) != nil {
		w.served[string(pod)].slow(delay)
	}
	return nil
}
