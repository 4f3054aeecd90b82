package file

import (
	"context"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// quiet is how long the files must be unchanged before they are read, so that one edit that takes several steps is
	// one change.
	quiet = 100 * time.Millisecond
	// patience is how long they may go on changing before they are read all the same.
	patience = 2 * time.Second
	// pollInterval bounds the delay of what inotify does not show: changes on network file systems,
	// and of symbolic links further up.
	pollInterval = 10 * time.Second
)

// watcher says which files to look at: those that were touched, each when it has been quiet for a while. It takes
// events from the kernel at once, also while files are read: the kernel keeps them in order, so that one tenant's many
// would hold up those of another.
type watcher struct {
	log    *slog.Logger
	closed chan struct{}
	sooner chan struct{} // says that something is due earlier than it was

	mu      sync.Mutex
	poll    time.Time         // when to look at everything
	touched map[string]touch  // by path
	next    time.Time         // none of these is due earlier
	dirs    map[string]bool   // whose manifests matter
	paths   map[string]bool   // which matter
	notify  *fsnotify.Watcher // nil: the kernel grants none
	denied  bool              // that was said
}

// touch is when a path changed for the first time since the last look at it, and when that is due.
type touch struct{ first, due time.Time }

// seen is what wait has waited for.
type seen struct {
	paths map[string]time.Time // were touched, then for the first time, and are due
	all   bool                 // anything may have changed
	read  *finished            // a large file
}

func newWatcher(log *slog.Logger) *watcher {
	w := &watcher{
		log: log, closed: make(chan struct{}), sooner: make(chan struct{}, 1),
		touched: map[string]touch{}, poll: time.Now().Add(pollInterval),
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open()
	return w
}

// open begins to use inotify; the caller has the lock. A user has few instances of it, and on a busy node other
// programs may have taken them all. Then the watcher polls the files, and tries inotify again each time.
func (w *watcher) open() {
	if w.notify != nil || w.isClosed() {
		return
	}
	notify, err := fsnotify.NewWatcher()
	switch {
	case err != nil && !w.denied:
		w.log.Warn("changes of manifests are noticed late: inotify cannot be used", "error", err,
			"interval", pollInterval, "advice", "raise the sysctl fs.inotify.max_user_instances")
	case err == nil && w.denied:
		w.log.Info("changes of manifests are noticed at once again")
	}
	w.denied = err != nil
	if err == nil {
		w.notify = notify
		go w.follow(notify)
	}
}

// follow takes events until the watcher is closed.
func (w *watcher) follow(notify *fsnotify.Watcher) {
	for {
		select {
		case e, open := <-notify.Events:
			if !open {
				return
			}
			w.touch(filepath.Clean(e.Name))
		case err, open := <-notify.Errors: // an overflow: events are lost
			if !open {
				return
			}
			w.log.Warn("watching the manifests failed; reading them again", "error", err)
			w.mu.Lock()
			w.poll = sooner(w.poll, time.Now().Add(quiet))
			w.mu.Unlock()
			w.wake()
		}
	}
}

// wake has wait look at the time again.
func (w *watcher) wake() {
	select {
	case w.sooner <- struct{}{}:
	default:
	}
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

// wait blocks until something should be looked at, a large file is read, or the time has come; zero: it never comes.
func (w *watcher) wait(ctx context.Context, soon time.Time, read <-chan finished) (s seen, err error) {
	for {
		select {
		case <-ctx.Done():
			return s, ctx.Err()
		case <-w.closed:
			return s, fsnotify.ErrClosed
		case r := <-read:
			return seen{read: &r}, nil
		case <-w.sooner:
		case <-time.After(time.Until(w.alarm(soon))):
			if s = w.due(time.Now()); s.all || len(s.paths) > 0 || !soon.IsZero() && !time.Now().Before(soon) {
				return s, nil
			}
		}
	}
}

// alarm is when wait has to look at the time.
func (w *watcher) alarm(soon time.Time) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	at := w.poll
	if len(w.touched) > 0 {
		at = sooner(at, w.next)
	}
	if !soon.IsZero() {
		at = sooner(at, soon)
	}
	return at
}

func sooner(a, b time.Time) time.Time { return slices.MinFunc([]time.Time{a, b}, time.Time.Compare) }

// step is the precision of the times at which touched paths are due: there may be many.
const step = quiet / 10

// due takes those that are.
func (w *watcher) due(now time.Time) (s seen) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !now.Before(w.poll) {
		w.poll = now.Add(pollInterval)
		w.open()
		s.all = true
	}
	if len(w.touched) == 0 || now.Before(w.next) {
		return s
	}
	w.next, s.paths = now.Add(pollInterval), map[string]time.Time{}
	for path, t := range w.touched {
		if t.due.After(now) {
			w.next = sooner(w.next, t.due)
			continue
		}
		delete(w.touched, path)
		s.paths[path] = t.first
	}
	w.next = later(w.next, now.Add(step))
	return s
}

// touch notes that a file was touched at a path, if that matters.
func (w *watcher) touch(path string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.matters(path) {
		return
	}
	now := time.Now()
	t, ok := w.touched[path]
	if !ok {
		t.first = now
	}
	t.due = later(sooner(now.Add(quiet), t.first.Add(patience)), t.due)
	w.set(path, t)
}

// at has a path looked at then.
func (w *watcher) at(path string, due time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.set(path, touch{time.Now(), due})
}

func (w *watcher) set(path string, t touch) {
	if len(w.touched) == 0 || t.due.Before(w.next) {
		w.next = t.due
		w.wake()
	}
	w.touched[path] = t
}

// touchedSince says since when a program writes to a path; zero: none does.
func (w *watcher) touchedSince(path string) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.touched[path].first
}

func (w *watcher) isTouched(path string) bool { return !w.touchedSince(path).IsZero() }

func (w *watcher) matters(path string) bool {
	name := filepath.Base(path)
	// Kubernetes mounts a ConfigMap as links through "..data", which is replaced at each change.
	return w.paths[path] || w.dirs[filepath.Dir(path)] && (isManifest(name) || strings.HasPrefix(name, ".."))
}

// watch watches the directories of the given roots, those in which these lie, so that they may be
// replaced, and those of files behind symbolic links. It returns the files by what they lead to.
func (w *watcher) watch(roots []*root, files map[string]*file) map[string][]*file {
	dirs, paths, links := map[string]bool{}, map[string]bool{}, map[string][]*file{}
	for _, r := range roots {
		paths[r.path] = true
		if info, err := os.Stat(r.path); err == nil && info.IsDir() {
			dirs[r.path] = true
		}
	}
	for path, f := range files {
		if !f.link {
			continue
		}
		dirs[filepath.Dir(path)] = true
		if target, err := filepath.EvalSymlinks(path); err == nil {
			paths[target] = true
			links[target] = append(links[target], f)
		}
	}
	w.update(dirs, paths)
	return links
}

func (w *watcher) update(dirs, paths map[string]bool) {
	w.mu.Lock()
	w.dirs, w.paths = dirs, paths
	notify := w.notify
	w.mu.Unlock()
	if notify == nil {
		return
	}
	want := maps.Clone(dirs)
	for path := range paths {
		want[filepath.Dir(path)] = true
	}
	for _, dir := range notify.WatchList() {
		if !want[dir] {
			_ = notify.Remove(dir) // it fails only if the directory is gone
		}
	}
	for dir := range want {
		if err := notify.Add(dir); err != nil {
			w.log.Debug("cannot watch a directory; it is read periodically", "path", dir, "error", err)
		}
	}
}
