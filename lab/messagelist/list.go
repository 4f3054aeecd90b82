package main

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

const head = `Every text of the agent that a person can read, by package. A verb such as %s stands for what differs.
Written by "go generate ./docs". Review a change of this file as one of a document.
error, warn, info, debug: lines of the log; log: the level differs. failure: an error, or a part of one.

`

// kinds are the sorts of texts, in the order in which a package lists them.
var kinds = []string{"error", "warn", "info", "debug", "log", "event", "problem", "failure", "print", "help", "text"}

// message is one text of a package.
type message struct {
	pkg, text string
	keys      string // of a line of the log
}

// list has each message once, with the use that says best where it is seen.
type list struct {
	messages map[message]use
	keys     map[string]bool // of all lines of the log
}

var (
	verb = regexp.MustCompile(`%[-+# 0-9.\[\]]*[a-zA-Z]`)
	// rule begins an argument of iptables.
	rule = regexp.MustCompile(`^(%s)?-[a-z] `)
)

// add lists a text, if a person would call it one.
func (l *list) add(pkg, text string, u use) {
	least := 1
	if u.part {
		least = 2
	}
	if words(text) < least || rule.MatchString(text) {
		return
	}
	m := message{pkg, text, u.keys}
	if before, ok := l.messages[m]; !ok || u.compare(before) < 0 {
		l.messages[m] = u
	}
}

// words counts what has letters in it. Verbs count where there are letters elsewhere.
func words(text string) (n int) {
	if !strings.ContainsFunc(verb.ReplaceAllString(text, ""), unicode.IsLetter) {
		return 0
	}
	for _, field := range strings.Fields(text) {
		if strings.ContainsFunc(field, unicode.IsLetter) {
			n++
		}
	}
	return n
}

// compare prefers the use at the text itself, and then the one that is listed first.
func (u use) compare(other use) int {
	if u.far != other.far {
		return cmp.Compare(btoi(u.far), btoi(other.far))
	}
	return slices.Index(kinds, u.kind) - slices.Index(kinds, other.kind)
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (l *list) String() string {
	var out strings.Builder
	out.WriteString(head)
	all := slices.SortedFunc(maps.Keys(l.messages), func(a, b message) int {
		kind := func(m message) int { return slices.Index(kinds, l.messages[m].kind) }
		return cmp.Or(cmp.Compare(a.pkg, b.pkg), kind(a)-kind(b), cmp.Compare(a.text, b.text), cmp.Compare(a.keys, b.keys))
	})
	pkg := ""
	for _, m := range all {
		if m.pkg != pkg {
			if pkg != "" {
				out.WriteString("\n")
			}
			pkg = m.pkg
			out.WriteString(pkg + "\n")
		}
		fmt.Fprintf(&out, "  %-9s%s\n", l.messages[m].kind, m.line())
	}
	return out.String()
}

// line is a text on one line, unless it has several; then those after the first one are indented below it.
func (m message) line() string {
	text := strings.ReplaceAll(strings.Trim(m.text, "\n"), "\n", "\n           ")
	if m.keys != "" {
		text += "   keys: " + m.keys
	}
	return text
}
