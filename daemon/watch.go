package daemon

import (
	"context"
	"os"
	"sync"
	"time"

	"fairlead.dev/fairlead/config"
)

const (
	// quiet is how long the files must stay untouched before they are read: an edit takes several steps.
	quiet = 500 * time.Millisecond
	// patience bounds the wait for that quiet: afterwards the files are read although they still change.
	patience = 5 * time.Second
	// lookInterval bounds the delay of what size, time and number of a file do not show.
	lookInterval = 30 * time.Second
)

// watcher tells when files may have changed. They are few, so it looks at each of them again and again. That finds what
// inotify does not show, as on network file systems, and links that lead elsewhere, as in a mounted ConfigMap.
type watcher struct {
	changed        chan struct{} // has a token when the files should be read
	interval       time.Duration // between tokens that nothing gives rise to
	closing, ended chan struct{}

	mu   sync.Mutex
	seen map[string]os.FileInfo // files by their paths; nil: there is none
}

func newWatcher(interval time.Duration) *watcher {
	w := &watcher{
		changed: make(chan struct{}, 1), interval: interval, closing: make(chan struct{}), ended: make(chan struct{}),
	}
	go w.run()
	return w
}

func (w *watcher) close() {
	close(w.closing)
	<-w.ended
}

// follow watches other files. Of those that it has watched, no change is lost.
func (w *watcher) follow(files []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.seen
	w.seen = map[string]os.FileInfo{}
	for _, path := range files {
		info, known := before[path]
		if !known {
			info, _ = os.Stat(path)
		}
		w.seen[path] = info
	}
}

// look reports whether a file is another one than at the last look.
func (w *watcher) look() (other bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for path, was := range w.seen {
		is, _ := os.Stat(path)
		if (is == nil) != (was == nil) || is != nil &&
			(!os.SameFile(is, was) || is.Size() != was.Size() || !is.ModTime().Equal(was.ModTime())) {
			w.seen[path], other = is, true
		}
	}
	return other
}

// run puts a token into changed soon after the files were touched, and now and then.
func (w *watcher) run() {
	defer close(w.ended)
	next := time.NewTicker(quiet)
	defer next.Stop()
	for last, touched := time.Now(), (time.Time{}); ; {
		select {
		case <-w.closing:
			return
		case <-next.C:
		}
		other := w.look()
		if other && touched.IsZero() {
			touched = time.Now()
		}
		due := !other || time.Since(touched) >= patience
		if touched.IsZero() {
			due = time.Since(last) >= w.interval
		}
		if due {
			w.renew()
			last, touched = time.Now(), time.Time{}
		}
	}
}

// whenOther calls f, at most once, if the files say something else than c before the result is called. A token that it
// has taken out of changed is there again then.
func (w *watcher) whenOther(
	ctx context.Context, load func() (*config.Config, error), c *config.Config, f func(),
) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan bool, 1)
	go func() {
		touched := false
		for ctx.Err() == nil {
			select {
			case <-ctx.Done():
				continue
			case <-w.changed:
				touched = true
			}
			if other, err := load(); err == nil && len(config.Compare(c, other)) > 0 {
				f()
				break
			}
		}
		ended <- touched
	}()
	return func() {
		cancel()
		if <-ended {
			w.renew()
		}
	}
}

// renew puts a token into changed.
func (w *watcher) renew() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}
