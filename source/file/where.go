package file

import (
	"bytes"
	"io"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v2"
)

// lines counts the lines of a text. It is fast for offsets that grow.
type lines struct {
	of   io.ReaderAt
	at   int64
	line int // that begins at, or is interrupted by, at; counted from 0
}

// number is that of the line at an offset, counted from 1.
func (l *lines) number(offset int64) int {
	if offset < l.at {
		l.at, l.line = 0, 0
	}
	section := io.NewSectionReader(l.of, l.at, offset-l.at)
	buffer := make([]byte, 64<<10)
	for {
		n, err := section.Read(buffer)
		l.line += bytes.Count(buffer[:n], []byte("\n"))
		l.at += int64(n)
		if err != nil {
			return l.line + 1
		}
	}
}

// The parser tells the line of a value only when the value does not fit. So each value is asked for as what it is not:
//
//	spec:               spec ─ map ─► entries, each key as a list: "line 1: cannot unmarshal …"
//	  ports:            ports ─ map ─► …
//	  - {nane: http}    0 ─ list ─► elements
//	                    nane: line 3

// lineOf is the line of a value, counted from 1 in what was parsed; 0: unknown.
func lineOf(decode func(any) error) int {
	var isNot bool
	err := decode(&isNot)
	if err == nil || !strings.Contains(err.Error(), "line ") {
		err = decode(&[]struct{}{})
	}
	if err == nil {
		return 0
	}
	message := err.Error()
	n, _, _ := yamlLine(message[max(0, strings.Index(message, "line ")):])
	return n
}

// placedKey is a key, how it is written, and its line.
type placedKey struct {
	mapKey
	written string
	line    int
}

// UnmarshalYAML implements yaml.Unmarshaler.
func (k *placedKey) UnmarshalYAML(decode func(any) error) error {
	k.line = lineOf(decode)
	if err := decode(&k.written); err != nil {
		return errKey
	}
	return k.mapKey.UnmarshalYAML(decode)
}

// steps are the names and numbers of a path such as spec.ports[0].name or metadata.annotations[a.b/c].
func steps(path string) (all []string) {
	for path != "" {
		end := strings.IndexAny(path, ".[")
		switch {
		case end < 0:
			return append(all, path)
		case end > 0:
			all = append(all, path[:end])
		}
		if path = path[end:]; path[0] == '[' {
			inside, rest, _ := strings.Cut(path[1:], "]")
			all, path = append(all, inside), rest
			continue
		}
		path = path[1:]
	}
	return all
}

// tree parses a document or an item of a List, which is a sequence of one. Text that does not parse is empty.
func tree(text []byte) (root node) {
	var item []node
	if yaml.Unmarshal(text, &root) == nil && root.decode != nil && root.decode(&item) == nil && len(item) == 1 {
		return item[0]
	}
	return root
}

// at is a value in another one; what is missing is empty.
func (n *node) at(path []string) *node {
	for _, step := range path {
		next, _ := n.child(step)
		n = &next
	}
	return n
}

// line is that, counted from 1, on which a field is, or what contains it where it is missing.
func (n node) line(path []string) int {
	line := 1
	if n.decode != nil {
		line = max(line, lineOf(n.decode))
	}
	for _, step := range path {
		next, at := n.child(step)
		if at == 0 {
			break
		}
		n, line = next, at
	}
	return line
}

// child is an entry of a map or an element of a list, and its line; 0: there is none.
func (n *node) child(step string) (node, int) {
	var entries map[placedKey]node
	var elements []node
	switch {
	case n.decode == nil:
	case n.decode(&entries) == nil:
		for k, v := range entries {
			if k.text == step {
				return v, k.line
			}
		}
	case n.decode(&elements) == nil:
		if i, err := strconv.Atoi(step); err == nil && i >= 0 && i < len(elements) && elements[i].decode != nil {
			return elements[i], lineOf(elements[i].decode)
		}
	}
	return node{}, 0
}
