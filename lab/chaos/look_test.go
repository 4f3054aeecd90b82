package chaos

import (
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/engine"
	"fairlead.dev/fairlead/service"
)

// told is what the agent has said of pods, by Service and pod.
type told struct {
	out    map[string]time.Time // since when it is out of use
	doomed map[string]time.Time // since when it should be
}

// look asks the agent each second what it makes of the pods.
func (w *world) look() {
	all := told{map[string]time.Time{}, map[string]time.Time{}}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			return
		}
		w.mu.Lock()
		began := w.ready
		w.mu.Unlock()
		if began.IsZero() {
			continue
		}
		said, err := w.asked()
		w.mu.Lock()
		switch {
		case w.ready != began || w.ctx.Err() != nil: // it was killed or switched meanwhile
		case err != nil:
			w.late("the agent does not tell its Services: %v", err)
		default:
			for _, s := range said.Services {
				w.judge(s, &all)
			}
			w.unused()
		}
		w.mu.Unlock()
	}
}

func (w *world) asked() (said engine.Services, err error) {
	text, err := engine.Ask(w.ctx, w.socket(), "/services?namespace=chaos&endpoints=1")
	return said, errors.Join(err, json.Unmarshal(text, &said))
}

// judge holds what the agent makes of a Service against the model.
func (w *world) judge(s engine.ServiceReport, all *told) {
	now := time.Now()
	room, failing := w.room()
	ready, ejected := 0, 0
	for _, e := range s.Ports[0].Endpoints {
		at, err := netip.ParseAddrPort(e.At)
		pod := string(w.bed.Owner(at.Addr()))
		key, i := s.Service+" "+pod, slices.Index(pods[:], pod)
		isOut := e.Rule == "ejected"
		switch {
		case isOut:
			ejected++
		case e.State == service.Ready:
			ready++
		}
		if err != nil || i < 0 {
			continue
		}
		since(all.out, key, isOut, now)
		healthy := w.healthy(i)
		if isOut && !healthy.IsZero() && now.Sub(later(healthy, all.out[key])) > mostOut {
			w.late("%s is healthy since %s, and out of use", key, now.Sub(healthy).Round(time.Millisecond))
		}
		condemned := w.condemned(i)
		busy := s.Service == "chaos/web" || s.Service == "chaos/own" // others have too few clients
		since(all.doomed, key, busy && !isOut && !condemned.IsZero() && failing <= room, now)
		if at := all.doomed[key]; !at.IsZero() && now.Sub(later(condemned, at)) > mostOut {
			w.late("%s has not answered for %s, and is in use", key, now.Sub(condemned).Round(time.Millisecond))
		}
	}
	if ejected > floorOf(ready+ejected) {
		w.breaks("%s: %d are ejected, and %d left", s.Service, ejected, ready)
	}
}

// since notes since when something is so.
func since(all map[string]time.Time, key string, is bool, now time.Time) {
	switch {
	case !is:
		delete(all, key)
	case all[key].IsZero():
		all[key] = now
	}
}

// unused finds healthy pods that no client meets. One of many connections tries a pod after its ejection, which chance
// delays.
func (w *world) unused() {
	chance := 10 * time.Second
	if inTestKernel() { // there are fewer clients
		chance *= 3
	}
	for _, name := range []string{"web", "own"} {
		for i, pod := range pods {
			healthy, last := w.healthy(i), w.last[name][pod]
			if !healthy.IsZero() && !w.relayed(healthy) && time.Since(later(healthy, last)) > mostOut+chance {
				w.late("%s of %s is healthy since %s, and no client has met it since %s", pod, name,
					time.Since(healthy).Round(time.Millisecond), time.Since(last).Round(time.Millisecond))
			}
		}
	}
}
