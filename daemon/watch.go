package daemon

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"fairlead.dev/fairlead/config"
)

const (
	// quiet is how long the files must stay untouched before they are read: an edit takes several steps.
	quiet = 500 * time.Millisecond
	// patience bounds the wait for that quiet: afterwards the files are read although they still change.
	patience = 5 * time.Second
	// lookInterval bounds the delay of what inotify does not show, as on network file systems, and of
	// everything where the kernel grants no inotify.
	lookInterval = 30 * time.Second
)

// watcher tells when files may have changed. It watches directories: editors put new files in the place
// of old ones, and Kubernetes mounts a ConfigMap as links through "..data", which it replaces.
type watcher struct {
	changed        chan struct{} // has a token when the files should be looked at
	log            *slog.Logger
	interval       time.Duration // between looks that nothing gives rise to
	closing, ended chan struct{}

	mu     sync.Mutex
	notify *fsnotify.Watcher // nil: the kernel grants none
	paths  map[string]bool   // of the files, and of what they link to
	dirs   map[string]bool   // in which these are

	// The goroutine's own:
	timer   *time.Timer // until the next look
	touched time.Time   // the first time since the last look; zero: not
	denied  bool        // it was said that the kernel grants none
}

func newWatcher(log *slog.Logger, interval time.Duration) *watcher {
	w := &watcher{
		changed: make(chan struct{}, 1), log: log, interval: interval,
		closing: make(chan struct{}), ended: make(chan struct{}), timer: time.NewTimer(interval),
	}
	w.open()
	go w.run()
	return w
}

func (w *watcher) close() {
	close(w.closing)
	<-w.ended
}

// open begins to use inotify. A user has few instances of it, and on a busy node other programs may have taken them
// all. Then the watcher polls the files, and tries inotify again each time.
func (w *watcher) open() {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		if !w.denied {
			w.log.Warn("changes of the configuration are noticed late: inotify cannot be used", "error", err,
				"interval", w.interval, "advice", "raise the sysctl fs.inotify.max_user_instances")
		}
		w.denied = true
		return
	}
	w.mu.Lock()
	w.notify = notify
	w.watch()
	w.mu.Unlock()
	if w.denied {
		w.log.Info("changes of the configuration are noticed at once again")
	}
}

// follow watches other files, or the same ones after their links have changed.
func (w *watcher) follow(files []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.paths, w.dirs = map[string]bool{}, map[string]bool{}
	for _, path := range files {
		if path == "" {
			continue
		}
		for _, p := range []string{path, target(path)} {
			w.paths[p] = true
			w.dirs[filepath.Dir(p)] = true
		}
	}
	w.watch()
}

// watch has the kernel tell of the wanted directories and of no others.
func (w *watcher) watch() {
	if w.notify == nil {
		return
	}
	for _, dir := range w.notify.WatchList() {
		if !w.dirs[dir] {
			_ = w.notify.Remove(dir) // it fails only if the directory is gone
		}
	}
	for dir := range w.dirs {
		if err := w.notify.Add(dir); err != nil {
			w.log.Debug("cannot watch a directory; it is read periodically", "path", dir, "error", err)
		}
	}
}

// target is where links lead, or the path itself.
func target(path string) string {
	path = filepath.Clean(path)
	if to, err := filepath.EvalSymlinks(path); err == nil {
		return to
	}
	return path
}

// run puts a token into changed soon after the files were touched, and now and then.
func (w *watcher) run() {
	defer close(w.ended)
	defer w.timer.Stop()
	for {
		events, errs := w.channels()
		select {
		case <-w.closing:
			if w.notify != nil {
				_ = w.notify.Close()
			}
			return
		case e := <-events:
			if w.matters(e.Name) {
				w.touch()
			}
		case err := <-errs: // an overflow: events are lost
			w.log.Warn("watching the configuration files failed; reading them again", "error", err)
			w.touch()
		case <-w.timer.C:
			w.look()
		}
	}
}

// channels are nil without inotify.
func (w *watcher) channels() (<-chan fsnotify.Event, <-chan error) {
	if w.notify == nil {
		return nil, nil
	}
	return w.notify.Events, w.notify.Errors
}

// touch puts the next look off until it is quiet.
func (w *watcher) touch() {
	if w.touched.IsZero() {
		w.touched = time.Now()
	}
	w.timer.Reset(min(quiet, time.Until(w.touched.Add(patience))))
}

func (w *watcher) look() {
	w.touched = time.Time{}
	w.timer.Reset(w.interval)
	if w.notify == nil {
		w.open()
	}
	w.renew()
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

func (w *watcher) matters(path string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	path = filepath.Clean(path)
	return w.paths[path] || strings.HasPrefix(filepath.Base(path), "..")
}
