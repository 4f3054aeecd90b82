package file

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
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

// find lists the root's manifests, or sets lost.
func (r *root) find() []string {
	wasLost := r.lost != nil
	var info os.FileInfo
	if info, r.lost = os.Stat(r.path); r.lost != nil || !info.IsDir() {
		return []string{r.path}
	}
	var entries []os.DirEntry
	if entries, r.lost = os.ReadDir(r.path); r.lost != nil {
		return nil
	}
	var paths []string
	for _, e := range entries {
		if isManifest(e.Name()) && !e.IsDir() {
			paths = append(paths, filepath.Join(r.path, e.Name()))
		}
	}
	switch {
	case len(paths) > 0:
		r.dir = info
	case r.dir != nil && (wasLost || !os.SameFile(r.dir, info)): // an inode number alone may be reused
		r.lost = errReplaced
	default:
		r.dir = nil
	}
	return paths
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
	info     os.FileInfo // when it was last read; nil: it has to be read
	contents []content
	whole    bool              // contents are of a reading without failures
	torn     bool              // somebody wrote while it was read
	failures []service.Problem // why contents are not what the file says now
}

const (
	staysInForce = "what it said before stays in force"
	othersUsed   = "the rest of the file is used"
)

// refresh reads a file if it has changed. Its only error is that of ctx.
func (s *Source) refresh(ctx context.Context, f *file) error {
	f.torn = false
	info, err := os.Stat(f.path)
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = errors.New("is not a regular file")
	case info.Size() == 0 && f.says():
		err = errors.New("is empty") // as a shell leaves it while the command to its left still works
	case f.info != nil && unchanged(f.info, info):
		return nil
	default:
		return s.read(ctx, f, info)
	}
	f.fail(err)
	return nil
}

func unchanged(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
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
func (f *file) fail(err error) {
	f.info = nil
	f.failures = []service.Problem{{Object: f.path, Reason: err.Error() + "; " + staysInForce}}
}

func (s *Source) read(ctx context.Context, f *file, info os.FileInfo) error {
	opened, err := os.Open(f.path)
	if err != nil {
		f.fail(err)
		return nil
	}
	defer opened.Close()
	r := newReading(opened, f, s)
	if err := r.run(ctx); err != nil {
		return err
	}
	s.decoded += r.decoded
	f.info = info
	if f.torn = r.torn; r.torn || time.Since(info.ModTime()) < timesGranularity {
		f.info = nil
	}
	if !r.torn || !f.whole {
		s.fresh = append(s.fresh, f.take(r)...)
		s.changed = true
	}
	return nil
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
