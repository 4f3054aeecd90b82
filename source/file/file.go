// Package file reads Services from manifests: standalone mode. It takes YAML and JSON, single objects, several
// documents, and Lists, and watches the files. The very output of this command is such a List.
//
//	kubectl get services,endpointslices,nodes -A -o yaml
//
// This is the way of a file:
//
//	paths ─scan─► changed files ─split─► parts ─decode─► objects ─view─► what differs ─► Batch
//	  ▲                            (a document, or    (unless the last
//	  └── inotify, and a look      one item of a      reading had the
//	      every ten seconds        List)              same part)
//
// A path is a file, or a directory. Of a directory its own *.yaml, *.yml and *.json files count, but not those of
// directories in it, and none that begin with a dot. Services, EndpointSlices, ServiceCIDRs and the Node of the
// configured name are used, and Endpoints for Services that have no EndpointSlice. Other kinds are skipped and counted.
//
// The files decide what is served, with exceptions that keep an accident from emptying the node. A file that does not
// parse, cannot be read, or is empty keeps what it said before, all of it. Until it has parsed once, those of its
// documents that do parse are used. A path that was given and is gone keeps what it said. It does so also if an empty
// directory appears in its place, as when a volume is unmounted. A file that disappears from a directory takes its
// objects with it.
//
// Files are looked at apart: while one is written without pause, or is large, the others are followed as ever.
//
// A document that would take too much memory, is nested too deep, or grows too much by its aliases does not parse. That
// is found before it takes the memory; see memory.go and yaml.go.
package file

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

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
//
// Each file is looked at apart from the others: one that changes all the time, or that is large, keeps none of them
// waiting.
//
//	touched paths ─ each quiet for a while ─► todo ─ small ─► read ─────────────────► what is in force
//	new, gone ─► scan ────────────────────────┘ └─── large ─► read beside, one by one ─┘
type Source struct {
	options  Options
	seed     maphash.Seed
	memory   *semaphore.Weighted // for all that is parsed at one moment
	watcher  *watcher
	roots    []*root
	files    map[string]*file
	order    []*file            // the same, sorted; nil: it is to be made
	links    map[string][]*file // by what they lead to
	todo     []*file            // to be looked at
	large    []*file            // to be read beside
	busy     *file              // is read beside; nil: none
	read     chan finished
	scanAt   time.Time // when the roots are to be listed; zero: when something happens
	lookAll  bool      // and all files to be looked at
	scanFree time.Time // not earlier, as the last time took long
	began    time.Time
	running  sync.WaitGroup
	ctx      context.Context // of what is read beside
	cancel   context.CancelFunc

	said     *view                    // what Next has returned; nil before its first time
	standing map[service.Problem]bool // what is wrong until the files change, and was returned
	fresh    []service.Problem        // what is wrong with objects that were read since
	changed  bool                     // since then, what is in force
	noted    bool                     // since then, what stands
	decoded  int64                    // bytes since memory was given back
}

const (
	// largeFile is from what size on a file is read beside.
	largeFile = 1 << 20
	// turn is how long files are read before what they say is delivered, if there are more.
	turn = 100 * time.Millisecond
	// restShare is how many times as long as it took a file is not read again, and the roots are not listed again.
	restShare = 8
	// restCredit is lent to a file, so that a second edit of a large file soon after the first is read at once.
	restCredit = 20 * time.Second
	// The first Next waits for so long for files that are written or are large.
	tornPatience, largePatience = 2 * time.Second, 30 * time.Second
)

// New begins to watch. A path that does not exist is an error here; later it is only a Problem.
func New(o Options) (*Source, error) {
	s := newSource(o)
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
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.watcher = newWatcher(s.options.Log)
	return s, nil
}

func newSource(o Options) *Source {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Source{
		options: o, seed: maphash.MakeSeed(), memory: semaphore.NewWeighted(maxMemory), files: map[string]*file{},
		read: make(chan finished), began: time.Now(), scanAt: time.Now(),
	}
}

// Close ends the watching.
func (s *Source) Close() error {
	s.cancel()
	s.running.Wait()
	return s.watcher.close()
}

// Next implements source.Source. It ends early only with ctx, and then loses nothing.
func (s *Source) Next(ctx context.Context) (service.Batch, error) {
	for ctx.Err() == nil {
		seen, err := s.watcher.wait(ctx, s.soon(), s.read)
		if err != nil {
			return service.Batch{}, err
		}
		s.take(seen)
		if err := s.work(ctx); err != nil {
			return service.Batch{}, err
		}
		if s.said == nil && !s.settled() || s.said != nil && !s.changed && !s.noted {
			continue
		}
		if batch, ok := s.batch(); ok {
			return batch, nil
		}
	}
	return service.Batch{}, ctx.Err()
}

