package file

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
)

// A List of "kubectl get -o yaml" is one document of any size. Parsing it whole would cost some twenty times its length
// in memory. So a document is cut into parts that are decoded one by one: the items of its top-level list of that name,
// and the rest, called its head. The cut looks only at line starts. Where that is not enough (an anchor used across
// items), decoding an item fails, and the document is decoded whole.

// part is a stretch of a file, and a hash of its text by which an unchanged one is recognised.
type part struct {
	start, end int64
	hash       uint64
}

// document is one YAML or JSON document.
type document struct {
	part
	items    []part // of a List; the head is all that lies before the first and behind the last
	empty    bool   // nothing but white space, comments and directives
	flow     bool   // begins as JSON does
	itemsEnd int64
}

const (
	// maxDocuments and maxItems bound the lists that split returns. There are fewer objects in a cluster.
	maxDocuments = 100_000
	maxItems     = 500_000
)

var (
	errDocuments = fmt.Errorf("has more than %d documents; make it several files", maxDocuments)
	errItemCount = fmt.Errorf("has more than %d items in one List; make it several files", maxItems)
)

var errBinary = errors.New("has a zero byte, so it is neither YAML nor JSON in UTF-8")

// split finds the documents of a file, and in them the items of Lists. It keeps no text.
func split(r io.ReaderAt, size int64, seed maphash.Seed) ([]document, error) {
	s := newSplitter(seed)
	if err := s.lines(bufio.NewReaderSize(io.NewSectionReader(r, 0, size), 64<<10)); err != nil {
		return nil, err
	}
	var docs []document
	for _, d := range s.docs {
		if !d.flow {
			docs = append(docs, d)
			continue
		}
		values, err := splitJSON(r, d, seed)
		if isTooMany(err) || len(docs)+len(values) > maxDocuments {
			return nil, cmp.Or(err, errDocuments)
		}
		if err != nil { // YAML in flow style, or an error that decoding will name
			values = []document{d}
		}
		docs = append(docs, values...)
	}
	return docs, nil
}

func isTooMany(err error) bool { return errors.Is(err, errDocuments) || errors.Is(err, errItemCount) }

// Where a splitter is in a document.
const (
	beforeItems = iota
	expectItems // behind the line "items:"
	inItems
	afterItems
)

type splitter struct {
	docs   []document
	doc    document
	state  int
	indent int // of the dashes that begin items
	offset int64
	head   maphash.Hash
	item   maphash.Hash
	err    error // there are too many
}

func newSplitter(seed maphash.Seed) *splitter {
	s := &splitter{doc: document{empty: true}}
	s.head.SetSeed(seed)
	s.item.SetSeed(seed)
	return s
}

func (s *splitter) lines(r *bufio.Reader) error {
	for begin := true; ; {
		text, err := r.ReadSlice('\n')
		if bytes.IndexByte(text, 0) >= 0 {
			return errBinary
		}
		if begin && len(text) > 0 {
			s.line(text)
		}
		s.add(text)
		begin = err == nil // the rest of a very long line begins nothing
		if errors.Is(err, io.EOF) {
			s.endDocument(s.offset)
			return s.err
		}
		if s.err != nil {
			return s.err
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return err
		}
	}
}

// add takes text into the hash of the part to which it belongs.
func (s *splitter) add(text []byte) {
	s.offset += int64(len(text))
	if s.state == inItems {
		s.item.Write(text)
	} else {
		s.head.Write(text)
	}
}

// line decides what begins with a line, given at least its first bytes.
func (s *splitter) line(text []byte) {
	if s.offset == 0 {
		text = s.skip(text, len(text)-len(bytes.TrimPrefix(text, []byte("\ufeff"))))
	}
	if isMarker(text) {
		s.endDocument(s.offset)
		text = s.skip(text, len("---"))
	}
	body := bytes.TrimLeft(text, " ")
	indent := len(text) - len(body)
	body = bytes.TrimRight(body, " \t\r\n")
	if len(body) == 0 || body[0] == '#' || s.doc.empty && indent == 0 && body[0] == '%' {
		return
	}
	if s.doc.empty {
		s.doc.empty, s.doc.flow = false, body[0] == '{'
	}
	s.content(body, indent)
}

// skip lets the document begin behind a mark.
func (s *splitter) skip(text []byte, n int) []byte {
	s.doc.start += int64(n)
	return text[n:]
}

func isMarker(text []byte) bool {
	if !bytes.HasPrefix(text, []byte("---")) && !bytes.HasPrefix(text, []byte("...")) {
		return false
	}
	return len(text) == 3 || bytes.IndexByte([]byte(" \t\r\n"), text[3]) >= 0
}

