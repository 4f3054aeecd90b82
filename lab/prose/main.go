// Prose counts words, sentences and breaches of style in documents and comments, and holds the counts against bounds.
//
//	documents ─► goldmark ─► words, sentences ─┐
//	                                           ├─► counts ─► .vale/budget.txt ─► exit status
//	documents, comments,
//	messages ─► vale ─► alerts ────────────────┘
//
// A count above its budget is an error. One below it asks for a smaller budget, so that the counts go down only.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	vale := flag.String("vale", "", "the program vale; without it prose counts words and sentences only")
	budget := flag.String("budget", ".vale/budget.txt", "file of the bounds")
	verbose := flag.Bool("files", false, "print the counts of each document, and their sentences")
	flag.Parse()
	over, err := run(*vale, *budget, *verbose)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(2)
	case over:
		os.Exit(1)
	}
}

func run(vale, budget string, verbose bool) (over bool, err error) {
	documents, err := readDocuments()
	if err != nil {
		return false, err
	}
	if verbose {
		for _, d := range documents {
			fmt.Printf("%-28s %6d words, %5d generated; sentences: median %2d, 95 %% %2d, longest %3d\n",
				d.name, d.words, d.generated, quantile(d.sentences, .5), quantile(d.sentences, .95), quantile(d.sentences, 1))
		}
	}
	counts := count(documents)
	if vale != "" {
		breaches, err := lint(vale, documents)
		if err != nil {
			return false, err
		}
		counts = append(counts, breaches...)
	}
	bounds, err := readBudget(budget)
	if err != nil {
		return false, err
	}
	return report(os.Stdout, counts, bounds), nil
}

// readDocuments reads those of docs and of the root.
func readDocuments() (all []document, err error) {
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			d, err := readDocument(name)
			if err != nil {
				return nil, err
			}
			all = append(all, d)
		}
	}
	return all, nil
}
