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

// visible is the least difference that counts as one; alike is the difference that must be ruled out before two are
// called alike.
const (
	visible = 1.05
	alike   = 1.1
)

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
			[]string{iptables}, updates(Growth.Grows, Growth.Flat)},
		{"an update takes IPVS the same however many Services there are", flftuu, []string{"update"}, []string{ipvs},
			updates(Growth.Flat, Growth.Grows)},
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
	strict              bool   // one vote against the conclusion is enough
	none                string // why there are no votes
}

func (v *votes) vote(a Answer) {
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
		return Unknown, boundsTooWide + says
	}
	return Differs, says
}

// judged is the answer for the planes of one program on a kernel; the error says why there is none.
func (c conclusion) judged(b judged) (Answer, string, error) {
	curves, err := b.byFirst(c.needs, c.planes)
	if err != nil {
		return Unknown, "", err
	}
	var v votes
	if err := c.judge(b, curves, &v); err != nil {
		return Unknown, "", err
	}
	if v.all == 0 {
		return Unknown, "", errors.New(v.none)
	}
	answer, says := v.answer()
	return answer, says, nil
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
	return func(_ judged, c []curve, v *votes) error {
		all := c[0].against(c[1])
		if len(all) == 0 || all[len(all)-1].size <= at {
			return fmt.Errorf("no more than %s were measured for %s", counted(at, c[0].axis), c[0].experiment)
		}
		var as, contrary [2]int // claims up to the size, and beyond
		vague := false
		for _, r := range all {
			beyond := r.size > at
			as[one(beyond)] += one(r.Seen() && r.More() == beyond)
			contrary[one(beyond)] += one(r.Seen() && r.Less() == beyond)
			vague = vague || r.Vague()
		}
		answer, says := Fails, c[0].beside(c[1], all)
		switch {
		case vague:
			answer = Unknown
		case as[0]+as[1]+contrary[0]+contrary[1] == 0:
			return errors.New(says)
		case as[0] > 0 && as[1] > 0 && contrary == [2]int{}:
			answer = Holds
		case as[1] > 0 && contrary[1] == 0: // behind above, but not ahead below
			answer = Differs
		}
		v.vote(answer)
		v.say("%s", says)
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
			v.vote(unchanged(r))
			v.say("%s%s times as long with %s as with %s", strings.TrimPrefix(of+": ", ": "), r, counted(sizes[1], c.axis),
				study.Number(sizes[0]))
		}
	}
	return nil
}

