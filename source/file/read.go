package file

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"fairlead.dev/fairlead/said"
	"fairlead.dev/fairlead/service"
)

const (
	// maxFile keeps a mistake (a disk image in the directory) from stopping everything else.
	maxFile = 2 << 30
	// maxPart is several times what the API server takes for one object.
	maxPart = 4 << 20
	// maxFailures and maxProblems bound what is said about one file.
	maxFailures = 20
	maxProblems = 1000
	// atOnce is how many items are decoded before their results are taken in, maxWorkers how many at the same time.
	atOnce     = 256
	maxWorkers = 8
)

// content is what one part of a file says. The key tells whether it would say the same now.
type content struct {
	key
	objects    []object
	start, end int64 // in the file
	line       int   // at which it starts
}

type key struct {
	hash uint64
	list typeMeta // the List of which it is an item
}

// reading is one pass over a file.
type reading struct {
	file     io.ReaderAt
	name     string
	node     string
	seed     maphash.Seed
	old      []content
	known    map[key][]object // by part, from the last reading
	contents []content
	problems []service.Problem // of objects
	failures []service.Problem // of documents that do not parse, or of the whole file
	more     struct{ problems, failures int }
	lines    lines // of file
	decoded  int64 // bytes
	torn     bool  // it was written meanwhile
	workers  int
	memory   *semaphore.Weighted // for what is parsed at one moment

	index  sync.Once // makes before
	before map[string]object
}

func newReading(opened io.ReaderAt, f *file, s *Source) *reading {
	r := &reading{
		file: opened, lines: lines{of: opened}, name: f.path, node: s.options.Node, seed: s.seed, old: f.contents,
		workers: maxWorkers, memory: s.memory,
	}
	r.known = make(map[key][]object, len(r.old))
	for _, c := range r.old {
		r.known[c.key] = c.objects
	}
	return r
}

// run reads the file. Its only error is that of ctx.
func (r *reading) run(ctx context.Context, opened *os.File) error {
	before, err := opened.Stat()
	if err != nil {
		r.fail(0, err)
		return nil
	}
	if err := r.all(ctx, before.Size()); err != nil {
		return err
	}
	after, err := opened.Stat()
	r.torn = err != nil || after.Size() != before.Size() || !after.ModTime().Equal(before.ModTime())
	return nil
}

// all reads so many bytes.
func (r *reading) all(ctx context.Context, size int64) error {
	if size > maxFile {
		r.fail(0, fmt.Errorf("is larger than %d MiB", maxFile>>20))
		return nil
	}
	docs, err := split(r.file, size, r.seed)
	if err != nil {
		r.fail(0, err)
	}
	for i, d := range docs {
		err := r.document(ctx, d)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			r.fail(i+1, err)
		}
	}
	r.countMore()
	return nil
}

// document adds what a document says, or nothing if it does not parse.
func (r *reading) document(ctx context.Context, d document) error {
	if d.items == nil {
		return r.part(ctx, d.part)
	}
	contents, problems, more := len(r.contents), len(r.problems), r.more
	err := r.list(ctx, d)
	if err == nil {
		return nil
	}
	r.contents, r.problems, r.more = r.contents[:contents], r.problems[:problems], more
	if ctx.Err() == nil && d.end-d.start <= maxPart {
		whole := part{start: d.start, end: d.end} // without hash: nothing recognises it
		if r.part(ctx, whole) == nil {
			return nil
		}
	}
	return err
}

// list decodes a document by its items.
func (r *reading) list(ctx context.Context, d document) error {
	text, err := r.head(d)
	if err != nil {
		return err
	}
	head := r.decoder()
	list, ok, err := head.head(text)
	if err != nil {
		return partError{d.start, err}
	}
	if !ok { // of some other kind, which happens to have items
		return r.take(result{content{objects: head.objects, start: d.start, end: d.end}, head.problems, 0, nil})
	}
	return r.items(ctx, d.items, list)
}

// items decodes the items of a List, and adds them in their order up to the first error.
func (r *reading) items(ctx context.Context, parts []part, list typeMeta) error {
	decode := r.bounded(ctx, func(d *decoder, text []byte) error { return d.item(text, list) })
	for some := range slices.Chunk(parts, atOnce) {
		results := make([]result, len(some))
		var workers errgroup.Group
		workers.SetLimit(r.workers)
		for i, p := range some {
			workers.Go(func() error {
				results[i] = r.decode(p, list, decode)
				return ctx.Err()
			})
		}
		if err := workers.Wait(); err != nil {
			return err
		}
		if err := r.takeAll(results); err != nil {
			return err
		}
	}
	return nil
}

// takeAll keeps one of several empty items in a row: there may be as many as the file has lines.
func (r *reading) takeAll(results []result) error {
	for _, d := range results {
		empty := d.err == nil && d.bytes > 0 && d.bytes < 64 && len(d.content.objects) == 0
		if n := len(r.contents); empty && n > 0 && len(r.contents[n-1].objects) == 0 {
			continue
		}
		if err := r.take(d); err != nil {
			return err
		}
	}
	return nil
}

