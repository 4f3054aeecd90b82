package main

import (
	"regexp"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/docs"
)

// topics are documents that "fairlead help" prints: commands that do nothing, to which cobra gives a list of their own.
func topics() []*cobra.Command {
	return []*cobra.Command{
		{Use: "symptoms", Short: "something is wrong: what to type, what it shows, what to do", Long: plain(docs.Symptoms)},
		{Use: "modes", Short: "which mode suits this node, and why", Long: plain(docs.Modes)},
		{Use: "glossary", Short: "the terms in messages, metrics and documents", Long: plain(docs.Glossary)},
	}
}

// plain is a document for a terminal: links are their text, tables have columns, and diagrams are left out.
func plain(markdown string) string {
	markdown = regexp.MustCompile("(?ms)^```dot\n.*?^```\n\n?").ReplaceAllString(markdown, "")
	markdown = regexp.MustCompile(`\[([^\]]*)\]\([^)\s]*\)`).ReplaceAllString(markdown, "$1")
	var out strings.Builder
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	code := false
	for line := range strings.Lines(markdown) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
			continue
		}
		if !code {
			line = inline(line)
		}
		switch {
		case code:
			line = "    " + line
		case strings.HasPrefix(line, "|"):
			if line = row(line); line == "" {
				continue
			}
		default:
			_ = table.Flush() // the lines of a table end here: columns of the next one are its own
		}
		_, _ = table.Write([]byte(line + "\n"))
	}
	_ = table.Flush()
	return strings.TrimSpace(out.String())
}

// inline takes the marks of Markdown out of a line. Commands keep theirs, by which they are told from words.
func inline(line string) string {
	line = strings.ReplaceAll(line, "**", "")
	if title := strings.TrimLeft(line, "#"); title != line {
		return strings.ToUpper(strings.TrimSpace(title))
	}
	return line
}

// row is a row of a table with a tab after each cell; that between head and body is empty.
func row(line string) string {
	if strings.Trim(line, "|-: ") == "" {
		return ""
	}
	cells := strings.Split(strings.Trim(line, "| "), " | ")
	return strings.Join(cells, "\t")
}