func (s *splitter) content(body []byte, indent int) {
	dash := body[0] == '-' && (len(body) == 1 || body[1] == ' ' || body[1] == '\t')
	switch {
	case s.state == beforeItems && indent == 0 && isItems(body):
		s.state = expectItems
	case s.state == expectItems && dash:
		s.state, s.indent = inItems, indent
		s.beginItem()
	case s.state == expectItems:
		s.state = afterItems
	case s.state == inItems && indent == s.indent && dash:
		s.endItem(s.offset)
		s.beginItem()
	case s.state == inItems && indent <= s.indent:
		s.endItem(s.offset)
		s.state = afterItems
	}
}

func isItems(body []byte) bool {
	rest, ok := bytes.CutPrefix(body, []byte("items:"))
	rest = bytes.TrimLeft(rest, " \t")
	return ok && (len(rest) == 0 || rest[0] == '#')
}

func (s *splitter) beginItem() {
	if len(s.doc.items) == maxItems {
		s.err = errItemCount
	}
	s.doc.items = append(s.doc.items, part{start: s.offset})
	s.item.Reset()
}

func (s *splitter) endItem(at int64) {
	last := &s.doc.items[len(s.doc.items)-1]
	last.end, last.hash = at, s.item.Sum64()
	s.doc.itemsEnd = at
}

func (s *splitter) endDocument(at int64) {
	if s.state == inItems {
		s.endItem(at)
	}
	if len(s.docs) == maxDocuments && !s.doc.empty {
		s.err = errDocuments
	}
	if !s.doc.empty {
		s.doc.end, s.doc.hash = at, s.head.Sum64()
		s.docs = append(s.docs, s.doc)
	}
	s.doc, s.state = document{part: part{start: at}, empty: true}, beforeItems
	s.head.Reset()
}

// splitJSON cuts a stretch of JSON into its top-level objects and the items of Lists.
func splitJSON(r io.ReaderAt, d document, seed maphash.Seed) ([]document, error) {
	j := jsonSplitter{
		Decoder: json.NewDecoder(bufio.NewReaderSize(io.NewSectionReader(r, d.start, d.end-d.start), 64<<10)),
		base:    d.start,
		seed:    seed,
	}
	var docs []document
	for j.More() {
		if len(docs) == maxDocuments {
			return nil, errDocuments
		}
		doc, err := j.object()
		if err != nil {
			return nil, err
		}
		docs = append(docs, doc)
	}
	if _, err := j.Token(); !errors.Is(err, io.EOF) {
		return nil, errNotJSON
	}
	return docs, nil
}

var errNotJSON = errors.New("not a sequence of JSON objects")

type jsonSplitter struct {
	*json.Decoder
	base int64
	seed maphash.Seed
}

func (j jsonSplitter) offset() int64 { return j.base + j.InputOffset() }

// open reads the next token, which must be the given delimiter.
func (j jsonSplitter) open(want json.Delim) error {
	if t, err := j.Token(); err != nil || t != want {
		return errors.Join(err, errNotJSON)
	}
	return nil
}

// object reads one JSON object, and cuts its field items, if there is one, into parts. The hash of the document covers
// the other fields: it changes only with the head.
func (j jsonSplitter) object() (document, error) {
	if err := j.open('{'); err != nil {
		return document{}, err
	}
	doc := document{part: part{start: j.offset() - 1}}
	var hash maphash.Hash
	hash.SetSeed(j.seed)
	for j.More() {
		key, err := j.Token()
		if err != nil {
			return doc, err
		}
		if key == "items" && doc.items != nil {
			return doc, errItems
		}
		if key == "items" {
			if err := j.items(&doc); err != nil {
				return doc, err
			}
			continue
		}
		value, err := j.value()
		if err != nil {
			return doc, err
		}
		hash.WriteString(key.(string))
		maphash.WriteComparable(&hash, value.hash)
	}
	_, err := j.Token()
	doc.end, doc.hash = j.offset(), hash.Sum64()
	return doc, err
}

func (j jsonSplitter) items(doc *document) error {
	if err := j.open('['); err != nil {
		return err
	}
	for j.More() {
		if len(doc.items) == maxItems {
			return errItemCount
		}
		item, err := j.value()
		if err != nil {
			return err
		}
		doc.items = append(doc.items, item)
	}
	_, err := j.Token()
	doc.itemsEnd = j.offset() - 1
	return err
}

// value reads any value.
func (j jsonSplitter) value() (part, error) {
	var text json.RawMessage
	if err := j.Decode(&text); err != nil {
		return part{}, err
	}
	end := j.offset()
	return part{start: end - int64(len(text)), end: end, hash: maphash.Bytes(j.seed, text)}, nil
}
