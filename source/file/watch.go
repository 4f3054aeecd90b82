package file

import (
	"context"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// quiet is how long nobody must have touched the files before they are read, so that one edit
	// that takes several steps is one change.
	quiet = 100 * time.Millisecond
	// patience is how long somebody may go on touching them before they are read all the same.
	patience = 2 * time.Second
	// pollInterval bounds the delay of what inotify does not show: changes on network file systems,
	// and of symbolic links further up.
	pollInterval = 10 * time.Second
)

// watcher says when to look at the files.
type watcher struct {
	log     *slog.Logger
	closed  chan struct{}
	due     time.Time       // when to look
	touched time.Time       // the first event since the last look; zero: none
	dirs    map[string]bool // whose manifests matter
	paths   map[string]bool // which matter

	mu     sync.Mutex
	notify *fsnotify.Watcher // nil: the kernel grants none
	denied bool              // that was said
}

func newWatcher(log *slog.Logger) *watcher {
	w := &watcher{log: log, closed: make(chan struct{})}
	w.open()
	return w
}

// open begins to use inotify. A user has few instances of it, and on a busy node others may have taken
// them all; then the files are looked at now and then, and each time it is tried again.
func (w *watcher) open() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.notify != nil || w.isClosed() {
		return
	}
	var err error
	w.notify, err = fsnotify.NewWatcher()
	switch {
	case err != nil && !w.denied:
		w.log.Warn("changes of manifests are noticed late: inotify cannot be used", "error", err,
			"looked at every", pollInterval, "advice", "raise the sysctl fs.inotify.max_user_instances")
	case err == nil && w.denied:
		w.log.Info("changes of manifests are noticed at once again")
	}
	w.denied = err != nil
}

func (w *watcher) isClosed() bool {
	select {
	case <-w.closed:
		return true
	default:
		return false
	}
}

// close ends the watching, and wait.
func (w *watcher) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.isClosed() {
		close(w.closed)
	}
	if w.notify == nil {
		return nil
	}
	return w.notify.Close()
}

// channels are nil without inotify.
func (w *watcher) channels() (<-chan fsnotify.Event, <-chan error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.notify == nil {
		return nil, nil
	}
	return w.notify.Events, w.notify.Errors
}

// wait blocks until the files should be looked at. The kernel keeps events while nobody waits.
func (w *watcher) wait(ctx context.Context) error {
	events, errs := w.channels()
	for {
		timer := time.NewTimer(time.Until(w.due))
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-w.closed:
			timer.Stop()
			return fsnotify.ErrClosed
		case e := <-events:
			if w.matters(filepath.Clean(e.Name)) {
				w.touch()
			}
		case err := <-errs: // an overflow: events are lost
			if err != nil {
				w.log.Warn("watching manifests", "error", err)
				w.touch()
			}
		case <-timer.C:
			w.due, w.touched = time.Now().Add(pollInterval), time.Time{}
			w.open()
			return nil
		}
		timer.Stop()
	}
}

func (w *watcher) touch() {
	now := time.Now()
	if w.touched.IsZero() {
		w.touched = now
	}
	w.due = now.Add(quiet)
	if last := w.touched.Add(patience); last.Before(w.due) {
		w.due = last
	}
}

// again asks for another look soon.
func (w *watcher) again() { w.due = time.Now().Add(quiet) }

func (w *watcher) matters(path string) bool {
	name := filepath.Base(path)
	// Kubernetes mounts a ConfigMap as links through "..data", which is replaced at each change.
	return w.paths[path] || w.dirs[filepath.Dir(path)] && (isManifest(name) || strings.HasPrefix(name, ".."))
}

// watch watches the directories of the given roots, those in which these lie, so that they may be
// replaced, and those of files behind symbolic links.
func (w *watcher) watch(roots []*root, files map[string]*file) {
	w.dirs, w.paths = map[string]bool{}, map[string]bool{}
	for _, r := range roots {
		w.paths[r.path] = true
		if info, err := os.Stat(r.path); err == nil && info.IsDir() {
			w.dirs[r.path] = true
		}
	}
	for path := range files {
		info, err := os.Lstat(path)
		if err != nil || info.Mode()&os.ModeSymlink == 0 {
			continue
		}
		w.dirs[filepath.Dir(path)] = true
		if target, err := filepath.EvalSymlinks(path); err == nil {
			w.paths[target] = true
		}
	}
	w.update()
}

func (w *watcher) update() {
	want := maps.Clone(w.dirs)
	for path := range w.paths {
		want[filepath.Dir(path)] = true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.notify == nil {
		return
	}
	for _, dir := range w.notify.WatchList() {
		if !want[dir] {
			_ = w.notify.Remove(dir) // it fails only if the directory is gone
		}
	}
	for dir := range want {
		if err := w.notify.Add(dir); err != nil {
			w.log.Debug("cannot watch; it is looked at periodically", "directory", dir, "error", err)
		}
	}
}
