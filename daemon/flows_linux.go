package daemon

import (
	"errors"
	"net/netip"
	"sync"

	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

const (
	// maxDestinations is for how many destinations connections are gathered between two samples.
	maxDestinations = 4096
	// maxEach is how many of them are told one by one, of each destination.
	maxEach = 20
)

// flowWatch gathers the translated connections that begin, by destination: a busy one does not hide others.
type flowWatch struct {
	watch *tracked.Watch
	done  chan struct{}

	mu     sync.Mutex
	opened map[model.Key]*opened
	missed bool
}

// watchFlows begins to watch, if connection tracking knows of the connections of a plane. Connections that only the
// plane counts are counted.
func (n *node) watchFlows(plane string) (w *flowWatch, counted bool, err error) {
	if plane == userspacePlane {
		return nil, true, nil
	}
	w = &flowWatch{done: make(chan struct{}), opened: map[model.Key]*opened{}}
	err = n.network.Do(func() (err error) {
		w.watch, err = tracked.NewWatch(tracked.Begun)
		return err
	})
	if err != nil {
		return nil, plane == ebpfPlane, err
	}
	go w.run()
	return w, plane == ebpfPlane, nil
}

func (w *flowWatch) run() {
	defer close(w.done)
	for {
		err := w.watch.Next(w.add)
		switch {
		case errors.Is(err, tracked.ErrMissed):
			w.miss()
		case err != nil: // closed
			return
		}
	}
}

func (w *flowWatch) miss() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.missed = true
}

// add passes over flows whose destination is not translated.
func (w *flowWatch) add(f *tracked.Flow) {
	if f.To == f.Answers {
		return
	}
	key := model.Key{Addr: f.To.Addr(), Port: f.To.Port(), Protocol: f.Protocol}
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.opened[key]
	switch {
	case o == nil && len(w.opened) == maxDestinations:
		w.missed = true
		return
	case o == nil:
		o = &opened{backends: map[netip.AddrPort]int{}}
		w.opened[key] = o
	}
	if o.backends[f.Answers]++; len(o.each) < maxEach {
		o.each = append(o.each, connection{f.From, f.Answers})
	}
}

// take returns what has been gathered since the last call.
func (w *flowWatch) take() (all map[model.Key]*opened, missed bool) {
	if w == nil {
		return nil, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	all, missed = w.opened, w.missed
	w.opened, w.missed = map[model.Key]*opened{}, false
	return all, missed
}

func (w *flowWatch) close() {
	if w != nil {
		_ = w.watch.Close()
		<-w.done
	}
}
