package report

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/bench"
	"fairlead.dev/fairlead/lab/study"
)

// claims are all sentences of a report that say something of the result: the advice, what is said of published
// conclusions, and of each experiment.
func claims(r *study.Result) (advice, others []string) {
	s := NewStatistics(r)
	for _, c := range s.sections() {
		others = append(others, c.Sentences...)
		for _, v := range c.Verdicts {
			if v.Answer != Unknown {
				others = append(others, v.Says, v.Why)
			}
		}
	}
	return s.Decision(), others
}

// checker holds sentences against the rows of a result, by nothing but the rows.
type checker struct {
	*study.Result
	ratios     map[string]bool // each median of ratios of two contenders, sizes or cases
	quantities map[string]bool // each median of a contender's main figure, with its unit
	sizes      map[int]bool
	names      []string
	cases      []string
}

func newChecker(r *study.Result) checker {
	c := checker{Result: r, ratios: map[string]bool{}, quantities: map[string]bool{}, sizes: map[int]bool{}}
	main, direct := map[string]study.Figure{}, ""
	for _, d := range r.Experiments {
		main[d.Name], _ = mainFigure(d)
	}
	for _, o := range r.Contenders {
		if o.Kind == study.Direct {
			direct = o.Name
		}
	}
	values, runs := map[turns]map[int]float64{}, map[place][]turns{} // of an experiment all of a kernel
	for _, row := range r.Rows {
		at := place{experiment: row.Experiment, kernel: row.Kernel}
		t := turns{place{row.Experiment, row.Kernel, row.Case, row.Size}, row.Contender}
		v, ok := row.Figures[main[row.Experiment].Name]
		if row.Failed != "" || !ok {
			continue
		}
		c.sizes[row.Size] = true
		if !slices.Contains(c.names, row.Contender) {
			c.names = append(c.names, row.Contender)
		}
		if row.Case != "" && !slices.Contains(c.cases, row.Case) {
			c.cases = append(c.cases, row.Case)
		}
		if values[t] == nil {
			values[t] = map[int]float64{}
			runs[at] = append(runs[at], t)
		}
		values[t][row.Round] = v
	}
	for _, all := range runs {
		relative := make([]bench.Series, len(all)) // to direct access in the same rounds, if there was such
		for i, a := range all {
			c.quantities[quantity(main[a.experiment].Unit, series(values[a]).Median())] = true
			relative[i] = series(values[a])
			if control := values[turns{a.place, direct}]; control != nil {
				x, y := paired(values[a], control)
				for i := range x {
					x[i] /= y[i]
				}
				relative[i] = x
			}
		}
		for i, a := range all {
			for j, b := range all {
				if a.of != b.of && a.contender != b.contender {
					continue
				}
				n := min(len(relative[i]), len(relative[j]))
				if c.add(relative[i][:n], relative[j][:n]); a.place == b.place {
					c.add(paired(values[a], values[b]))
				}
			}
		}
	}
	return c
}

// add keeps the median of ratios, as a report may write it.
func (c checker) add(x, y bench.Series) {
	var ratios bench.Series
	for i := range x {
		ratios = append(ratios, x[i]/y[i])
	}
	if len(ratios) == 0 {
		return
	}
	c.ratios[times(ratios.Median())], c.ratios[times(1/ratios.Median())] = true, true
	c.ratios[times(math.Exp(bench.Series(logRatios(x, y)).Median()))] = true
	c.ratios[times(math.Exp(bench.Series(logRatios(y, x)).Median()))] = true
}

var (
	ratioPattern    = regexp.MustCompile(`(?:^|[^\w.,^])(\d+(?:\.\d+)?) \(\d`)
	sizePattern     = regexp.MustCompile(`([\d,]+) (?:Services|rules)`)
	quantityPattern = regexp.MustCompile(`(?:^|[^\w.,])([\d,]+(?:\.\d+)? (?:ns|µs|ms|s|min|h|[KMG]iB|[kMG]?bit/s))\b`)
)

// faults says what of a sentence the rows do not have: contenders, sizes, ratios, and figures with a unit.
func (c checker) faults(sentence string) (all []string) {
	told, _, _ := strings.Cut(sentence, "; not considered: ")
	for _, of := range c.cases {
		told = strings.ReplaceAll(told, of, "")
	}
	for _, o := range made().Contenders {
		if strings.Contains(o.Name, " ") && strings.Contains(told, o.Name) && !slices.Contains(c.names, o.Name) {
			all = append(all, o.Name+" was not measured")
		}
	}
	for _, m := range sizePattern.FindAllStringSubmatch(told, -1) {
		n := 0
		_, _ = fmt.Sscan(strings.ReplaceAll(m[1], ",", ""), &n)
		if !c.sizes[n] {
			all = append(all, m[0]+" were not measured")
		}
	}
	for _, m := range ratioPattern.FindAllStringSubmatch(told, -1) {
		if !c.ratios[m[1]] {
			all = append(all, m[1]+" is no ratio of two contenders, sizes or cases")
		}
	}
	for _, m := range quantityPattern.FindAllStringSubmatch(told, -1) {
		if !c.quantities[m[1]] {
			all = append(all, m[1]+" is the median of no figure")
		}
	}
	return all
}

// Each sentence follows from the rows, whatever rows there are.
func TestClaims(t *testing.T) {
	t.Parallel()
	full, err := study.Read(filepath.Join(published, "result.json"))
	if err != nil {
		t.Fatal(err)
	}
	results := map[string]*study.Result{"made": made(), "published": full}
	for _, name := range names(made()) {
		results["without "+name] = without(made(), name)
	}
	for name, r := range results {
		c := newChecker(r)
		advice, others := claims(r)
		for _, sentence := range slices.Concat(advice, others) {
			if faults := c.faults(sentence); len(faults) > 0 {
				t.Errorf("%s: %s\n%s", name, sentence, strings.Join(faults, "\n"))
			}
		}
	}
}

