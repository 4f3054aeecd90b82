package report

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// alike is the factor by which figures may differ that a conclusion calls the same.
const alike = 1.1

// conclusion is a published statement and the function that judges it.
type conclusion struct {
	says   string
	source string
	needs  []string // experiments
	planes []string // planes of which curves are judged; the first experiment that has all of them is taken
	judge  func(judged, []curve, *votes) error
}

// conclusions are those that are quoted for the choice of a mode of kube-proxy.
func conclusions() []conclusion {
	connections, iptables, ipvs, nftables := []string{"lookup", "connect"}, "iptables", "ipvs", "nftables"
	return []conclusion{
		{"iptables is ahead of IPVS below some 1,000 Services, and behind above", uk8s, []string{"connect", "lookup"},
			[]string{iptables, ipvs}, crossing(1000)},
		{"connections by iptables take no visibly longer with up to 200,000 rules", repeated, []string{"rules"}, nil,
			rulesCostNothing},
		{"an update takes iptables the longer the more Services there are", huawei + "; " + flftuu, []string{"update"},
			[]string{iptables}, updates(Growth.Grows, Growth.Flat, study.Fairlead, chains)},
		{"an update takes IPVS the same however many Services there are", flftuu, []string{"update"}, []string{ipvs},
			updates(Growth.Flat, Growth.Grows, study.Peer, listings)},
		{"the last Service of iptables is slower than the first", repeated, []string{"lookup", "bandwidth"}, nil, lastSlower},
		{"IPVS is as fast with many Services as with few", uk8s, connections, []string{ipvs}, flatTo(4000)},
		{"source hashing and shortest expected delay are ahead of round robin", repeated, []string{"schedulers"}, nil,
			schedulers},
		{"nftables is as fast with 30,000 Services as with 5,000", kep3866, connections, []string{nftables}, flatTo(30_000)},
		{"nftables at its worst is ahead of iptables at its best", kep3866, []string{"lookup"}, nil, worstBeatsBest},
		{"nftables is as fast as IPVS, or slightly faster", kep3866, connections, []string{nftables, ipvs}, asFast},
		{"a connection by iptables takes 16 % longer at 1,000 Services", eks, connections, []string{iptables},
			sixteenPercent},
		{"bulk throughput is the same whatever proxies", eks, []string{"bandwidth"}, nil, sameBandwidth},
	}
}

// votes are what the comparisons say that a conclusion is about.
type votes struct {
	before, between string // the texts of comparisons; between: "; " if it is empty
	texts           []string
	count           map[Answer]int
	all             int
	// published and measured are the largest sizes, of what was said up to a size.
	published, measured int
	strict              bool     // one vote against the conclusion is enough
	none                string   // why there are no votes
	why                 []string // of the votes against it
	open                []question
}

// The causes of what is seen against a conclusion.
const (
	tree     = "Fairlead's iptables finds a Service in a tree of address ranges, kube-proxy's in a list"
	tracked  = "only the first packet of a connection meets the rules, as the others are tracked"
	room     = "while all servers are as fast and have room, no choice is better than another"
	hidden   = "a backend's limit of 2,000 requests a second hid the search through the list of endpoints"
	copied   = "userspace copies each byte through its process"
	chains   = "Fairlead's iptables writes only the chains that change"
	listings = "kube-proxy compares all virtual servers at each sync"
)

// cause is why, of the planes of one program only.
func (b judged) cause(of study.Kind, why string) string {
	if b.kind != of {
		return ""
	}
	return why
}

// judge votes by a rule, and keeps what it leaves open. If the vote is against the conclusion, that is why.
func (v *votes) judge(c Comparison, rule func(Comparison) Answer, why string) {
	a := rule(c)
	if a == Unknown {
		v.open = append(v.open, question{c, func(c Comparison) bool { return rule(c) != Unknown }})
	}
	v.vote(a, why)
}

func (v *votes) vote(a Answer, why string) {
	if (a == Fails || a == Differs) && why != "" && !slices.Contains(v.why, why) {
		v.why = append(v.why, why)
	}
	if v.count == nil {
		v.count = map[Answer]int{}
	}
	v.count[a]++
	v.all++
}

