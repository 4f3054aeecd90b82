package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/cluster"
)

// pace is the time between two connections of a visitor.
const pace = time.Millisecond

// visit is where a visitor connects again and again.
type visit struct {
	from testbed.Place
	to   cluster.Exposure
}

// load makes connections until it is stopped, and counts them.
type load struct {
	bed    *testbed.Bed
	cancel context.CancelFunc
	group  *errgroup.Group

	mu      sync.Mutex
	changed sync.Cond
	ended   bool
	made    []int // by visitor
	failed  []string
}

func (d *demo) newLoad(ctx context.Context, visits ...visit) *load {
	ctx, cancel := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	l := &load{bed: d.bed, cancel: cancel, group: group, made: make([]int, len(visits))}
	l.changed.L = &l.mu
	for i, v := range visits {
		group.Go(func() error { return l.visit(ctx, i, v) })
	}
	context.AfterFunc(ctx, func() { l.note(func() { l.ended = true }) })
	return l
}

// visit makes the connections of one visitor.
func (l *load) visit(ctx context.Context, visitor int, v visit) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	probe := testbed.Probe{From: v.from, To: v.to.To, Protocol: v.to.Protocol, Timeout: answerTime}
	for {
		o, err := l.bed.Probe(ctx, probe)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		l.note(func() {
			l.made[visitor]++
			if o.Result != testbed.Answered {
				l.failed = append(l.failed, fmt.Sprintf("%s %s/%s from %s: %s", v.to.Service, v.to.To, v.to.Protocol, v.from, o))
			}
		})
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

func (l *load) note(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
	l.changed.Broadcast()
}

var errLoadEnded = errors.New("the clients have ended")

// await returns when the counts are as wanted.
func (l *load) await(wanted func() bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !wanted() {
		if l.ended {
			return errLoadEnded
		}
		l.changed.Wait()
	}
	return nil
}

// someMore is how many connections tell that all is well.
const someMore = 1000

// more returns after some more connections.
func (l *load) more() error {
	goal := l.total() + someMore
	return l.await(func() bool { return sum(l.made) >= goal })
}

// settle returns when every connection has ended that begins before the call.
func (l *load) settle() error {
	l.mu.Lock()
	begun := slices.Clone(l.made)
	l.mu.Unlock()
	return l.await(func() bool {
		for i := range begun {
			if l.made[i] == begun[i] {
				return false
			}
		}
		return true
	})
}

// total is how many connections there were.
func (l *load) total() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return sum(l.made)
}

// stop ends all visits. An error is not the proxy's.
func (l *load) stop() error {
	l.cancel()
	return l.group.Wait()
}

func sum(counts []int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}
