package file

import (
	"bytes"
	"io"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// lines counts the lines of a text. It is fast for offsets that grow.
type lines struct {
	of   io.ReaderAt
	at   int64
	line int // that begins at, or is interrupted by, at; counted from 0

	buffer []byte
	ahead  []byte // the part of buffer that begins at at
}

// number is that of the line at an offset, counted from 1.
func (l *lines) number(offset int64) int {
	if offset < l.at {
		l.at, l.line, l.ahead = 0, 0, nil
	}
	if l.buffer == nil {
		l.buffer = make([]byte, 64<<10)
	}
	for {
		n := min(int64(len(l.ahead)), offset-l.at)
		l.line += bytes.Count(l.ahead[:n], []byte("\n"))
		l.at, l.ahead = l.at+n, l.ahead[n:]
		if l.at == offset {
			return l.line + 1
		}
		read, _ := l.of.ReadAt(l.buffer, l.at)
		if l.ahead = l.buffer[:read]; read == 0 {
			return l.line + 1
		}
	}
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

// tree parses a document, or an item of a List, which is a sequence of one. Text that does not parse is empty.
func tree(text []byte) *yaml.Node {
	var root yaml.Node
	if yaml.Unmarshal(text, &root) != nil || len(root.Content) == 0 {
		return &yaml.Node{}
	}
	n := root.Content[0]
	if n.Kind == yaml.SequenceNode && len(n.Content) == 1 {
		return n.Content[0]
	}
	return n
}

// find is the value at a path, and its line, counted from 1; where it is missing, what would contain it.
func find(n *yaml.Node, path []string) (at *yaml.Node, line int, whole bool) {
	line = max(n.Line, 1)
	for _, step := range path {
		next, of := child(n, step)
		if next == nil {
			return n, line, false
		}
		n, line = next, of
	}
	return n, line, true
}

// child is an entry of a map or an element of a list, and its line; nil: there is none.
func child(n *yaml.Node, step string) (*yaml.Node, int) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i < len(n.Content); i += 2 {
			if key := n.Content[i]; keyText(key) == step {
				return n.Content[i+1], key.Line
			}
		}
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(step); err == nil && i >= 0 && i < len(n.Content) {
			return n.Content[i], n.Content[i].Line
		}
	}
	return nil, 0
}

// keyText is a key as the object has it.
func keyText(key *yaml.Node) string {
	if isTruth(key) {
		return strconv.FormatBool(slices.Contains([]string{"y", "yes", "on"}, strings.ToLower(key.Value)))
	}
	return key.Value
}

// isTruth reports whether a value is a word that YAML 1.1 takes for true or false though it looks like text.
func isTruth(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && n.Style == 0 && isTruthWord(n.Value)
}

// truthWords finds these words, except behind aliases.
func truthWords(n *yaml.Node, path string, found func(field, word string, key bool)) {
	switch n.Kind {
	case yaml.ScalarNode:
		if isTruth(n) {
			found(path, n.Value, false)
		}
	case yaml.MappingNode:
		for i := 0; i < len(n.Content); i += 2 {
			key := n.Content[i]
			at := join(path, keyText(key))
			if isTruth(key) {
				found(at, key.Value, true)
			}
			truthWords(n.Content[i+1], at, found)
		}
	case yaml.SequenceNode:
		for i, element := range n.Content {
			truthWords(element, path+"["+strconv.Itoa(i)+"]", found)
		}
	}
}
