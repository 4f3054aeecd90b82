package daemon

import (
	"context"
	"log/slog"
	"sync/atomic"

	"fairlead.dev/fairlead/source"
)

// feeds are the feed that is in use, and the one that will be once it has delivered its first batch.
//
//	await ─► next ─ arrives ─► settle ─► used, or closed
//	           └─── abandon ───────────► closed
//
// They belong to the goroutine that reloads; others may load what is used.
type feeds struct {
	log      *slog.Logger
	onChange func(*feed) // is called with the one in use, for parts beside the engine
	used     atomic.Pointer[feed]
	next     *upcoming // nil: none
}

// upcoming is a feed that has not yet delivered its first batch.
type upcoming struct {
	feed   *feed
	cancel context.CancelFunc
	result chan result
}

type result struct {
	source source.Source
	err    error
}

// use makes a feed the one in use.
func (f *feeds) use(next *feed) {
	f.used.Store(next)
	f.onChange(next)
}

// wanted is the feed that is in use or will be.
func (f *feeds) wanted() feedSettings {
	if f.next != nil {
		return f.next.feed.settings
	}
	return f.used.Load().settings
}

// await waits for the first batch of a feed, while the one in use goes on.
func (f *feeds) await(ctx context.Context, next *feed) {
	ctx, cancel := context.WithCancel(ctx)
	u := &upcoming{feed: next, cancel: cancel, result: make(chan result, 1)}
	f.next = u
	go func() {
		s, err := primed(ctx, next.source)
		u.result <- result{s, err}
	}()
}

// arrives has the result, one time; nil: there is nothing to wait for.
func (f *feeds) arrives() chan result {
	if f.next == nil {
		return nil
	}
	return f.next.result
}

// abandon gives up what await waits for.
func (f *feeds) abandon() {
	if f.next == nil {
		return
	}
	f.next.cancel()
	<-f.next.result
	f.close(f.next.feed)
	f.next = nil
}

// settle uses what has arrived if that can be adopted, and closes the feed that is not wanted then.
func (f *feeds) settle(r result, adopt func(source.Source) error) {
	u, old := f.next, f.used.Load()
	f.next = nil
	u.cancel()
	err := r.err
	if err == nil {
		err = adopt(r.source)
	}
	if err != nil {
		f.log.Error("cannot read objects as the new configuration says; the objects read before stay in force", "error", err)
		f.close(u.feed)
		return
	}
	f.use(u.feed)
	f.log.Info("all objects were read anew", "node", u.feed.settings.node)
	f.close(old)
}

func (f *feeds) close(one *feed) {
	if err := one.close(); err != nil {
		f.log.Warn("cannot close a source of objects", "error", err)
	}
}