// result is what decoding a part has given.
type result struct {
	content  content
	problems []located
	bytes    int64 // decoded
	err      error
}

// decode decodes a part, unless the last reading had the same. Several goroutines may call it.
func (r *reading) decode(p part, list typeMeta, decode func(*decoder, []byte) error) result {
	k := key{p.hash, list}
	if objects, ok := r.known[k]; ok && p.hash != 0 {
		return result{content: content{key: k, objects: objects, start: p.start, end: p.end}}
	}
	text, err := r.text(p.start, p.end)
	d := r.decoder()
	if err == nil {
		err = decode(d, text)
	}
	if err != nil {
		err = partError{p.start, err}
	}
	c := content{key: k, objects: d.objects, start: p.start, end: p.end}
	return result{c, d.problems, p.end - p.start, err}
}

func (r *reading) take(d result) error {
	r.decoded += d.bytes
	if d.err != nil {
		return d.err
	}
	d.content.line = r.lines.number(d.content.start)
	r.contents = append(r.contents, d.content)
	room := min(maxProblems-len(r.problems), len(d.problems))
	for _, p := range d.problems[:room] {
		p.File = fmt.Sprintf("%s:%d", r.name, d.content.line+p.line-1)
		r.problems = append(r.problems, p.Problem)
	}
	r.more.problems += len(d.problems) - room
	return nil
}

// part decodes a document in one piece.
func (r *reading) part(ctx context.Context, p part) error {
	return r.take(r.decode(p, typeMeta{}, r.bounded(ctx, (*decoder).document)))
}

// bounded has what is decoded at one moment take no more than maxMemory.
func (r *reading) bounded(ctx context.Context, decode func(*decoder, []byte) error) func(*decoder, []byte) error {
	return func(d *decoder, text []byte) error {
		need := memory(text)
		if err := r.memory.Acquire(ctx, need); err != nil {
			return err
		}
		defer r.memory.Release(need)
		return decode(d, text)
	}
}

func (r *reading) decoder() *decoder { return &decoder{node: r.node, previous: r.previous} }

// previous finds an object in what the file said before. Several goroutines may call it.
func (r *reading) previous(o object) (object, bool) {
	r.index.Do(func() {
		r.before = map[string]object{}
		for _, c := range r.old {
			for _, old := range c.objects {
				r.before[old.String()] = old
			}
		}
	})
	old, ok := r.before[o.String()]
	return old, ok
}

func (r *reading) text(start, end int64) ([]byte, error) {
	if end-start > maxPart {
		return nil, fmt.Errorf("is larger than %d MiB in one piece", maxPart>>20)
	}
	text := make([]byte, end-start)
	if _, err := r.file.ReadAt(text, start); err != nil {
		return nil, err
	}
	return text, checkMemory(text)
}

func (r *reading) head(d document) ([]byte, error) {
	before, err := r.text(d.start, d.items[0].start)
	if err != nil {
		return nil, partError{d.start, err}
	}
	behind, err := r.text(d.itemsEnd, d.end)
	if err != nil {
		return nil, partError{d.itemsEnd, err}
	}
	return append(before, behind...), nil
}

// partError is an error in the part that begins at an offset of the file.
type partError struct {
	at  int64
	err error
}

func (e partError) Error() string { return e.err.Error() }
func (e partError) Unwrap() error { return e.err }

// fail notes what keeps a document from being used; number 0 means the whole file.
func (r *reading) fail(number int, err error) {
	if len(r.failures) == maxFailures {
		r.more.failures++
		return
	}
	p := service.Problem{Object: r.name, Reason: said.Brief(err.Error())}
	var at partError
	if errors.As(err, &at) {
		line, reason := r.lines.number(at.at), strings.TrimPrefix(p.Reason, "yaml: ")
		if n, rest, ok := yamlLine(reason); ok {
			line, reason = line+n-1, rest
		}
		p.Object, p.Reason = r.name+":"+strconv.Itoa(line), reason
		p.Field = "document " + strconv.Itoa(number)
	}
	r.failures = append(r.failures, p)
}

// countMore says how many failures and problems are not in their lists.
func (r *reading) countMore() {
	if n := r.more.failures; n > 0 {
		r.failures = append(r.failures, service.Problem{Object: r.name, Reason: fmt.Sprintf("%d more documents", n)})
	}
	if n := r.more.problems; n > 0 {
		r.problems = append(r.problems, service.Problem{Object: r.name, Reason: fmt.Sprintf("%d more problems", n)})
	}
}

// yamlLine takes the line, which counts from the part's first one, out of the YAML parser's message. It is the line of
// the mistake, or that on which the block around it begins.
func yamlLine(message string) (int, string, bool) {
	var n int
	if _, err := fmt.Sscanf(message, "line %d:", &n); err != nil {
		return 0, "", false
	}
	_, message, _ = strings.Cut(message, ": ")
	if strings.HasPrefix(message, "did not find expected") {
		n++ // the parser, unlike the scanner below it, counts from zero
	}
	return n, message, true
}