func (v *votes) say(format string, args ...any) {
	v.texts = append(v.texts, fmt.Sprintf(format, args...))
}

// answer is that of all votes if they agree. If only some are against the conclusion, it differs.
func (v *votes) answer() (Answer, string) {
	says := v.before + strings.Join(v.texts, cmp.Or(v.between, "; "))
	switch {
	case v.count[Holds] == v.all && v.measured < v.published:
		return SoFar, says + "; more were not measured"
	case v.count[Holds] == v.all:
		return Holds, says
	case v.count[Fails] == v.all || v.strict && v.count[Fails] > 0:
		return Fails, says
	case v.count[Fails] == 0 && v.count[Unknown] > 0:
		return Unknown, says
	}
	return Differs, says
}

// judged is the verdict on the planes of one program on a kernel; the error says why there is none.
func (c conclusion) judged(b judged) (Verdict, error) {
	curves, err := b.byFirst(c.needs, c.planes)
	if err != nil {
		return Verdict{}, err
	}
	var v votes
	if err := c.judge(b, curves, &v); err != nil {
		return Verdict{}, err
	}
	if v.all == 0 {
		return Verdict{}, errors.New(v.none)
	}
	verdict := Verdict{Conclusion: c.says, Published: c.source, Of: b.whose(), Kernel: b.kernel}
	if verdict.Answer, verdict.Says = v.answer(); verdict.Answer == Unknown {
		verdict.open = v.open
		verdict.Says = b.remedy(v.open) + ": " + verdict.Says
	} else if len(v.why) > 0 {
		verdict.Why = "Why: " + strings.Join(v.why, "; ") + "."
	}
	return verdict, nil
}

// byFirst are curves of the first of some experiments that was measured for the planes; of the last Service, where
// there are cases of it.
func (b judged) byFirst(experiments, planes []string) (curves []curve, err error) {
	for _, experiment := range experiments {
		of := ""
		if len(b.cases(experiment, b.kernel)) > 1 {
			of = "last"
		}
		if curves, err = b.curves(experiment, of, planes...); err == nil {
			return curves, nil
		}
	}
	return nil, err
}

// crossing is "ahead up to a size, behind above it".
func crossing(at int) func(judged, []curve, *votes) error {
	return func(b judged, c []curve, v *votes) error {
		all := c[0].against(c[1])
		if len(all) == 0 || all[len(all)-1].size <= at {
			return fmt.Errorf("no more than %s were measured for %s", counted(at, c[0].axis), c[0].experiment)
		}
		var ahead, behind [2]bool // up to the size, and beyond
		for _, r := range all {
			beyond := one(r.size > at)
			ahead[beyond], behind[beyond] = ahead[beyond] || r.Less(), behind[beyond] || r.More()
			if r.Vague() {
				v.open = append(v.open, question{r.Comparison, settled})
			}
		}
		answer := Fails
		switch {
		case ahead[1]: // whatever the others are
		case len(v.open) > 0:
			answer = Unknown
		case ahead[0] && !behind[0] && behind[1]:
			answer = Holds
		case behind[1]:
			answer = Differs
		}
		v.vote(answer, b.cause(study.Fairlead, tree))
		v.say("%s", c[0].beside(c[1], all))
		return nil
	}
}

// rulesCostNothing compares the largest number of rules with the smallest, in each case.
func rulesCostNothing(b judged, _ []curve, v *votes) error {
	*v = votes{
		before: "a request takes ", published: 200_000, strict: true,
		none: "rules was measured with one number of rules only",
	}
	for _, of := range b.cases("rules", b.kernel) {
		c, err := b.main("rules", "iptables", of)
		if err != nil {
			return err
		}
		if r, sizes, ok := c.lastToFirst(); ok {
			v.measured = max(v.measured, sizes[1])
			why := ""
			if strings.Contains(of, "no limit") {
				why = b.cause(study.Peer, hidden)
			}
			v.judge(r, unchanged, why)
			v.say("%s%s times as long with %s as with %s", strings.TrimPrefix(of+": ", ": "), r, counted(sizes[1], c.axis),
				study.Number(sizes[0]))
		}
	}
	return nil
}

