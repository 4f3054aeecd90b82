package report

import (
	"fmt"
	"slices"
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
	const same, again = "1 1 1 1 1 1 1 1", "1.02 0.98 1.01 0.99 1.03 0.97 1.00 1.00"
	for _, test := range []struct{ name, direct, again, a, want string }{
		{"slower", same, again, "2.0 2.1 1.9 2.0 2.0 2.1 1.9 2.0", "2.00 (1.90–2.10)"},
		{"faster", same, again, "0.5 0.5 0.5 0.5 0.5 0.5 0.5 0.5", "0.50 (0.50–0.50)"},
		{"within the bounds", same, again, "1.1 0.9 1.0 1.1 0.9 1.0 1.0 1.0", "1.00 (0.90–1.10) ?"},
		{"no difference that matters", same, again, "1.01 1.01 1.02 1.01 1.01 1.01 1.01 1.04", "1.01 (1.01–1.04) ="},
		{"more, but that does not matter", same, again, "1.03 1.03 1.03 1.03 1.03 1.03 1.03 1.06", "1.03 (1.03–1.06) ?"},
		{"direct access differs as much from itself", same, "1.5 1.5 1.5 1.5 1.5 1.5 1.5 1.5",
			"1.4 1.4 1.4 1.4 1.4 1.4 1.4 1.4", "1.40 (1.40–1.40) ="},
		{"the machine becomes slower meanwhile", "1 2 3 4 5 6 7 8", "1 2 3 4 5 6 7 8", "2 4 6 8 10 12 14 16",
			"2.00 (2.00–2.00)"},
		{"a round failed", same + " 1", again + " 1", "2 2 broken 2 2 2 2 2 2", "2.00 (2.00–2.00)"},
		{"too few rounds", "1 1 1", "1 1 1", "1.9 2.0 2.1", "2.00 ?"},
	} {
		s := turnsOf("direct: "+test.direct, "again: "+test.again, "a: "+test.a)
		e, ok := s.estimate(turns{place{"x", study.This, "", 0}, "a"}, "y")
		if !ok || e.Direct == nil || e.Direct.String() != test.want {
			t.Errorf("%s: got %v, want %s", test.name, e.Direct, test.want)
		}
	}
}

// A decided comparison needs no more turns. Another one needs them of both sides.
func TestNeeds(t *testing.T) {
	t.Parallel()
	const few, same = "1 1 1", "1 1 1 1 1 1 1 1"
	for _, test := range []struct{ name, want, direct, again, a string }{
		{"too few rounds", "a 5, again 5, direct 5", few, few, few},
		{"alike", "", same, same, same},
		{"slower", "", same, same, "2 2 2 2 2 2 2 2"},
		{"undecided", "a 4, direct 4", same, same, "1.1 1.1 1.1 0.9 1.1 1.1 1.1 1.1"},
		{"it may be 0", "a 2, direct 2", "0 0", "0 0 0", "0"},
		{"it fails", "a 2, direct 2", same, same, "broken"},
	} {
		var got []string
		for at, n := range Needs(turnsOf("direct: "+test.direct, "again: "+test.again, "a: "+test.a).Result) {
			got = append(got, fmt.Sprintf("%s %d", at.Contender, n.Rounds))
		}
		slices.Sort(got)
		if text := strings.Join(got, ", "); text != test.want {
			t.Errorf("%s: it needs %q, want %q", test.name, text, test.want)
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
	const one, hundred = ": 1.0 1.1 0.9 1.0 1.0 1.1 0.9 1.0", ": 100 100 100 100 100 110 90 100"
	s := turnsOf("a@10"+one, "a@100: 5", "a@1000"+one, "b@10"+one, "b@1000"+hundred)
	for who, want := range map[string]string{
		"a": "10 to 1000: 1.00 times, n^0.00 (0.00 to 0.00), flat true, grows false",
		"b": "10 to 1000: 100 times, n^1.00 (0.98 to 1.02), flat false, grows true",
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
