package engine

import (
	"context"
	"sync"
	"time"

	"fairlead.dev/fairlead/source"
)

// inbox takes from a Source what comes, also while the loop is busy: so it is known since when it waits.
type inbox struct {
	ready  chan struct{}      // has a token if there is something for the loop
	queued func(delivery)     // is told what came that is to be programmed
	cancel context.CancelFunc // ends the pulling
	ended  chan struct{}      // closed when it has ended

	mu      sync.Mutex
	came    []delivery
	waiting Changes // in came
	err     error   // of the Source
}

// maxDeliveries is how many batches wait one by one. Beyond it they become one, no larger than the objects are.
const maxDeliveries = 1000

// openInbox begins to pull. queued must be quick.
func openInbox(ctx context.Context, from source.Source, queued func(delivery)) *inbox {
	ctx, cancel := context.WithCancel(ctx)
	i := &inbox{ready: make(chan struct{}, 1), queued: queued, cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(i.ended)
		for i.pull(ctx, from) {
		}
	}()
	return i
}

// close ends the pulling: the inbox does not call the Source any more.
func (i *inbox) close() {
	i.cancel()
	<-i.ended
}

// pull waits for one batch. It returns false if there will be no more.
func (i *inbox) pull(ctx context.Context, from source.Source) bool {
	batch, err := from.Next(ctx)
	if ctx.Err() != nil {
		return false
	}
	i.mu.Lock()
	if i.err = err; err == nil {
		i.add(delivery{batch, time.Now()})
	}
	i.mu.Unlock()
	select {
	case i.ready <- struct{}{}:
	default:
	}
	return err == nil
}

func (i *inbox) add(d delivery) {
	if len(d.batch.Services)+len(d.batch.Slices) > 0 {
		i.queued(d)
		i.waiting.add(&d.batch)
	}
	if n := len(i.came); n >= maxDeliveries {
		source.Add(&i.came[n-1].batch, d.batch)
		return
	}
	i.came = append(i.came, d)
}

// take is what has come since it was last called, and why nothing comes any more.
func (i *inbox) take() ([]delivery, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	came := i.came
	i.came, i.waiting = nil, Changes{}
	return came, i.err
}

// settle calls f with the time since when something waits here; zero: nothing does. Later arrivals are passed to queued
// afterwards.
func (i *inbox) settle(f func(oldest time.Time)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var oldest time.Time
	for _, d := range i.came {
		if len(d.batch.Services)+len(d.batch.Slices) > 0 {
			oldest = d.at
			break
		}
	}
	f(oldest)
}

// count calls f with the number of changes that wait here. Later arrivals are passed to queued afterwards.
func (i *inbox) count(f func(waiting Changes)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	f(i.waiting)
}
