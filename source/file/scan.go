package file

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"fairlead.dev/fairlead/service"
)

// root is a path that was given.
type root struct {
	path string
	dir  os.FileInfo // the directory that had files when it was last listed; nil: none
	lost error       // why what its files said stays in force; nil: it can be read
}

var errReplaced = errors.New("is another directory now, and empty")

// found is a file of a root.
type found struct {
	path string
	link bool
	root *root
}

// find lists the root's manifests, or sets lost.
func (r *root) find() []found {
	wasLost := r.lost != nil
	var info os.FileInfo
	if info, r.lost = os.Stat(r.path); r.lost != nil || !info.IsDir() {
		own, err := os.Lstat(r.path)
		return []found{{r.path, err == nil && isLink(own.Mode()), r}}
	}
	var entries []os.DirEntry
	if entries, r.lost = os.ReadDir(r.path); r.lost != nil {
		return nil
	}
	var all []found
	for _, e := range entries {
		if isManifest(e.Name()) && !e.IsDir() {
			all = append(all, found{filepath.Join(r.path, e.Name()), isLink(e.Type()), r})
		}
	}
	switch {
	case len(all) > 0:
		r.dir = info
	case r.dir != nil && (wasLost || !os.SameFile(r.dir, info)): // an inode number alone may be reused
		r.lost = errReplaced
	default:
		r.dir = nil
	}
	return all
}

func isManifest(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(name, ".")
	}
	return false
}

// file is one file, and what is in force of it.
type file struct {
	path     string
	root     *root
	link     bool
	gone     bool        // from its root
	left     time.Time   // when its path was touched last, and there was no file
	info     os.FileInfo // when it was last read; nil: it has to be read
	last     os.FileInfo // the same, also if it has to be read again
	data     []byte      // in place of a file that can be opened
	contents []content
	whole    bool              // contents are of a reading without failures
	torn     bool              // it was written while it was read
	failures []service.Problem // why contents are not what the file says now

	queued bool      // to be looked at
	turn   int       // among those of its owner
	guess  string    // of its owner; empty: none was made
	seen   time.Time // when it was last read, or found
	free   time.Time // not to be read earlier, as that took long again and again
}

// takeContents has a file that has another name now say what it said under the old one, until it is read.
func (f *file) takeContents(gone []*file) {
	if len(gone) == 0 {
		return
	}
	info, err := os.Stat(f.path)
	if err != nil {
		return
	}
	for _, old := range gone {
		if old.whole && old.last != nil && unchanged(old.last, info) {
			f.contents, f.whole, f.info, f.last = old.contents, true, old.info, old.last
			return
		}
	}
}

func (f *file) isOneOf(all []arrival) bool {
	return f.last != nil && slices.ContainsFunc(all, func(a arrival) bool {
		return !a.since.Before(f.left) && os.SameFile(f.last, a.FileInfo)
	})
}

const (
	staysInForce = "its previous content stays in force"
	othersUsed   = "the rest of the file is used"
)

// refresh reads a file if it has changed. Its only error is that of ctx.
func (s *Source) refresh(ctx context.Context, f *file) error {
	if f.gone || f.root.lost != nil || f == s.busy {
		if f == s.busy {
			s.watcher.at(f.path, time.Now().Add(quiet))
		}
		return nil
	}
	f.torn = false
	info, err := os.Stat(f.path)
	switch {
	case errors.Is(err, os.ErrNotExist) && !f.link && f.path != f.root.path:
		return nil // the next scan finds out whether it has another name
	case err != nil:
	case !info.Mode().IsRegular():
		err = errors.New("is not a regular file")
	case info.Size() == 0 && f.says():
		err = errors.New("is empty") // as a shell leaves it while the command to its left still works
	case f.info != nil && unchanged(f.info, info):
		return nil
	case time.Now().Before(f.free):
		s.watcher.at(f.path, f.free)
		return nil
	case info.Size() > largeFile:
		if !slices.Contains(s.large, f) {
			s.large = append(s.large, f)
		}
		return nil
	default:
		return s.readNow(ctx, f, info)
	}
	s.fail(f, err)
	return nil
}

