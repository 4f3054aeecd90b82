package chaos

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	fairlead "fairlead.dev/fairlead/model"
)

// way is how a client reaches a Service.
type way struct {
	offered
	from testbed.Place
	to   netip.AddrPort
}

func (v way) String() string { return fmt.Sprintf("%s from %s", v.name, v.from) }

// ways are from a pod, the node, and outside.
func (w *world) ways() (all []way) {
	for _, o := range services {
		ip := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(10 + o.number)}), 80)
		if strings.HasSuffix(o.name, "own") {
			all = append(all, way{o, testbed.Node, ip})
			continue
		}
		node := netip.AddrPortFrom(w.bed.Addr(testbed.Node, false), uint16(31000+o.number))
		all = append(all, way{o, client, ip}, way{o, testbed.Outside, node})
	}
	return all
}

// stats count what clients have seen.
type stats struct {
	answered, excuses map[string]int // by Service
	last              map[string]map[string]time.Time
}

func newStats() stats {
	return stats{map[string]int{}, map[string]int{}, map[string]map[string]time.Time{}}
}

// ask keeps all clients busy until the world ends. Those of Services that may fail are the most.
func (w *world) ask(run func(func())) {
	for _, v := range w.ways() {
		switch {
		case v.sticky:
			run(func() { w.stay(v) })
			continue
		case v.calm:
			run(func() { w.hold(v) })
			run(func() { w.shorts(v, 10) })
		default:
			run(func() { w.shorts(v, 60) })
		}
	}
}

// shorts makes short connections, so many a second.
func (w *world) shorts(v way, rate int) {
	if inTestKernel() {
		rate /= 3
	}
	const most = 100 // at the same time
	room := make(chan struct{}, most)
	pace := time.NewTicker(time.Second / time.Duration(rate))
	defer pace.Stop()
	for w.ctx.Err() == nil {
		select {
		case <-pace.C:
			select {
			case room <- struct{}{}:
				go func() {
					w.short(v)
					<-room
				}()
			default:
			}
		case <-w.ctx.Done():
		}
	}
	for range most {
		room <- struct{}{}
	}
}

// short makes one, and returns the pod that answered.
func (w *world) short(v way) (pod string) {
	began := time.Now()
	o, err := w.bed.Probe(w.ctx, testbed.Probe{From: v.from, To: v.to, Timeout: patience})
	if err == nil && o.Result != testbed.Answered {
		err = fmt.Errorf("%s", o.Result)
	}
	w.outcome(v, "a connection", began, o.Backend, err)
	return o.Backend
}

// stay makes one connection after another, which one pod should answer.
func (w *world) stay(v way) {
	pace := time.NewTicker(200 * time.Millisecond)
	defer pace.Stop()
	var at, said string
	var first span
	for last := time.Now(); w.ctx.Err() == nil; <-pace.C {
		began := time.Now()
		to := w.short(v)
		if to != said {
			said = to
			w.say("%v: %s after %s", v, cmp.Or(to, "no answer"), time.Since(began).Round(time.Millisecond))
		}
		if to == "" {
			continue
		}
		if at != to {
			if at != "" {
				w.moved(v, at, to, first, last)
			}
			first = span{began, time.Now()}
		}
		at, last = to, began
	}
}

// moved holds a session's move against the model: its pod has failed or left since the last answer.
func (w *world) moved(v way, from, to string, first span, since time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.young(first) {
		return
	}
	i := slices.Index(pods[:], from)
	if i >= 0 {
		if b := &w.pods[i]; w.fails(i) || b.good.After(since) || !b.listed || b.told.Add(settles).After(since) {
			return
		}
	}
	w.breaks("the session of %s, %s old, has moved from %s to %s, though %s was healthy", v,
		time.Since(first.to).Round(time.Millisecond), from, to, from)
}

// hold opens a connection, uses it for twenty seconds, and begins again.
func (w *world) hold(v way) {
	for w.ctx.Err() == nil {
		began := time.Now()
		pod, err := w.converse(v, 20*time.Second)
		w.outcome(v, "an open connection", began, pod, err)
	}
}

func (w *world) converse(v way, d time.Duration) (pod string, err error) {
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	c, err := w.bed.Dial(ctx, v.from, fairlead.TCP, v.to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	for in, began := bufio.NewReader(c), time.Now(); time.Since(began) < d && w.ctx.Err() == nil; {
		_ = c.SetDeadline(time.Now().Add(patience))
		line, err := in.ReadString('\n')
		name, _, _ := strings.Cut(line, " ")
		if err == nil && pod != "" && name != pod {
			err = fmt.Errorf("%s answers instead of %s", name, pod)
		}
		if pod = name; err == nil {
			w.pause(300 * time.Millisecond)
			_, err = io.WriteString(c, "?\n")
		}
		if err != nil {
			return pod, fmt.Errorf("after %s: %w", time.Since(began).Round(time.Millisecond), err)
		}
	}
	return pod, nil
}

// outcome holds what a client has seen against the model.
func (w *world) outcome(v way, what string, began time.Time, pod string, err error) {
	if w.ctx.Err() != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.answered[v.name]++
		if w.last[v.name] == nil {
			w.last[v.name] = map[string]time.Time{}
		}
		w.last[v.name][pod] = time.Now()
		return
	}
	may := w.relayed(began)
	for i := range pods {
		may = may || !v.calm && w.excused(i, began)
	}
	if may {
		w.excuses[v.name]++
		return
	}
	w.late("%s to %s, begun %s ago, has failed: %v", what, v, time.Since(began).Round(time.Millisecond), err)
}