// unchanged judges a ratio that was said to be 1.
func unchanged(r Comparison) Answer {
	switch {
	case r.High < alike && 1/r.Low < alike || r.High < 1:
		return Holds
	case r.More() && r.Low > visible:
		return Fails
	case r.More():
		return Differs
	}
	return Unknown
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

// updates judges how long one takes, by size.
func updates(holds, fails func(Growth) bool) func(judged, []curve, *votes) error {
	return func(_ judged, curves []curve, v *votes) error {
		c := curves[0]
		g, ok := c.growth(c.place, c.who.Name, c.figure.Name)
		if !ok {
			return errors.New("update was measured with one size only")
		}
		says := fmt.Sprintf("%s of %s: %s at %s, %s at %s; it grows as %s", c.figure.Name, c.who.Name,
			c.value(g.From), counted(g.From, c.axis), c.value(g.To), counted(g.To, c.axis), g)
		switch {
		case holds(g):
			v.vote(Holds)
		case fails(g):
			v.vote(Fails)
		default:
			return errors.New(says)
		}
		v.say("%s", says)
		return nil
	}
}

// lastSlower compares the last Service with the first one.
func lastSlower(b judged, _ []curve, v *votes) error {
	v.none = "the first and the last Service of iptables of " + b.whose() +
		" were not measured, or the bounds are too wide"
	for _, experiment := range []string{"lookup", "bandwidth"} {
		last, err := b.main(experiment, "iptables", "last")
		first, failed := b.main(experiment, "iptables", "first")
		if err != nil || failed != nil {
			continue
		}
		n := last.largest()
		r, ok := b.compare(last.at(n), first.at(n), last.figure.Name)
		if !ok || r.Vague() {
			continue
		}
		answer := Fails
		if r = last.worse(r); r.More() {
			answer = Holds
		}
		v.vote(answer)
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
		hardly := ""
		if unchanged(r) == Differs {
			hardly = ", hardly more"
		}
		v.vote(unchanged(r))
		v.say("%s takes %s times as long at %s as at %s (%s)%s", c.who.Name, r, counted(sizes[1], c.axis),
			study.Number(sizes[0]), c.named(), hardly)
		return nil
	}
}

// worstBeatsBest compares across sizes, for the Service that rules name first and the one that they name last.
func worstBeatsBest(b judged, _ []curve, v *votes) error {
	for _, end := range []string{"first", "last"} {
		curves, err := b.curves("lookup", end, "nftables", "iptables")
		if err != nil {
			return err
		}
		nft, ipt := curves[0], curves[1]
		worst, best := nft.extreme(true), ipt.extreme(false)
		r, ok := b.compare(nft.at(worst), ipt.at(best), nft.figure.Name)
		if !ok {
			return errors.New("there are no figures")
		}
		r = nft.worse(r)
		v.vote(ahead(r))
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

// extreme is the size at which a curve is worst, or best, among those of which that was published if there are such.
func (c curve) extreme(worst bool) (size int) {
	const from = 5000
	sizes := c.sizes()
	if i := slices.IndexFunc(sizes, func(n int) bool { return n >= from }); i > 0 {
		sizes = sizes[i:]
	}
	var at float64
	for i, n := range sizes {
		all, _ := far{c.Statistics, c.at(n), c.figure.Name}.relative()
		v := all.Median()
		if c.figure.Better == study.Higher {
			v = 1 / v
		}
		if i == 0 || worst == (v > at) {
			size, at = n, v
		}
	}
	return size
}

// asFast compares two planes at all sizes.
func asFast(_ judged, c []curve, v *votes) error {
	all := c[0].against(c[1])
	if len(all) == 0 {
		return errors.New("they were not measured in the same rounds")
	}
	for _, r := range all {
		switch {
		case r.More():
			v.vote(Fails)
		case r.Vague() || r.High >= alike:
			v.vote(Unknown)
		default:
			v.vote(Holds)
		}
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
	answer, r := Fails, e.Direct
	switch {
	case r.More() && published/alike < r.Low && r.High < published*alike:
		answer = Holds
	case r.Vague() || r.Low <= published && published <= r.High:
		answer = Unknown
	case r.More():
		answer = Differs
	}
	v.vote(answer)
	v.say("%s takes %s times as long as direct access (%s)", c.who.Name, r, c.named())
	return nil
}

// sameBandwidth compares all planes with direct access, with as many Services as there are.
func sameBandwidth(b judged, _ []curve, v *votes) error {
	v.before, v.between, v.none = "times that of direct access: ", ", ",
		"bandwidth was not measured for "+b.whose()+", or the bounds are too wide"
	for _, plane := range planes() {
		c, err := b.main("bandwidth", plane, "")
		if err != nil {
			continue
		}
		e, ok := c.estimate(c.at(c.largest()), c.figure.Name)
		if !ok || e.Direct == nil || e.Direct.Vague() {
			continue
		}
		answer := Holds
		switch {
		case e.Direct.Seen() && e.Direct.High < 1/visible:
			answer = Fails
		case e.Direct.Low < 1/alike:
			answer = Unknown
		}
		v.vote(answer)
		v.say("%s %s", c.who.Name, e.Direct)
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
		for _, name := range []string{"sh", "sed"} {
			t := b.scheduled(of, name)
			r, ok := b.compare(t, robin, f.Name)
			if !ok {
				continue
			}
			r = curve{figure: f}.worse(r)
			v.vote(map[bool]Answer{true: ahead(r), false: Fails}[r.Less() || r.Vague()])
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