// soon is when there is something to do even if nothing happens; zero: never.
func (s *Source) soon() time.Time {
	switch {
	case len(s.todo) > 0:
		return time.Now()
	case !s.scanAt.IsZero():
		return later(s.scanAt, s.scanFree)
	case s.said == nil:
		return time.Now().Add(quiet)
	}
	return time.Time{}
}

func later(a, b time.Time) time.Time { return slices.MaxFunc([]time.Time{a, b}, time.Time.Compare) }

// settled reports whether the first Batch is complete. Some files may not be read in time.
func (s *Source) settled() bool {
	torn := slices.ContainsFunc(s.sorted(), func(f *file) bool { return f.torn })
	waited := time.Since(s.began)
	return s.scanAt.IsZero() && len(s.todo) == 0 &&
		(!torn || waited > tornPatience) && (s.busy == nil && len(s.large) == 0 || waited > largePatience)
}

// take takes in what the watcher has seen.
func (s *Source) take(seen seen) {
	if seen.all {
		s.scanSoon(true)
	}
	for path, first := range seen.paths {
		s.touched(path, first)
	}
	if r := seen.read; r != nil {
		s.busy = nil
		s.finish(*r)
	}
}

func (s *Source) scanSoon(all bool) {
	if s.lookAll = s.lookAll || all; s.scanAt.IsZero() {
		s.scanAt = time.Now()
	}
}

// touched is told of a path at which a file was touched first then.
func (s *Source) touched(path string, first time.Time) {
	for _, f := range s.links[path] {
		s.look(f)
	}
	info, err := os.Lstat(path)
	f := s.files[path]
	switch {
	case f != nil && err == nil && f.root.lost == nil && f.link == isLink(info.Mode()):
		s.look(f)
	case f != nil || isManifest(filepath.Base(path)) && !s.isRoot(path):
		s.scanSoon(false)
		if f != nil {
			f.left = first
			s.look(f)
		}
	case s.links[path] == nil:
		s.scanSoon(true)
	}
}

func (s *Source) isRoot(path string) bool {
	return slices.ContainsFunc(s.roots, func(r *root) bool { return r.path == path })
}

func isLink(m fs.FileMode) bool { return m&fs.ModeSymlink != 0 }

// look has a file looked at.
func (s *Source) look(f *file) {
	if !f.queued {
		f.queued = true
		s.todo = append(s.todo, f)
	}
}

// work looks at files, in the order of inTurn.
func (s *Source) work(ctx context.Context) error {
	if at := s.soon(); !s.scanAt.IsZero() && !time.Now().Before(later(s.scanAt, s.scanFree)) && !at.IsZero() {
		s.scan()
	}
	inTurn(s.todo)
	for start := time.Now(); len(s.todo) > 0 && (s.said == nil || time.Since(start) < turn); {
		f := s.todo[0]
		if err := s.refresh(ctx, f); err != nil {
			return err
		}
		f.queued = false
		s.todo = s.todo[1:]
	}
	if s.busy == nil && len(s.large) > 0 {
		f := s.large[0]
		s.large = s.large[1:]
		s.readBeside(f)
	}
	return nil
}

// inTurn puts one file of each owner first, then a second one of each, and so on: a tenant with many files does not
// delay the others. Of an owner's files, those that were not read for the longest time come first.
func inTurn(files []*file) {
	slices.SortFunc(files, func(a, b *file) int { return cmp.Or(a.seen.Compare(b.seen), cmp.Compare(a.path, b.path)) })
	before := map[string]int{} // an owner's files
	for _, f := range files {
		owner := f.owner()
		f.turn = before[owner]
		before[owner]++
	}
	slices.SortStableFunc(files, func(a, b *file) int { return cmp.Compare(a.turn, b.turn) })
}