func unchanged(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// owner is the namespace of the first object that the file has. A file that was not read yet has the namespace that its
// text names first, so that it does not wait for all new files of another tenant.
func (f *file) owner() string {
	for _, c := range f.contents {
		for _, o := range c.objects {
			return o.name.Namespace
		}
	}
	if f.guess == "" {
		f.guess = guessOwner(f.path)
	}
	return f.guess
}

var namespaceField = regexp.MustCompile(`\bnamespace"?\s*:\s*"?([a-z0-9-]+)`)

func guessOwner(path string) string {
	opened, err := open(path)
	if err != nil {
		return path
	}
	defer opened.Close()
	const most = 4 << 10
	start := make([]byte, most)
	n, _ := io.ReadFull(opened, start) // a short file is no error here
	if found := namespaceField.FindSubmatch(start[:n]); found != nil {
		return string(found[1])
	}
	return "default"
}

// says reports whether any object of the file is in force.
func (f *file) says() bool {
	return slices.ContainsFunc(f.contents, func(c content) bool { return len(c.objects) > 0 })
}

func (f *file) has(o object) bool {
	return slices.ContainsFunc(f.contents, func(c content) bool {
		return slices.ContainsFunc(c.objects, func(have object) bool { return have.kind == o.kind && have.name == o.name })
	})
}

// fail notes why the file cannot be read.
func (s *Source) fail(f *file, err error) {
	f.info = nil
	s.setFailures(f, []service.Problem{{Object: f.path, Reason: err.Error() + "; " + staysInForce}})
}

func (s *Source) setFailures(f *file, failures []service.Problem) {
	s.noted = s.noted || !slices.Equal(f.failures, failures)
	f.failures = failures
}

// open does not wait for a writer, if the file has become a pipe meanwhile.
func open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, errors.New("is not a regular file"), f.Close())
	}
	return f, nil
}

// finished is a reading that has come to its end, or the error that kept it from that.
type finished struct {
	file *file
	info os.FileInfo // before it
	r    *reading
	err  error
	took time.Duration
}

// readNow reads a small file.
func (s *Source) readNow(ctx context.Context, f *file, info os.FileInfo) error {
	d := s.readFile(ctx, f, info, runtime.GOMAXPROCS(0))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.finish(d)
	return nil
}

// readBeside reads a large file while others are followed. It leaves them a processor, but the first time.
func (s *Source) readBeside(f *file) {
	info, err := os.Stat(f.path)
	if err != nil {
		s.look(f)
		return
	}
	workers := runtime.GOMAXPROCS(0)
	if s.said != nil {
		workers = max(1, workers/2)
	}
	s.busy = f
	s.running.Go(func() {
		d := s.readFile(s.ctx, f, info, workers)
		select {
		case s.read <- d:
		case <-s.ctx.Done():
		}
	})
}

// readFile changes nothing but what it returns.
func (s *Source) readFile(ctx context.Context, f *file, info os.FileInfo, workers int) finished {
	start := time.Now()
	opened, err := open(f.path)
	if err != nil {
		return finished{file: f, err: err}
	}
	defer opened.Close()
	r := newReading(opened, f, s)
	r.workers = min(workers, maxWorkers)
	err = r.run(ctx, opened)
	return finished{f, info, r, err, time.Since(start)}
}

// finish takes in what was read.
func (s *Source) finish(d finished) {
	f, r := d.file, d.r
	if f.gone {
		return
	}
	now := time.Now()
	f.seen, f.free = now, later(f.free, now.Add(-restCredit)).Add(restShare*d.took)
	if d.err != nil {
		s.fail(f, d.err)
		return
	}
	s.decoded += r.decoded
	f.info, f.last = d.info, d.info
	if f.torn = r.torn; r.torn || now.Sub(d.info.ModTime()).Abs() < timesGranularity {
		f.info = nil
	}
	if r.torn {
		s.watcher.at(f.path, later(f.free, now.Add(quiet)))
	}
	if !r.torn || !f.whole {
		old := f.failures
		s.fresh = append(s.fresh, f.take(r)...)
		s.changed = true
		s.noted = s.noted || !slices.Equal(old, f.failures)
	}
}

// timesGranularity is that of the coarsest file systems. A file read so soon after its last change
// may change again without a trace, and is read again at the next occasion.
const timesGranularity = 2 * time.Second

// take puts a reading in force, unless an earlier one was better, and returns its objects' problems.
func (f *file) take(r *reading) []service.Problem {
	fate := othersUsed
	if f.whole {
		fate = staysInForce
	}
	for i := range r.failures {
		r.failures[i].Reason += "; " + fate
	}
	f.failures = r.failures
	if f.whole && len(r.failures) > 0 {
		return nil
	}
	f.contents, f.whole = slices.Clip(r.contents), len(r.failures) == 0
	return r.problems
}
