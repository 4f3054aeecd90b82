// Testreport says at the end of a run of tests what was skipped, what is wrong with that, and how many tests passed,
// failed and were skipped. It reads what go test -json, or gotestsum --jsonfile, has written.
//
//	go test -json ./... >tests.json ─► testreport tests.json ─► "N passed, N failed, N skipped", exit status
//	                                   testreport -table …    ─► packages and their seconds, in Markdown
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/lack"
)

func main() {
	table := flag.Bool("table", false, "print packages and their seconds as a table of Markdown, slowest first")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: testreport [-table] FILE...\n\nFILEs are the output of go test -json.")
		flag.PrintDefaults()
	}
	flag.Parse()
	r, err := readFiles(flag.Args())
	rows, bad := lack.List()
	if err := errors.Join(err, bad); err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(2)
	}
	if *table {
		r.table(os.Stdout)
	} else if !r.report(os.Stdout, rows) {
		os.Exit(1)
	}
}

func readFiles(names []string) (*run, error) {
	r := newRun()
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		if err := r.read(f); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return r, nil
}

// report prints what was skipped, what is wrong with that, and the counts; and reports whether all is well.
func (r *run) report(out io.Writer, rows []lack.Row) (ok bool) {
	slices.SortStableFunc(r.skipped, func(a, b skip) int {
		return cmp.Or(strings.Compare(a.pkg, b.pkg), strings.Compare(a.test, b.test))
	})
	var wrong []string
	for _, s := range r.skipped {
		fmt.Fprintf(out, "skipped: %s %s: %s\n", s.pkg, s.test, s.why())
		if what := s.wrong(rows); what != "" {
			wrong = append(wrong, fmt.Sprintf("WRONG: %s %s: %s", s.pkg, s.test, what))
		}
	}
	failed := r.failed()
	if r.passed+failed+len(r.skipped) == 0 {
		wrong = append(wrong, "WRONG: no test has run")
	}
	for _, line := range wrong {
		fmt.Fprintln(out, line)
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", r.passed, failed, len(r.skipped))
	return failed == 0 && len(wrong) == 0
}

func (s skip) why() string {
	if s.lack == "" {
		return "it does not say why as lack.Skip does"
	}
	return fmt.Sprintf("lacks %s: %s", s.lack, s.reason)
}

// wrong does not ask whether the machine explains the lack. lack.Skip has, where the test runs and with its rights.
func (s skip) wrong(rows []lack.Row) string {
	listed := func(r lack.Row) bool { return r.Allows(s.pkg, s.test, s.lack) }
	if !slices.ContainsFunc(rows, listed) {
		return "lab/lack/skips.txt does not list it with that lack"
	}
	return ""
}

// table prints the packages that took a second or longer, and what the others took together.
func (r *run) table(out io.Writer) {
	names := slices.Collect(maps.Keys(r.packages))
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(r.packages[b].seconds, r.packages[a].seconds), strings.Compare(a, b))
	})
	all, rest, others := 0., 0., 0
	fmt.Fprint(out, "| package | seconds |\n|---|---:|\n")
	for _, name := range names {
		p := r.packages[name]
		all += p.seconds
		switch {
		case !p.tested: // it has no tests
		case p.cached:
			fmt.Fprintf(out, "| `%s` | cached |\n", name)
		case p.seconds >= 1:
			fmt.Fprintf(out, "| `%s` | %.0f |\n", name, p.seconds)
		default:
			rest += p.seconds
			others++
		}
	}
	if others > 0 {
		fmt.Fprintf(out, "| others (%d) | %.0f |\n", others, rest)
	}
	fmt.Fprintf(out, "| all | %.0f |\n", all)
}
