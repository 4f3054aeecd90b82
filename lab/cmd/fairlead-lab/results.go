package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/study"
	studyreport "fairlead.dev/fairlead/lab/study/report"
	"fairlead.dev/fairlead/lab/testbed"
)

func benchReportCommand() *cobra.Command {
	var output string
	var schema bool
	c := &cobra.Command{
		Use:   "report DIRECTORY|RESULT.JSON",
		Short: "write the reports of a run again, and print one",
		Long: "report reads the result of a run, of this machine or another one, writes report.md, report.html and\n" +
			"bench.txt (for benchstat) beside it, or into --output, and prints a summary.",
		Example: "  fairlead bench report fairlead-bench\n  fairlead bench report result.json --output /tmp\n" +
			"  fairlead bench report --schema",
		Args: cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			switch {
			case schema:
				_, err := io.WriteString(os.Stdout, study.Schema())
				return cli.Failed(err)
			case len(args) == 0:
				return cli.Misused(errors.New("which run? Name its directory, or its result.json"))
			}
			r, file, err := readResult(args[0])
			if err != nil {
				return cli.Misused(err)
			}
			if output == "" {
				output = filepath.Dir(file)
			}
			if err := writeReports(r, output); err != nil {
				return cli.Failed(err)
			}
			return cli.Failed(studyreport.Text(os.Stdout, r))
		},
	}
	c.Flags().StringVar(&output, "output", "", "directory for the reports (default: where the result is)")
	c.Flags().BoolVar(&schema, "schema", false, "print the JSON schema of result.json, and do nothing")
	return c
}

// readResult reads a result, or that of a run's directory.
func readResult(path string) (r *study.Result, file string, err error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, "result.json")
	}
	r, err = study.Read(path)
	return r, path, err
}

func benchCompareCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "compare BEFORE AFTER",
		Short: "say what has changed between two runs",
		Long: "compare holds a run (its directory, or the result.json) against an earlier one: before and after another\n" +
			"kernel, version or configuration. Figures relative to direct access in the same rounds are compared between\n" +
			"machines, too; the others only on the same one. Exit status 1: something is worse.",
		Example: "  fairlead bench compare before/ after/\n  fairlead bench compare a.json b.json -o json",
		Args:    cobra.ExactArgs(2),
		RunE:    func(_ *cobra.Command, args []string) error { return compareResults(args[0], args[1], format) },
	}
	c.Flags().StringVarP(&format, "format", "o", "text", "text, json or markdown")
	return c
}

func compareResults(before, after, format string) error {
	write := map[string]func(*studyreport.Changes, io.Writer) error{
		"text": (*studyreport.Changes).Text, "json": (*studyreport.Changes).JSON, "markdown": (*studyreport.Changes).Markdown,
	}[format]
	if write == nil {
		return cli.Misused(fmt.Errorf("-o: %q is none of text, json, markdown", format))
	}
	a, _, err := readResult(before)
	if err != nil {
		return cli.Misused(err)
	}
	b, _, err := readResult(after)
	if err != nil {
		return cli.Misused(err)
	}
	changes, err := studyreport.Compare(a, b)
	if err != nil {
		return cli.Failed(err)
	}
	if err := write(changes, os.Stdout); err != nil {
		return cli.Failed(err)
	}
	if slices.ContainsFunc(changes.Differences, func(d studyreport.Difference) bool { return d.Outcome == "worse" }) {
		return cli.Exit(cli.ExitFound, nil)
	}
	return nil
}

// writeReports writes those that are files.
func writeReports(r *study.Result, dir string) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, file := range []struct {
		name  string
		write func(io.Writer, *study.Result) error
	}{
		{"report.md", studyreport.Markdown}, {"report.html", studyreport.HTML}, {"bench.txt", studyreport.Benchmarks},
	} {
		var text bytes.Buffer
		if err := file.write(&text, r); err != nil {
			return fmt.Errorf("%s: %w", file.name, err)
		}
		err = errors.Join(err, testbed.ReplaceFile(filepath.Join(dir, file.name), text.Bytes(), 0o644))
	}
	return err
}
