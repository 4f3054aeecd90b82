package report

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/study"
)

// slower multiplies a figure of a contender.
func slower(r *study.Result, experiment, contender, figure string, times float64) *study.Result {
	for _, row := range r.Rows {
		if _, ok := row.Figures[figure]; ok && row.Experiment == experiment && (contender == "" || row.Contender == contender) {
			row.Figures[figure] *= times
		}
	}
	return r
}

// lost has a contender lose connections.
func lost(r *study.Result, contender string, n float64) *study.Result {
	for _, row := range r.Rows {
		if row.Experiment == "rolling" && row.Contender == contender && row.Failed == "" {
			row.Figures["lost"] = n
		}
	}
	return r
}

// outcomes are those of figures, but for what is the same.
func outcomes(t *testing.T, a, b *study.Result) string {
	t.Helper()
	c, err := Compare(a, b)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, d := range c.changed() {
		lines = append(lines, d.place()+" "+d.Figure+" "+d.Contender+": "+d.Outcome)
	}
	return strings.Join(lines, "\n")
}

func TestCompare(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ name, want, got string }{
		{"the same", "", outcomes(t, made(), made())},
		{"one contender is slower", "http duration p95 ebpf: worse",
			outcomes(t, made(), slower(made(), "http", "ebpf", "duration p95", 1.3))},
		{"it answers more", "http requests ebpf: better",
			outcomes(t, made(), slower(made(), "http", "ebpf", "requests", 1.3))},
		{"connections are lost", "rolling, short connections lost nftables: worse",
			outcomes(t, made(), lost(made(), "nftables", 3))},
		{"the machine is slower, and so is direct access", "",
			outcomes(t, made(), slower(made(), "http", "", "duration p95", 3))},
	} {
		if test.got != test.want {
			t.Errorf("%s: got:\n%s\nwant:\n%s", test.name, test.got, test.want)
		}
	}
}

func TestCompareOfOtherMachines(t *testing.T) {
	t.Parallel()
	other := made()
	other.Kernels[0].CPU = "another one"
	c, err := Compare(made(), other)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range c.Differences {
		if d.Kernel == study.This && !d.Relative {
			t.Errorf("%s %s of %s was compared without direct access", d.place(), d.Figure, d.Contender)
		}
	}
	if len(c.Notes) != 1 || !strings.HasPrefix(c.Notes[0], "this kernel differs") {
		t.Errorf("notes: %q", c.Notes)
	}
}

func TestCompareRefuses(t *testing.T) {
	t.Parallel()
	only := func(kernel string) *study.Result {
		r, rows := made(), []study.Row(nil)
		for _, row := range r.Rows {
			if row.Kernel == kernel {
				rows = append(rows, row)
			}
		}
		r.Rows = rows
		return r
	}
	_, err := Compare(only(study.This), only(study.Test))
	const want = "figures of this kernel and of test kernel are never compared: measure both on kernels of the same kind"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestCompareOutputs(t *testing.T) {
	t.Parallel()
	c, err := Compare(made(), slower(made(), "http", "ebpf", "duration p95", 1.3))
	if err != nil {
		t.Fatal(err)
	}
	var text, markdown, raw bytes.Buffer
	if err := c.Text(&text); err != nil {
		t.Fatal(err)
	}
	if err := c.Markdown(&markdown); err != nil {
		t.Fatal(err)
	}
	if err := c.JSON(&raw); err != nil {
		t.Fatal(err)
	}
	golden(t, "compare.txt", text.Bytes())
	golden(t, "compare.md", markdown.Bytes())
	var again Changes
	if err := json.Unmarshal(raw.Bytes(), &again); err != nil || len(again.Differences) != len(c.Differences) {
		t.Errorf("%d differences of %d are in the JSON, %v", len(again.Differences), len(c.Differences), err)
	}
}