// unchanged judges a ratio that was said to be 1, or no more.
func unchanged(r Comparison) Answer {
	switch {
	case r.High < r.Margin:
		return Holds
	case r.More():
		return Fails
	}
	return Unknown
}

// same judges a ratio that was said to be 1.
func same(r Comparison) Answer {
	switch {
	case r.Alike():
		return Holds
	case r.Vague():
		return Unknown
	}
	return Fails
}

// lastToFirst is how many times as bad the figure is at the largest size as at the smallest.
func (c curve) lastToFirst() (r Comparison, sizes [2]int, ok bool) {
	all := c.sizes()
	if len(all) < 2 {
		return r, sizes, false
	}
	sizes = [2]int{all[0], all[len(all)-1]}
	r, ok = c.compare(c.at(sizes[1]), c.at(sizes[0]), c.figure.Name)
	return c.worse(r), sizes, ok
}

// updates judges how long one takes, by size. Why is the cause if that is otherwise with the planes of one program.
func updates(holds, fails func(Growth) bool, of study.Kind, why string) func(judged, []curve, *votes) error {
	return func(b judged, curves []curve, v *votes) error {
		c := curves[0]
		g, ok := c.growth(c.place, c.who.Name, c.figure.Name)
		if !ok {
			return errors.New("update was measured with one size only")
		}
		v.judge(g.ratio, func(r Comparison) Answer {
			switch g := r.growth(g.From, g.To); {
			case holds(g):
				return Holds
			case fails(g):
				return Fails
			}
			return Unknown
		}, b.cause(of, why))
		v.say("%s of %s: %s at %s, %s at %s; it grows as %s", c.figure.Name, c.who.Name,
			c.value(g.From), counted(g.From, c.axis), c.value(g.To), counted(g.To, c.axis), g)
		return nil
	}
}

// lastSlower compares the last Service with the first one.
func lastSlower(b judged, _ []curve, v *votes) error {
	v.none = "the first and the last Service of iptables of " + b.whose() + " were not measured"
	for _, experiment := range []string{"lookup", "bandwidth"} {
		last, err := b.main(experiment, "iptables", "last")
		first, failed := b.main(experiment, "iptables", "first")
		if err != nil || failed != nil {
			continue
		}
		n := last.largest()
		r, ok := b.compare(last.at(n), first.at(n), last.figure.Name)
		if !ok {
			continue
		}
		r = last.worse(r)
		v.judge(r, func(r Comparison) Answer {
			switch {
			case r.More():
				return Holds
			case r.High < r.Margin:
				return Fails
			}
			return Unknown
		}, map[string]string{"lookup": b.cause(study.Fairlead, tree), "bandwidth": tracked}[experiment])
		v.say("%s: last to first %s at %s", last.named(), r, counted(n, last.axis))
	}
	return nil
}

// flatTo judges whether connections take the same at every size, up to the one of which it was said.
func flatTo(published int) func(judged, []curve, *votes) error {
	return func(_ judged, curves []curve, v *votes) error {
		c := curves[0]
		r, sizes, ok := c.lastToFirst()
		if !ok {
			return fmt.Errorf("%s was measured with one size only", c.experiment)
		}
		v.published, v.measured = published, sizes[1]
		v.judge(r, unchanged, "")
		v.say("%s takes %s times as long at %s as at %s (%s)", c.who.Name, r, counted(sizes[1], c.axis),
			study.Number(sizes[0]), c.named())
		return nil
	}
}

// worstBeatsBest compares the largest size of one with the smallest of the other, for the Service that rules name first
// and the one that they name last.
func worstBeatsBest(b judged, _ []curve, v *votes) error {
	for _, end := range []string{"first", "last"} {
		curves, err := b.curves("lookup", end, "nftables", "iptables")
		if err != nil {
			return err
		}
		nft, ipt := curves[0], curves[1]
		worst, best := nft.largest(), slices.Min(ipt.sizes())
		r, ok := b.compare(nft.at(worst), ipt.at(best), nft.figure.Name)
		if !ok {
			return errors.New("there are no figures")
		}
		r = nft.worse(r)
		v.judge(r, ahead, b.cause(study.Fairlead, tree))
		v.say("%s Service: %s at %s takes %s times as long as %s at %s", end, nft.who.Name,
			counted(worst, nft.axis), r, ipt.who.Name, counted(best, ipt.axis))
	}
	return nil
}

