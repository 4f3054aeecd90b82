package said_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"fairlead.dev/fairlead/said"
)

// refusals is the error of a Sync that refuses so many rows.
func refusals(n int) error {
	var errs []error
	for i := range n {
		errs = append(errs, fmt.Errorf("frontend 10.96.0.1:%d: no slots are left", i))
	}
	return fmt.Errorf("program the data plane: %w", errors.Join(errs...))
}

func TestBrief(t *testing.T) {
	long := strings.Repeat("é", said.MaxText)
	for name, c := range map[string]struct{ text, want string }{
		"empty":       {"", ""},
		"one":         {"no", "no"},
		"a few":       {"a\nb\nc\nd\ne", "a\nb\nc\nd\ne"},
		"one more":    {"a\nb\nc\nd\ne\nf", "a\nb\nc\nd\ne\nand 1 more"},
		"many":        {"a\nb\nc\nd\ne" + strings.Repeat("\nx", 1234), "a\nb\nc\nd\ne\nand 1234 more"},
		"just fits":   {strings.Repeat("x", said.MaxText), strings.Repeat("x", said.MaxText)},
		"long line":   {long, strings.Repeat("é", 460) + "… (1080 bytes more)"},
		"long lines":  {"a\n" + long + "\nb", "a\nand 2 more"},
		"long, first": {long + "\nb", strings.Repeat("é", 460) + "… (1080 bytes more)\nand 1 more"},
	} {
		if got := said.Brief(c.text); got != c.want || len(got) > said.MaxText {
			t.Errorf("%s: %d bytes: %q, want %q", name, len(got), got, c.want)
		}
	}
}

func TestList(t *testing.T) {
	for text, names := range map[string][]string{
		"":                         nil,
		"a, b":                     {"a", "b"},
		"a, b, c, d, e and 1 more": {"a", "b", "c", "d", "e", "f"},
	} {
		if got := said.List(names); got != text {
			t.Errorf("%q, want %q", got, text)
		}
	}
}

// However long what is logged is, the line is short, and names the first ones.
func TestBounded(t *testing.T) {
	const most = 2 * said.MaxText
	names := strings.Split(strings.Repeat("web ", 10_000), " ")
	long := strings.Repeat("x", 1<<20)
	type pointer struct{ error }
	for name, c := range map[string]struct {
		say  func(*slog.Logger)
		want []string
	}{
		"error": {func(l *slog.Logger) { l.Error("failed", "error", refusals(10_000)) },
			[]string{"failed", "program the data plane: frontend 10.96.0.1:0: no slots", "10.96.0.1:4", "and 9995 more"}},
		"message": {func(l *slog.Logger) { l.Warn(refusals(10_000).Error()) }, []string{"10.96.0.1:4", "and 9995 more"}},
		"string":  {func(l *slog.Logger) { l.Warn("a", "b", long) }, []string{"bytes more"}},
		"names":   {func(l *slog.Logger) { l.Warn("a", "names", names) }, []string{"web, web and 9996 more"}},
		"map":     {func(l *slog.Logger) { l.Warn("a", "b", map[string]string{"c": long}) }, []string{"bytes more"}},
		"with":    {func(l *slog.Logger) { l.With("error", refusals(100)).WithGroup("g").Warn("a") }, []string{"and 95 more"}},
		"group":   {func(l *slog.Logger) { l.Warn("a", slog.Group("g", "error", refusals(100))) }, []string{"and 95 more"}},
		"pointer": {func(l *slog.Logger) { l.Warn("a", "error", (*pointer)(nil)) }, []string{"nil"}},
		"short":   {func(l *slog.Logger) { l.Warn("a", "n", 1, "names", []string{"b"}) }, []string{"a", "1", "b"}},
	} {
		for format, handler := range map[string]func(*bytes.Buffer) slog.Handler{
			"text": func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) },
			"json": func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) },
		} {
			var out bytes.Buffer
			c.say(slog.New(said.Bounded(handler(&out))))
			if out.Len() > most || format == "json" && !json.Valid(out.Bytes()) {
				t.Errorf("%s as %s: a line of %d bytes: %.100s", name, format, out.Len(), &out)
			}
			for _, w := range c.want {
				if !strings.Contains(strings.ReplaceAll(out.String(), "null", "nil"), w) {
					t.Errorf("%s as %s: %q is not in %s", name, format, w, &out)
				}
			}
		}
	}
}