// A plane that was not measured is not spoken of, but to say so.
func TestClaims_ofAPlaneThatIsMissing(t *testing.T) {
	t.Parallel()
	for _, plane := range []string{"ebpf", "nftables"} {
		r := without(made(), plane)
		for _, sentence := range NewStatistics(r).Decision() {
			told, _, _ := strings.Cut(sentence, "; not considered: ")
			if regexp.MustCompile(`(?:^|[^-\w] )` + plane + `\b`).MatchString(told) {
				t.Errorf("%s was not measured: %s", plane, sentence)
			}
		}
	}
}

// Advice follows the figures: where two planes swap theirs, it changes.
func TestClaims_ofSwappedFigures(t *testing.T) {
	t.Parallel()
	r := made()
	for i, row := range r.Rows {
		r.Rows[i].Contender = other(row.Contender, "iptables", "nftables")
	}
	before, after := NewStatistics(made()).Decision(), NewStatistics(r).Decision()
	if strings.Contains(strings.Join(before, " "), "iptables") == strings.Contains(strings.Join(after, " "), "iptables") {
		t.Errorf("figures are swapped, and the advice is the same:\n%s\n%s", before, after)
	}
}

// other is the other one of two.
func other(name, a, b string) string {
	switch name {
	case a:
		return b
	case b:
		return a
	}
	return name
}

// Where the rounds differ more than the contenders, hardly anything is claimed: bounds of 95 % are wrong now and then.
func TestClaims_ofNoise(t *testing.T) {
	t.Parallel()
	const tries = 20
	ahead, marks := 0, 0
	for seed := range uint64(tries) {
		random := rand.New(rand.NewPCG(seed, 1))
		r := made()
		for _, row := range r.Rows {
			for _, name := range slices.Sorted(maps.Keys(row.Figures)) {
				row.Figures[name] *= math.Exp(1.5 * random.NormFloat64())
			}
		}
		s := NewStatistics(r)
		ahead += one(!strings.Contains(s.Decision()[1], "no difference between the two was seen"))
		for _, row := range s.scoreboard().Kernels[0].Rows {
			marks += one(row.Cells[0].Mark == "best")
		}
	}
	if ahead > tries/2 || marks > tries/2 {
		t.Errorf("the figures are noise, and of %d times %d are ahead of others; %d are the best", tries, ahead, marks)
	}
}

// A scoreboard has the medians of the rows, and marks the best and the worst.
func TestScoreboard(t *testing.T) {
	t.Parallel()
	golden(t, "board.md", []byte(boardText(made())))
	r := without(made(), "ebpf")
	if text := boardText(r); strings.Contains(text, "ebpf") {
		t.Errorf("ebpf was not measured:\n%s", text)
	}
	r.Rows = slices.DeleteFunc(r.Rows, func(row study.Row) bool { return row.Experiment == "bandwidth" })
	if text := boardText(r); strings.Contains(text, "Bandwidth") {
		t.Errorf("bandwidth was not measured:\n%s", text)
	}
	r.Rows = slices.DeleteFunc(r.Rows, func(row study.Row) bool { return row.Contender == "nftables" && row.Round > 3 })
	for _, row := range NewStatistics(r).scoreboard().Kernels[0].Rows {
		if row.Cells[0].Mark != "" {
			t.Errorf("nftables has three rounds, and %s is the %s", row.Name, row.Cells[0].Mark)
		}
	}
}

func boardText(r *study.Result) string {
	var text strings.Builder
	NewStatistics(r).scoreboard().table(score.String).markdown(&text)
	return text.String()
}

// A cause is told where a vote is against a conclusion, and nowhere else.
func TestVerdicts_why(t *testing.T) {
	t.Parallel()
	why := func(r *study.Result, words, of string) string {
		for _, v := range NewStatistics(r).Verdicts() {
			if strings.Contains(v.Conclusion, words) && v.Of == of {
				return v.Why
			}
		}
		return "none"
	}
	slower := func(name string) *study.Result {
		r := made()
		for i, row := range r.Rows {
			if row.Experiment == "schedulers" {
				r.Rows[i].Case = name
			}
		}
		return r
	}
	userspace := made() // the fixture has none
	for i, c := range userspace.Contenders {
		if c.Name == "ebpf" {
			userspace.Contenders[i].Plane = "userspace"
		}
	}
	const copies = "Why: userspace copies each byte through its process."
	for _, test := range []struct{ got, want string }{
		{why(made(), "bulk throughput", "Fairlead"), ""},
		{why(at(userspace, "bandwidth", "ebpf", 0, 0.5), "bulk throughput", "Fairlead"), copies},
		{why(at(made(), "bandwidth", "nftables", 0, 0.5), "bulk throughput", "Fairlead"), ""},
		{why(slower("58 at once"), "source hashing", "Fairlead"),
			"Why: while all servers are as fast and have room, no choice is better than another."},
		{why(slower("58 at once, 2 take twice as long"), "source hashing", "Fairlead"), ""},
		{why(made(), "an update takes iptables", "kube-proxy"), ""},
		{why(made(), "an update takes iptables", "Fairlead"),
			"Why: Fairlead's iptables writes only the chains that change."},
	} {
		if test.got != test.want {
			t.Errorf("got %q, want %q", test.got, test.want)
		}
	}
}