// scan lists the roots. A lost one keeps its files. A path that a program still writes to stays as it is.
func (s *Source) scan() {
	start, all := time.Now(), s.lookAll
	s.scanAt, s.lookAll = time.Time{}, false
	listed := map[string]found{}
	for _, r := range s.roots {
		was := fmt.Sprint(r.lost)
		paths := r.find()
		if r.lost != nil {
			paths = s.pathsOf(r)
		}
		if now := fmt.Sprint(r.lost); now != was {
			s.noted, all = true, true
		}
		for _, p := range paths {
			if _, ok := listed[p.path]; !ok {
				listed[p.path] = found{p.path, p.link, r}
			}
		}
	}
	gone := s.forget(listed)
	for path, p := range listed {
		f := s.files[path]
		if f == nil && !s.watcher.isTouched(path) {
			f = &file{path: path, seen: start}
			f.takeContents(gone)
			s.files[path], s.order, s.changed = f, nil, true
			s.look(f)
		}
		if f == nil {
			continue
		}
		if f.root, f.link = p.root, p.link; all {
			s.look(f)
		}
	}
	s.links = s.watcher.watch(s.roots, s.files) // before reading: what changes meanwhile is read again
	s.scanFree = time.Now().Add(restShare * time.Since(start))
}

// forget leaves out files that are not there any more. A renamed one stays until its new name is due: the kernel tells
// of the two names one after the other. A path that was written to before has another file, perhaps with the inode of
// the removed one.
func (s *Source) forget(listed map[string]found) (gone []*file) {
	arriving := s.arriving(listed)
	for path, f := range s.files {
		if _, ok := listed[path]; ok || s.watcher.isTouched(path) || f.isOneOf(arriving) {
			continue
		}
		delete(s.files, path)
		f.gone = true
		gone = append(gone, f)
		s.order, s.changed = nil, true
	}
	return gone
}

// arrival is a new file to which a program still writes.
type arrival struct {
	os.FileInfo
	since time.Time
}

func (s *Source) arriving(listed map[string]found) (all []arrival) {
	for path := range listed {
		if since := s.watcher.touchedSince(path); s.files[path] == nil && !since.IsZero() {
			if info, err := os.Stat(path); err == nil {
				all = append(all, arrival{info, since})
			}
		}
	}
	return all
}

func (s *Source) pathsOf(r *root) []found {
	var paths []found
	for path, f := range s.files {
		if f.root == r {
			paths = append(paths, found{path, f.link, r})
		}
	}
	return paths
}

func (s *Source) sorted() []*file {
	if s.order == nil {
		s.order = slices.SortedFunc(maps.Values(s.files), func(a, b *file) int { return strings.Compare(a.path, b.path) })
	}
	return s.order
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
	if now != old {
		now.warned = now.warnings(false)
	}
	news, resolved := s.stand(slices.Concat(s.failures(), now.duplicates, now.warned), &b)
	b.Problems, b.Resolved = append(s.fresh, now.locate(news)...), resolved
	for object := range old.wrong {
		if !now.wrong[object] {
			b.Resolved = append(b.Resolved, object)
		}
	}
	slices.Sort(b.Resolved)
	if !maps.Equal(old.skipped, now.skipped) {
		s.options.Log.Debug("skipped objects of other kinds", "resource", now.skipped)
	}
	s.said, s.fresh, s.changed, s.noted = now, nil, false, false
	s.freeMemory()
	return b, first || len(b.Services)+len(b.Slices)+len(b.Problems)+len(b.Resolved) > 0 ||
		b.Node != nil || b.ServiceCIDRs != nil
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

// stand returns those problems that did not stand before, and of which objects one stands no more. Of such an object,
// and of a Service that has changed, those that stand are news again. That a problem is on another line now is no news.
func (s *Source) stand(problems []service.Problem, b *service.Batch) (news []service.Problem, resolved []string) {
	standing := map[service.Problem]bool{}
	changed, gone := map[string]bool{}, map[string]bool{}
	for name, is := range b.Services.All() {
		changed["Service "+name.String()], gone["Service "+name.String()] = true, is == nil
	}
	for _, p := range problems {
		p.File = ""
		standing[p] = false
	}
	for p := range s.standing {
		if _, stands := standing[p]; !stands && !gone[p.Object] && !slices.Contains(resolved, p.Object) {
			resolved = append(resolved, p.Object)
		}
	}
	for _, said := range problems {
		p := said
		p.File = ""
		if !standing[p] && (!s.standing[p] || changed[p.Object] || slices.Contains(resolved, p.Object)) {
			news = append(news, said)
		}
		standing[p] = true
	}
	s.standing = standing
	return news, resolved
}

// freeMemory returns what decoding a large file has used, which is many times what is kept of it.
func (s *Source) freeMemory() {
	if s.decoded > 4<<20 {
		debug.FreeOSMemory()
	}
	s.decoded = 0
}
