package plugin

import (
	"errors"
	"sync"

	"fairlead.dev/fairlead/internal/tracked"
	"fairlead.dev/fairlead/model"
)

const (
	// maxWays is of how many ways connections are gathered between two samples.
	maxWays = 4096
	// maxEach is how many of them are told one by one, of each way.
	maxEach = 10
)

// flowWatch gathers the translated connections that begin, by way: a busy one does not hide others.
type flowWatch struct {
	watch *tracked.Watch

	mu     sync.Mutex
	opened map[way]*opened
	missed bool
}

// watchFlows begins to watch in this network namespace, if connection tracking knows of the connections of a plane.
// Connections that only the plane counts are counted.
func watchFlows(plane string) (w *flowWatch, counted bool, err error) {
	if plane == "userspace" {
		return nil, true, nil
	}
	w = &flowWatch{opened: map[way]*opened{}}
	if w.watch, err = tracked.NewWatch(tracked.Begun); err != nil {
		return nil, plane == "ebpf", err
	}
	go w.run()
	return w, plane == "ebpf", nil
}

func (w *flowWatch) run() {
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
	at := way{model.Key{Addr: f.To.Addr(), Port: f.To.Port(), Protocol: f.Protocol}, f.Answers}
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.opened[at]
	switch {
	case o == nil && len(w.opened) == maxWays:
		w.missed = true
		return
	case o == nil:
		o = &opened{}
		w.opened[at] = o
	}
	if o.count++; o.count <= maxEach {
		o.clients = append(o.clients, f.From)
	}
}

// take returns what has been gathered since the last call.
func (w *flowWatch) take() (all map[way]*opened, missed bool) {
	if w == nil {
		return nil, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	all, missed = w.opened, w.missed
	w.opened, w.missed = map[way]*opened{}, false
	return all, missed
}

func (w *flowWatch) close() {
	if w != nil {
		_ = w.watch.Close()
	}
}
