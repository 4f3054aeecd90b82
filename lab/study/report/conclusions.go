package report

import (
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

// visible is the difference from which on somebody would call it one; alike is what has to be ruled out before two are
// called alike.
const (
	visible = 1.05
	alike   = 1.1
)

// conclusions are those that are quoted when somebody has to choose a mode of kube-proxy.
func conclusions() []conclusion {
	connections := []string{"lookup", "connect"}
	return []conclusion{
		{"iptables is ahead of IPVS below some 1,000 Services, and behind above", uk8s, []string{"connect", "lookup"},
			crossing("iptables", "ipvs", 1000)},
		{"connections by iptables take no visibly longer with up to 200,000 rules", repeated, []string{"rules"},
			rulesCostNothing},
		{"an update takes iptables the longer the more Services there are", huawei + "; " + flftuu,
			[]string{"update"}, updates("iptables", Growth.Grows, "grows")},
		{"an update takes IPVS the same however many Services there are", flftuu, []string{"update"},
			updates("ipvs", Growth.Flat, "is flat")},
		{"the last Service of iptables is slower than the first", repeated, []string{"lookup", "bandwidth"}, lastSlower},
		{"IPVS is as fast with many Services as with few", uk8s, []string{"connect", "lookup"}, flatPlane("ipvs", 4000)},
		{"source hashing and shortest expected delay are ahead of round robin", repeated, []string{"schedulers"}, schedulers},
		{"nftables is as fast with 30,000 Services as with 5,000", kep3866, connections, flatPlane("nftables", 30_000)},
		{"nftables at its worst is ahead of iptables at its best", kep3866, []string{"lookup"}, worstBeatsBest},
		{"nftables is as fast as IPVS, or slightly faster", kep3866, connections, asFast("nftables", "ipvs")},
		{"a connection by iptables takes 16 % longer at 1,000 Services", eks, []string{"connect", "lookup"}, sixteenPercent},
		{"bulk throughput is the same whatever proxies", eks, []string{"bandwidth"}, sameBandwidth},
	}
}

// byConnections judges by the first of the experiments about connections that was measured for the planes.
func (b judged) byConnections(planes ...string) (curves []curve, err error) {
	return b.byFirst([]string{"lookup", "connect"}, planes...)
}

// byFirst judges by the first of some experiments that was measured for the planes; by the last Service, where there
// are cases of it.
func (b judged) byFirst(experiments []string, planes ...string) (curves []curve, err error) {
	for _, experiment := range experiments {
		curves = nil
		for _, plane := range planes {
			var words []string
			if len(b.cases(experiment, b.kernel)) > 1 {
				words = []string{"last"}
			}
			c, failed := b.main(experiment, plane, words...)
			if failed != nil {
				err = failed
				break
			}
			curves = append(curves, c)
		}
		if len(curves) == len(planes) {
			return curves, nil
		}
	}
	return nil, err
}

// crossing is "ahead up to a size, behind above it".
func crossing(slow, fast string, at int) func(judged) (Answer, string) {
	return func(b judged) (Answer, string) {
		c, err := b.byFirst([]string{"connect", "lookup"}, slow, fast)
		if err != nil {
			return Unknown, err.Error()
		}
		all := c[0].against(c[1])
		if len(all) == 0 || all[len(all)-1].size <= at {
			return Unknown, "no more than " + counted(at, c[0].axis) + " were measured for " + c[0].experiment
		}
		var below, above, before, after int // claims: ahead, behind; up to the size, and beyond
		for _, r := range all {
			switch {
			case r.Vague():
				return Unknown, boundsTooWide + c[0].beside(c[1], all)
			case r.size <= at && r.Less():
				below++
			case r.size <= at && r.More():
				before++
			case r.size > at && r.More():
				above++
			case r.size > at && r.Less():
				after++
			}
		}
		return crossed(below, before, above, after), c[0].beside(c[1], all)
	}
}

func crossed(below, before, above, after int) Answer {
	switch {
	case below > 0 && above > 0 && before == 0 && after == 0:
		return Holds
	case above > 0 && after == 0:
		return Differs // behind above, but not ahead below
	case below+before+above+after == 0:
		return Unknown
	}
	return Fails
}

// rulesCostNothing compares the largest number of rules with the smallest, in each case.
func rulesCostNothing(b judged) (Answer, string) {
	var parts []string
	most, answers := 0, map[Answer]int{}
	for _, of := range b.cases("rules", b.kernel) {
		c, err := b.main("rules", "iptables", of)
		if err != nil {
			return Unknown, err.Error()
		}
		r, sizes, ok := c.lastToFirst()
		if !ok {
			continue
		}
		most = max(most, sizes[1])
		answers[unchanged(r)]++
		parts = append(parts, fmt.Sprintf("%s%s times as long with %s as with %s", prefixed(of), r, counted(sizes[1], c.axis),
			grouped(int64(sizes[0]))))
	}
	says := "a request takes " + strings.Join(parts, "; ")
	switch {
	case len(parts) == 0:
		return Unknown, "rules was measured with one number of rules only"
	case answers[Fails] > 0:
		return Fails, says
	case answers[Holds] == len(parts):
		return upTo(200_000, most, says)
	}
	return Unknown, boundsTooWide + says
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

// upTo is what holds, of a conclusion that was drawn up to a size.
func upTo(published, measured int, says string) (Answer, string) {
	if measured < published {
		return SoFar, says + "; more were not measured"
	}
	return Holds, says
}

func prefixed(of string) string {
	if of == "" {
		return ""
	}
	return of + ": "
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
func updates(plane string, holds func(Growth) bool, word string) func(judged) (Answer, string) {
	return func(b judged) (Answer, string) {
		c, err := b.main("update", plane)
		if err != nil {
			return Unknown, err.Error()
		}
		g, ok := c.growth(c.place, c.who.Name, c.figure.Name)
		if !ok {
			return Unknown, "update was measured with one size only"
		}
		says := fmt.Sprintf("%s of %s: %s at %s, %s at %s", c.figure.Name, c.who.Name,
			c.value(g.From), counted(g.From, c.axis), c.value(g.To), counted(g.To, c.axis))
		says += "; it grows as " + g.String()
		return grown(g, holds, word == "grows"), says
	}
}

func grown(g Growth, holds func(Growth) bool, expected bool) Answer {
	switch {
	case holds(g):
		return Holds
	case expected && g.Flat() || !expected && g.Grows():
		return Fails
	}
	return Unknown
}

// lastSlower compares the last Service with the first one.
func lastSlower(b judged) (Answer, string) {
	var parts []string
	slower, told := 0, 0
	for _, experiment := range []string{"lookup", "bandwidth"} {
		last, err := b.main(experiment, "iptables", "last")
		first, failed := b.main(experiment, "iptables", "first")
		if err != nil || failed != nil {
			continue
		}
		sizes := last.sizes()
		n := sizes[len(sizes)-1]
		r, ok := b.compare(last.at(n), first.at(n), last.figure.Name)
		if !ok || r.Vague() {
			continue
		}
		r = last.worse(r)
		told++
		if r.More() {
			slower++
		}
		parts = append(parts, fmt.Sprintf("%s: last to first %s at %s", last.named(), r, counted(n, last.axis)))
	}
	switch {
	case told == 0:
		return Unknown, "the first and the last Service of iptables of " + b.whose() +
			" were not measured, or the bounds are too wide"
	case slower == told:
		return Holds, strings.Join(parts, "; ")
	case slower > 0:
		return Differs, strings.Join(parts, "; ")
	}
	return Fails, strings.Join(parts, "; ")
}

// flatPlane judges whether connections take the same at every size, up to the one of which it was said.
func flatPlane(plane string, published int) func(judged) (Answer, string) {
	return func(b judged) (Answer, string) {
		curves, err := b.byConnections(plane)
		if err != nil {
			return Unknown, err.Error()
		}
		c := curves[0]
		r, sizes, ok := c.lastToFirst()
		if !ok {
			return Unknown, c.experiment + " was measured with one size only"
		}
		says := fmt.Sprintf("%s takes %s times as long at %s as at %s (%s)", c.who.Name, r, counted(sizes[1], c.axis),
			grouped(int64(sizes[0])), c.named())
		switch unchanged(r) {
		case Holds:
			return upTo(published, sizes[1], says)
		case Fails:
			return Fails, says
		case Differs:
			return Differs, says + ", hardly more"
		}
		return Unknown, boundsTooWide + says
	}
}

// worstBeatsBest compares across sizes, for the Service that rules name first and the one that they name last.
func worstBeatsBest(b judged) (Answer, string) {
	var parts []string
	answers := map[Answer]int{}
	for _, end := range []string{"first", "last"} {
		nft, err := b.main("lookup", "nftables", end)
		if err != nil {
			return Unknown, err.Error()
		}
		ipt, err := b.main("lookup", "iptables", end)
		if err != nil {
			return Unknown, err.Error()
		}
		worst, best := nft.extreme(true), ipt.extreme(false)
		r, ok := b.compare(nft.at(worst), ipt.at(best), nft.figure.Name)
		if !ok {
			return Unknown, "there are no figures"
		}
		r = nft.worse(r)
		answers[ahead(r)]++
		parts = append(parts, fmt.Sprintf("%s Service: %s at %s takes %s times as long as %s at %s", end, nft.who.Name,
			counted(worst, nft.axis), r, ipt.who.Name, counted(best, ipt.axis)))
	}
	says := strings.Join(parts, "; ")
	switch {
	case answers[Holds] == len(parts):
		return Holds, says
	case answers[Fails] == len(parts):
		return Fails, says
	case answers[Unknown] > 0:
		return Unknown, boundsTooWide + says
	}
	return Differs, says
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
func asFast(plane, other string) func(judged) (Answer, string) {
	return func(b judged) (Answer, string) {
		curves, err := b.byConnections(plane, other)
		if err != nil {
			return Unknown, err.Error()
		}
		c := curves[0]
		all := c.against(curves[1])
		if len(all) == 0 {
			return Unknown, "they were not measured in the same rounds"
		}
		slower, unclear := 0, 0
		for _, r := range all {
			if r.Vague() {
				return Unknown, boundsTooWide + c.beside(curves[1], all)
			}
			switch {
			case r.More():
				slower++
			case r.High >= alike:
				unclear++
			}
		}
		return ofAll(len(all), slower, unclear, c.beside(curves[1], all))
	}
}

// ofAll judges what was said of so many comparisons, of which some are against it, and of others nothing can be told.
func ofAll(comparisons, against, unclear int, says string) (Answer, string) {
	switch {
	case against == comparisons:
		return Fails, says
	case against > 0:
		return Differs, says
	case unclear > 0:
		return Unknown, boundsTooWide + says
	}
	return Holds, says
}

// sixteenPercent looks at 1,000 Services.
func sixteenPercent(b judged) (Answer, string) {
	const at, published = 1000, 1.16
	curves, err := b.byConnections("iptables")
	if err != nil {
		return Unknown, err.Error()
	}
	c := curves[0]
	e, ok := c.estimate(c.at(at), c.figure.Name)
	if !ok || e.Direct == nil {
		return Unknown, c.experiment + " was not measured with 1,000 Services and direct access"
	}
	says := fmt.Sprintf("%s takes %s times as long as direct access (%s)", c.who.Name, e.Direct, c.named())
	switch {
	case e.Direct.Vague():
		return Unknown, boundsTooWide + says
	case e.Direct.More() && published/alike < e.Direct.Low && e.Direct.High < published*alike:
		return Holds, says
	case e.Direct.Low <= published && published <= e.Direct.High:
		return Unknown, boundsTooWide + says
	case e.Direct.More():
		return Differs, says
	}
	return Fails, says
}

// sameBandwidth compares all planes with direct access, with as many Services as there are.
func sameBandwidth(b judged) (Answer, string) {
	var parts []string
	differ, unclear := 0, 0
	for _, plane := range planes() {
		c, err := b.main("bandwidth", plane)
		if err != nil {
			continue
		}
		sizes := c.sizes()
		e, ok := c.estimate(c.at(sizes[len(sizes)-1]), c.figure.Name)
		if !ok || e.Direct == nil || e.Direct.Vague() {
			continue
		}
		switch {
		case e.Direct.Seen() && e.Direct.High < 1/visible:
			differ++
		case e.Direct.Low < 1/alike:
			unclear++
		}
		parts = append(parts, c.who.Name+" "+e.Direct.String())
	}
	says := "times that of direct access: " + strings.Join(parts, ", ")
	if len(parts) == 0 {
		return Unknown, "bandwidth was not measured for " + b.whose() + ", or the bounds are too wide"
	}
	return ofAll(len(parts), differ, unclear, says)
}

// schedulers compares them by what their case, contender or arguments are called.
func schedulers(b judged) (Answer, string) {
	d, _ := b.Experiment("schedulers")
	f, ok := mainFigure(d)
	if !ok {
		return Unknown, "schedulers was not measured"
	}
	var parts []string
	var ahead, told int
	for _, of := range b.cases("schedulers", b.kernel) {
		a, t, says := b.schedulersIn(of, f)
		ahead, told = ahead+a, told+t
		if says != "" {
			parts = append(parts, prefixed(of)+says)
		}
	}
	says := f.Name + ", times that of rr: " + strings.Join(parts, "; ")
	switch {
	case len(parts) == 0:
		return Unknown, "rr, sh and sed of " + b.whose() + " were not measured"
	case told == 0:
		return Unknown, boundsTooWide + says
	case ahead == 2*len(parts):
		return Holds, says
	case ahead > 0:
		return Differs, says
	}
	return Fails, says
}

// schedulersIn compares them in a case: how many of two are ahead of round robin, and of how many that can be told.
func (b judged) schedulersIn(of string, f study.Figure) (ahead, told int, says string) {
	robin, found := b.scheduled(of, "rr")
	if !found {
		return 0, 0, ""
	}
	var parts []string
	for _, name := range []string{"sh", "sed"} {
		t, found := b.scheduled(of, name)
		if !found {
			continue
		}
		r, ok := b.compare(t, robin, f.Name)
		if !ok {
			continue
		}
		r = curve{figure: f}.worse(r)
		ahead, told = ahead+one(r.Less()), told+one(!r.Vague())
		parts = append(parts, name+" "+r.String())
	}
	return ahead, told, listed(parts)
}

// scheduled are the turns with a scheduler.
func (b judged) scheduled(of, name string) (best turns, found bool) {
	for t := range b.rows {
		if t.experiment != "schedulers" || t.kernel != b.kernel || t.of != of {
			continue
		}
		c := b.Contender(t.contender)
		words := strings.FieldsFunc(c.Name+" "+strings.Join(c.Args, " "), func(r rune) bool {
			return r == ' ' || r == '=' || r == ',' || r == ':'
		})
		if c.Kind != b.kind || !slices.Contains(words, name) {
			continue
		}
		if !found || t.contender < best.contender {
			best, found = t, true
		}
	}
	return best, found
}
