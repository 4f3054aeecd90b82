package daemon

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// quiet is how long to wait for more after a file was touched: an edit takes several steps.
	quiet = 100 * time.Millisecond
	// lookInterval bounds the delay of what inotify does not show, as on network file systems.
	lookInterval = 30 * time.Second
)

// watcher tells when files may have changed. It watches directories: editors put new files in the place
// of old ones, and Kubernetes mounts a ConfigMap as links through "..data", which it replaces.
type watcher struct {
	changed chan struct{} // has a token when the files should be looked at
	notify  *fsnotify.Watcher
	log     *slog.Logger
	ended   chan struct{}

	mu    sync.Mutex
	paths map[string]bool // of the files, and of what they link to
}

func newWatcher(log *slog.Logger) (*watcher, error) {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch the configuration: %w", err)
	}
	w := &watcher{changed: make(chan struct{}, 1), notify: notify, log: log, ended: make(chan struct{})}
	go w.run()
	return w, nil
}

func (w *watcher) close() {
	_ = w.notify.Close()
	<-w.ended
}

// follow watches other files, or the same ones after their links have changed.
func (w *watcher) follow(files []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.paths = map[string]bool{}
	dirs := map[string]bool{}
	for _, path := range files {
		if path == "" {
			continue
		}
		for _, p := range []string{path, target(path)} {
			w.paths[p] = true
			dirs[filepath.Dir(p)] = true
		}
	}
	for _, dir := range w.notify.WatchList() {
		if !dirs[dir] {
			_ = w.notify.Remove(dir) // it fails only if the directory is gone
		}
	}
	for dir := range dirs {
		if err := w.notify.Add(dir); err != nil {
			w.log.Debug("cannot watch; it is looked at periodically", "directory", dir, "error", err)
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
	timer := time.NewTimer(lookInterval)
	defer timer.Stop()
	for touched := false; ; {
		select {
		case e, ok := <-w.notify.Events:
			if !ok {
				return
			}
			if !touched && w.matters(e.Name) {
				touched = true
				timer.Reset(quiet)
			}
		case err, ok := <-w.notify.Errors: // an overflow: events are lost
			if !ok {
				return
			}
			w.log.Warn("watching the configuration", "error", err)
			timer.Reset(quiet)
		case <-timer.C:
			touched = false
			timer.Reset(lookInterval)
			select {
			case w.changed <- struct{}{}:
			default:
			}
		}
	}
}

func (w *watcher) matters(path string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	path = filepath.Clean(path)
	return w.paths[path] || strings.HasPrefix(filepath.Base(path), "..")
}
