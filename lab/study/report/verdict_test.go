package report

import (
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/study"
)

// answers are those of a conclusion that has these words, one a line.
func answers(r *study.Result, words string) string {
	var lines []string
	for _, v := range NewStatistics(r).Verdicts() {
		if strings.Contains(v.Conclusion, words) {
			lines = append(lines, strings.TrimSuffix(string(v.Answer)+" "+v.judged(), " "))
		}
	}
	return strings.Join(lines, "\n")
}

// at multiplies a figure of a contender from a size on.
func at(r *study.Result, experiment, contender string, size int, times float64) *study.Result {
	for _, row := range r.Rows {
		if row.Experiment == experiment && row.Contender == contender && row.Size >= size {
			for name := range row.Figures {
				row.Figures[name] *= times
			}
		}
	}
	return r
}

// without has no rows of a contender.
func without(r *study.Result, contender string) *study.Result {
	r.Rows = slices.DeleteFunc(r.Rows, func(row study.Row) bool { return row.Contender == contender })
	return r
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	const peer, ipvsPeer = "kube-proxy iptables", "kube-proxy ipvs"
	for _, test := range []struct{ name, got, want string }{
		{"ahead below, behind above", answers(made(), "ahead of IPVS"),
			"holds kube-proxy, test kernel\ndoes not hold Fairlead, test kernel"},
		{"behind above only", answers(at(made(), "connect", peer, 0, 1.3), "ahead of IPVS"),
			"differs kube-proxy, test kernel\ndoes not hold Fairlead, test kernel"},
		{"rules cost something", answers(at(made(), "rules", peer, 200_000, 0.5), "200,000 rules"),
			"does not hold kube-proxy\nholds Fairlead"},
		{"updates grow", answers(made(), "an update takes iptables"), "holds kube-proxy\ndoes not hold Fairlead"},
		{"updates do not grow", answers(at(at(at(made(), "update", peer, 100, 0.31), "update", peer, 1000, 0.14),
			"update", peer, 10_000, 0.105), "an update takes iptables"), "does not hold kube-proxy\ndoes not hold Fairlead"},
		{"no IPVS was updated", answers(made(), "an update takes IPVS"), "undecided"},
		{"IPVS grows", answers(at(made(), "connect", ipvsPeer, 4000, 2), "IPVS is as fast"),
			"does not hold kube-proxy, test kernel\nholds Fairlead, test kernel"},
		{"schedulers", answers(at(at(made(), "schedulers", "ipvs sh", 0, 0.8), "schedulers", "ipvs sed", 0, 0.6),
			"source hashing"), "holds Fairlead, test kernel"},
		{"a scheduler is missing", answers(without(at(made(), "schedulers", "ipvs sh", 0, 0.8), "ipvs sed"),
			"source hashing"), "undecided"},
		{"bandwidth differs", answers(at(at(made(), "bandwidth", peer, 0, 0.5), "bandwidth", "kube-proxy nftables", 0, 0.5),
			"bulk throughput"), "does not hold kube-proxy\nholds Fairlead"},
	} {
		if test.got != test.want {
			t.Errorf("%s: got:\n%s\nwant:\n%s", test.name, test.got, test.want)
		}
	}
}

// Whatever is missing, each conclusion has a verdict that says so, and a report can be written.
func TestVerdictsOfParts(t *testing.T) {
	t.Parallel()
	for _, missing := range append([]string{"everything"}, names(made())...) {
		r := made()
		r.Rows = slices.DeleteFunc(r.Rows, func(row study.Row) bool {
			return missing == "everything" || row.Experiment == missing || row.Contender == missing
		})
		judged := map[string]bool{}
		for _, v := range NewStatistics(r).Verdicts() {
			judged[v.Conclusion] = true
			if v.Says == "" || v.Answer == "" {
				t.Errorf("without %s: %+v says nothing", missing, v)
			}
		}
		if len(judged) != len(conclusions()) {
			t.Errorf("without %s: %d conclusions of %d are judged", missing, len(judged), len(conclusions()))
		}
		if missing == "everything" || missing == "direct" {
			written(t, Text, r)
			written(t, HTML, r)
		}
	}
}

// names are those of experiments and contenders.
func names(r *study.Result) (all []string) {
	for _, d := range r.Experiments {
		all = append(all, d.Name)
	}
	for _, c := range r.Contenders {
		all = append(all, c.Name)
	}
	return all
}

func TestAdvice(t *testing.T) {
	t.Parallel()
	advice := func(r *study.Result) string {
		a := NewStatistics(r).Advice()
		var parts []string
		for _, c := range a.Changes {
			parts = append(parts, c.Plane+" from "+study.Number(c.Services))
		}
		return strings.Join(parts, ", ")
	}
	empty := made()
	empty.Rows = nil
	for _, test := range []struct{ name, got, want string }{
		{"one for all sizes", advice(made()), "nftables from 100"},
		{"another one from a size on", advice(at(made(), "lookup", "nftables", 10_000, 2)), "nftables from 100, ebpf from 10,000"},
		{"nothing was measured", advice(empty), ""},
	} {
		if test.got != test.want {
			t.Errorf("%s: got %q, want %q", test.name, test.got, test.want)
		}
	}
}
