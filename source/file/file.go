// Package file reads Services from manifests: standalone mode. It takes YAML and JSON, single
// objects, several documents, and Lists, among them the very output of
//
//	kubectl get services,endpointslices,nodes -A -o yaml
//
// and watches what it has read:
//
//	paths ─scan─► changed files ─split─► parts ─decode─► objects ─view─► what differs ─► Batch
//	  ▲                            (a document, or    (unless the last
//	  └── inotify, and a look      one item of a      reading had the
//	      every ten seconds        List)              same part)
//
// A path is a file, or a directory whose own *.yaml, *.yml and *.json files count (not those of
// directories in it, and none that begin with a dot). Services, EndpointSlices, ServiceCIDRs and the
// Node of the configured name are used, and Endpoints for Services that have no EndpointSlice.
// Other kinds are skipped and counted.
//
// What is in force is what the files say, with exceptions that keep an accident from emptying the
// node. A file that does not parse, cannot be read, or is empty keeps what it said before, all of
// it; until it has parsed once, those of its documents that do parse are used. A path that was given
// and is gone keeps what it said, also if an empty directory appears in its place, as when a volume
// is unmounted. A file that disappears from a directory takes its objects with it.
//
// A document that would take too much memory, is nested too deep, or grows too much by its aliases does not parse. That
// is found before it takes the memory; see memory.go and yaml.go.
package file

import (
	"context"
	"fmt"
	"hash/maphash"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/source"
)

var _ source.Source = (*Source)(nil)

// Options say what to read.
type Options struct {
	Paths []string // files and directories; at least one
	Node  string   // name of the own Node; the others are skipped
	Log   *slog.Logger
}

// Source reads manifests and watches them.
type Source struct {
	options  Options
	seed     maphash.Seed
	watcher  *watcher
	roots    []*root
	files    map[string]*file
	said     *view                    // what Next has returned; nil before its first time
	standing map[service.Problem]bool // what is wrong until the files change, and was returned
	fresh    []service.Problem        // what is wrong with objects that were read since
	changed  bool                     // since then, what is in force
	decoded  int64                    // bytes since memory was given back
	torn     int                      // looks in a row during which somebody wrote
}

// New begins to watch. A path that does not exist is an error here; later it is only a Problem.
func New(o Options) (*Source, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Source{options: o, seed: maphash.MakeSeed(), files: map[string]*file{}}
	for _, path := range o.Paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("manifests: %w", err)
		}
		if !info.IsDir() && !info.Mode().IsRegular() {
			return nil, fmt.Errorf("manifests: %s is neither a file nor a directory", path)
		}
		s.roots = append(s.roots, &root{path: filepath.Clean(path)})
	}
	s.watcher = newWatcher(o.Log)
	return s, nil
}

// Close ends the watching.
func (s *Source) Close() error { return s.watcher.close() }

// Skipped counts the objects of kinds that are of no use, by kind, as of the last Next.
func (s *Source) Skipped() map[string]int {
	if s.said == nil {
		return nil
	}
	return s.said.skipped
}

// maxTorn is how often the first Next tries again if somebody writes while it reads.
const maxTorn = 50

// Next implements source.Source.
func (s *Source) Next(ctx context.Context) (service.Batch, error) {
	for {
		if err := s.watcher.wait(ctx); err != nil {
			return service.Batch{}, err
		}
		if err := s.load(ctx); err != nil {
			s.watcher.again()
			return service.Batch{}, err
		}
		if s.said == nil && 0 < s.torn && s.torn < maxTorn {
			continue
		}
		if batch, ok := s.batch(); ok {
			return batch, nil
		}
	}
}

// load brings the files up to date. It ends early only with ctx, and then loses nothing.
func (s *Source) load(ctx context.Context) error {
	s.scan()
	s.watcher.watch(s.roots, s.files) // before reading: what changes meanwhile is read again
	torn := false
	for _, f := range s.sorted() {
		if f.root.lost != nil {
			continue
		}
		if err := s.refresh(ctx, f); err != nil {
			return err
		}
		torn = torn || f.torn
	}
	if !torn {
		s.torn = 0
		return nil
	}
	s.torn++
	s.watcher.again()
	return nil
}

// scan lists the roots. A lost one keeps its files.
func (s *Source) scan() {
	files := map[string]*file{}
	for _, r := range s.roots {
		paths := r.find()
		if r.lost != nil {
			paths = s.pathsOf(r)
		}
		for _, path := range paths {
			if files[path] != nil {
				continue
			}
			if files[path] = s.files[path]; files[path] == nil {
				files[path] = &file{path: path}
			}
			files[path].root = r
		}
	}
	s.changed = s.changed || !maps.Equal(files, s.files)
	s.files = files
}

func (s *Source) pathsOf(r *root) []string {
	var paths []string
	for path, f := range s.files {
		if f.root == r {
			paths = append(paths, path)
		}
	}
	return paths
}

func (s *Source) sorted() []*file {
	return slices.SortedFunc(maps.Values(s.files), func(a, b *file) int { return strings.Compare(a.path, b.path) })
}

// batch is what differs from what Next has returned before, and whether it is worth returning.
func (s *Source) batch() (service.Batch, bool) {
	first, old, now := s.said == nil, s.said, s.said
	if first {
		old = &view{}
	}
	if first || s.changed {
		now = newView(s.sorted())
	}
	b := now.batch(old)
	b.Problems = append(s.fresh, s.stand(append(s.failures(), now.duplicates...))...)
	if !maps.Equal(old.skipped, now.skipped) {
		s.options.Log.Debug("skipped objects of other kinds", "kinds", now.skipped)
	}
	s.said, s.fresh, s.changed = now, nil, false
	s.freeMemory()
	return b, first || len(b.Services)+len(b.Slices)+len(b.Problems) > 0 || b.Node != nil || b.ServiceCIDRs != nil
}

// failures are why files and roots do not say what is in force.
func (s *Source) failures() []service.Problem {
	var all []service.Problem
	for _, r := range s.roots {
		if r.lost != nil {
			all = append(all, service.Problem{Object: r.path, Reason: r.lost.Error() + "; " + staysInForce})
		}
	}
	for _, f := range s.sorted() {
		all = append(all, f.failures...)
	}
	return all
}

// stand returns those problems that did not stand before.
func (s *Source) stand(problems []service.Problem) []service.Problem {
	standing := map[service.Problem]bool{}
	var news []service.Problem
	for _, p := range problems {
		if !s.standing[p] && !standing[p] {
			news = append(news, p)
		}
		standing[p] = true
	}
	s.standing = standing
	return news
}

// freeMemory returns what decoding a large file has used, which is many times what is kept of it.
func (s *Source) freeMemory() {
	if s.decoded > 4<<20 {
		debug.FreeOSMemory()
	}
	s.decoded = 0
}