// ahead judges a ratio that was said to be below 1.
func ahead(r Comparison) Answer {
	switch {
	case r.Less():
		return Holds
	case r.More():
		return Fails
	case r.Vague():
		return Unknown
	}
	return Differs
}

// asFast compares two planes at all sizes.
func asFast(_ judged, c []curve, v *votes) error {
	all := c[0].against(c[1])
	if len(all) == 0 {
		return errors.New("they were not measured in the same rounds")
	}
	for _, r := range all {
		v.judge(r.Comparison, unchanged, "")
	}
	v.say("%s", c[0].beside(c[1], all))
	return nil
}

// sixteenPercent looks at 1,000 Services.
func sixteenPercent(_ judged, curves []curve, v *votes) error {
	const at, published = 1000, 1.16
	c := curves[0]
	e, ok := c.estimate(c.at(at), c.figure.Name)
	if !ok || e.Direct == nil {
		return fmt.Errorf("%s was not measured with 1,000 Services and direct access", c.experiment)
	}
	v.judge(*e.Direct, func(r Comparison) Answer {
		low, high := r.Low/published, r.High/published
		switch {
		case 1/alike < low && high < alike:
			return Holds
		case low <= 1 && 1 <= high || r.Vague():
			return Unknown
		case r.More():
			return Differs
		}
		return Fails
	}, "")
	v.say("%s takes %s times as long as direct access (%s)", c.who.Name, e.Direct, c.named())
	return nil
}

// sameBandwidth compares all planes with direct access, with as many Services as there are.
func sameBandwidth(b judged, _ []curve, v *votes) error {
	v.before, v.between, v.none = "times that of direct access: ", ", ",
		"bandwidth was not measured for "+b.whose()
	for _, plane := range planes() {
		c, err := b.main("bandwidth", plane, "")
		if err != nil {
			continue
		}
		e, ok := c.estimate(c.at(c.largest()), c.figure.Name)
		if !ok || e.Direct == nil {
			continue
		}
		r := e.Direct.asPublished()
		v.judge(r, same, map[string]string{"userspace": copied}[plane])
		v.say("%s %s", c.who.Name, r)
	}
	return nil
}

// schedulers compares them by what their case, contender or arguments are called.
func schedulers(b judged, _ []curve, v *votes) error {
	d, _ := b.Experiment("schedulers")
	f, _ := mainFigure(d)
	v.before, v.none = f.Name+", times that of rr: ", "rr, sh and sed of "+b.whose()+" were not measured"
	for _, of := range b.cases("schedulers", b.kernel) {
		robin := b.scheduled(of, "rr")
		var texts []string
		why := room
		if strings.Contains(of, "twice as long") {
			why = ""
		}
		for _, name := range []string{"sh", "sed"} {
			t := b.scheduled(of, name)
			r, ok := b.compare(t, robin, f.Name)
			if !ok {
				continue
			}
			r = curve{figure: f}.worse(r)
			v.judge(r, func(r Comparison) Answer {
				if a := ahead(r); a != Differs { // to be as good is not to be ahead
					return a
				}
				return Fails
			}, why)
			texts = append(texts, name+" "+r.String())
		}
		switch len(texts) {
		case 1:
			return fmt.Errorf("one of sh and sed was not measured: %s%s", v.before, texts[0])
		case 2:
			v.say("%s%s", strings.TrimPrefix(of+": ", ": "), listed(texts))
		}
	}
	return nil
}

// scheduled are the turns with a scheduler: of several contenders those of the first.
func (b judged) scheduled(of, name string) (best turns) {
	word := regexp.MustCompile(`[^ =,:]+`)
	for t := range b.rows {
		c := b.Contender(t.contender)
		words := word.FindAllString(c.Name+" "+strings.Join(c.Args, " "), -1)
		here := t.experiment == "schedulers" && t.kernel == b.kernel && t.of == of && c.Kind == b.kind
		if here && slices.Contains(words, name) && (best.contender == "" || t.contender < best.contender) {
			best = t
		}
	}
	return best
}
