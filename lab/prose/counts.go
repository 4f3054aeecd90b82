package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// figure is one count by the name that the budget has for it.
type figure struct {
	name  string
	value int
}

func count(documents []document) []figure {
	var words, generated int
	var sentences []int
	for _, d := range documents {
		words += d.words
		generated += d.generated
		sentences = append(sentences, d.sentences...)
	}
	return []figure{
		{"words", words},
		{"generated-words", generated},
		{"sentence-median", quantile(sentences, .5)},
		{"sentence-95th", quantile(sentences, .95)},
	}
}

// alerts are vale's, by file.
type alerts map[string][]struct{ Check string }

// lint counts vale's alerts, those of documents, comments and messages apart: docs/Private, comments/Riddles. That of
// passives is their share, in percent of the sentences.
func lint(vale string, documents []document) ([]figure, error) {
	var names []string
	sentences := 0
	for _, d := range documents {
		names = append(names, d.name)
		sentences += len(d.sentences)
	}
	docs, err := check(vale, "docs/", names...)
	if err != nil {
		return nil, err
	}
	comments, err := check(vale, "comments/", "--glob=*.go", ".")
	if err != nil {
		return nil, err
	}
	messages, err := check(vale, "messages/", "docs/messages.txt")
	if err != nil {
		return nil, err
	}
	maps.Copy(docs, comments)
	maps.Copy(docs, messages)
	docs["docs/Passive"] = 100 * docs["docs/Passive"] / sentences
	var figures []figure
	for _, name := range slices.Sorted(maps.Keys(docs)) {
		figures = append(figures, figure{name, docs[name]})
	}
	return figures, nil
}

// check counts the alerts about some files by their rules.
func check(vale, kind string, arguments ...string) (map[string]int, error) {
	command := exec.Command(vale, append([]string{"--output=JSON", "--no-exit"}, arguments...)...)
	var complaint bytes.Buffer
	command.Stderr = &complaint
	text, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s%s", err, complaint.Bytes(), text)
	}
	var all alerts
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("vale: %w", err)
	}
	counts := map[string]int{}
	for _, file := range all {
		for _, a := range file {
			counts[kind+strings.TrimPrefix(a.Check, "Fairlead.")]++
		}
	}
	return counts, nil
}

// readBudget reads lines of a name and a number; what follows # is a comment.
func readBudget(name string) (map[string]int, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	bounds := map[string]int{}
	for line := range strings.Lines(string(text)) {
		line, _, _ := strings.Cut(line, "#")
		if strings.TrimSpace(line) == "" {
			continue
		}
		var key string
		var bound int
		if _, err := fmt.Sscan(line, &key, &bound); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", name, line, err)
		}
		bounds[key] = bound
	}
	return bounds, nil
}

// report prints all counts, and reports whether one exceeds its bound. A count without a bound has the bound 0.
func report(w io.Writer, counts []figure, bounds map[string]int) (over bool) {
	for _, c := range counts {
		bound, remark := bounds[c.name], ""
		switch {
		case c.name == "generated-words":
			fmt.Fprintf(w, "%-28s %6d\n", c.name, c.value)
			continue
		case c.value > bound:
			over, remark = true, "  too many"
		case c.value < bound && strings.Contains(c.name, "/"):
			remark = fmt.Sprintf("  lower the budget to %d", c.value)
		}
		fmt.Fprintf(w, "%-28s %6d of %6d%s\n", c.name, c.value, bound, remark)
	}
	return over
}
