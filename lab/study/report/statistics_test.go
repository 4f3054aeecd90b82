package report

import (
	"fmt"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/study"
)

// turnsOf are rows of an experiment x with a figure y, of which more is worse: "contender: values of the rounds".
func turnsOf(lines ...string) *Statistics {
	r := &study.Result{
		Kernels: []study.Kernel{{Name: study.This}},
		Contenders: []study.Contender{
			{Name: "direct", Kind: study.Direct}, {Name: "again", Kind: study.Again},
			{Name: "a", Kind: study.Fairlead, Plane: "nftables"}, {Name: "b", Kind: study.Fairlead, Plane: "ebpf"},
		},
		Experiments: []study.Description{{Name: "x", Axis: "Services", Figures: []study.Figure{
			{Name: "y", Unit: study.Seconds, Better: study.Lower, Main: true},
		}}},
	}
	for _, line := range lines {
		who, values, _ := strings.Cut(line, ": ")
		name, at, _ := strings.Cut(who, "@")
		size := 0
		_, _ = fmt.Sscan(at, &size) // none is 0
		for i, value := range strings.Fields(values) {
			row := study.Row{Experiment: "x", Kernel: study.This, Size: size, Contender: name, Round: i + 1}
			v := 0.0
			if _, err := fmt.Sscan(value, &v); err != nil {
				row.Failed = value
			} else {
				row.Figures = study.Figures{"y": v}
			}
			r.Rows = append(r.Rows, row)
		}
	}
	return NewStatistics(r)
}

func TestComparisons(t *testing.T) {
	t.Parallel()
	const again = "again: 1.02 0.98 1.01 0.99 1.03 0.97 1.00"
	for _, test := range []struct{ name, direct, a, want string }{
		{"slower", "1 1 1 1 1 1 1", "2.0 2.1 1.9 2.0 2.0 2.1 1.9", "2.00 (1.90–2.10)"},
		{"within the bounds", "1 1 1 1 1 1 1", "1.1 0.9 1.0 1.1 0.9 1.0 1.0", "1.00 (0.90–1.10) ="},
		{"within what direct access differs by from itself", "1 1 1 1 1 1 1", "1.01 1.01 1.01 1.01 1.01 1.01 1.01",
			"1.01 (1.01–1.01) ="},
		{"the machine becomes slower meanwhile", "1 2 3 4 5 6 7", "2 4 6 8 10 12 14", "2.00 (2.00–2.00)"},
		{"a round failed", "1 1 1 1 1 1 1", "2 2 broken 2 2 2 2", "2.00 (2.00–2.00)"},
		{"few rounds", "1 1 1", "1.9 2.0 2.1", "2.00 (1.77–2.26)"},
		{"one round", "1", "2", "2.00 (?) ="},
	} {
		values := strings.Fields(strings.TrimPrefix(again, "again: "))
		direct := strings.Fields(test.direct)
		for i := range direct { // again differs from direct by as much in every case
			var x, y float64
			_, _ = fmt.Sscan(values[i], &x)
			_, _ = fmt.Sscan(direct[i], &y)
			values[i] = fmt.Sprint(x * y)
		}
		s := turnsOf("direct: "+test.direct, "again: "+strings.Join(values[:len(direct)], " "), "a: "+test.a)
		e, ok := s.estimate(turns{place{"x", study.This, "", 0}, "a"}, "y")
		if !ok || e.Direct == nil || e.Direct.String() != test.want {
			t.Errorf("%s: got %v, want %s", test.name, e.Direct, test.want)
		}
	}
}

func TestNoRatioOfNothing(t *testing.T) {
	t.Parallel()
	s := turnsOf("direct: 0 0 0", "a: 1 2 3")
	e, ok := s.estimate(turns{place{"x", study.This, "", 0}, "a"}, "y")
	if !ok || e.Value != 2 || e.Direct != nil {
		t.Errorf("got %+v", e)
	}
	if _, ok := s.estimate(turns{place{"x", study.This, "", 0}, "b"}, "y"); ok {
		t.Error("there is an estimate of nothing")
	}
}

func TestGrowth(t *testing.T) {
	t.Parallel()
	s := turnsOf(
		"a@10: 1.0 1.1 0.9", "a@100: 1.0 1.1 0.9", "a@1000: 1.0 1.1 0.9",
		"b@10: 1.0 1.1 0.9", "b@100: 10 11 9", "b@1000: 100 110 90")
	for who, want := range map[string]string{
		"a": "10 to 1000: 1.00 times, n^0.00 (−0.08 to 0.08), flat true, grows false",
		"b": "10 to 1000: 100 times, n^1.00 (0.92 to 1.08), flat false, grows true",
	} {
		g, ok := s.growth(place{experiment: "x", kernel: study.This}, who, "y")
		got := fmt.Sprintf("%d to %d: %s times, %s, flat %v, grows %v", g.From, g.To, times(g.Times), g, g.Flat(), g.Grows())
		if !ok || got != want {
			t.Errorf("%s: got %s, want %s", who, got, want)
		}
	}
}

func TestQuantities(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		unit  study.Unit
		value float64
		want  string
	}{
		{study.Seconds, 0, "0"}, {study.Seconds, 999.9e-9, "1 µs"}, {study.Seconds, 17.14e-6, "17.1 µs"},
		{study.Seconds, 1.5, "1.50 s"}, {study.Seconds, 5 * 3600, "5 h"}, {study.Bytes, 1 << 20, "1 MiB"},
		{study.Bytes, 1500, "1.46 KiB"}, {study.BitRate, 9.4e9, "9.40 Gbit/s"}, {study.PerSecond, 12345, "12,345/s"},
		{study.Share, 0.125, "12.5 %"}, {study.Count, 1234567, "1,234,567"}, {study.Count, 3, "3"}, {study.Count, 0, "0"},
		{"furlong", 1.5, "1.50 furlong"},
	} {
		if got := quantity(test.unit, test.value); got != test.want {
			t.Errorf("%v %q: got %q, want %q", test.value, test.unit, got, test.want)
		}
	}
}
