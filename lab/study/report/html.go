package report

import (
	"embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

//go:embed page
var pageFiles embed.FS

// document is what the template shows.
type document struct {
	Title   string
	Head    []string
	Advice  Advice
	Groups  []verdictGroup
	Tally   string
	Parts   []part
	Legend  string
	Raw     template.URL // the Result as JSON
	RawName string
}

// verdictGroup is a conclusion with its verdicts.
type verdictGroup struct {
	Conclusion, Published string
	Verdicts              []Verdict
}

// part is a section as the template shows it.
type part struct {
	section
	ID      string
	Kernels bool // the experiment was made on several
	Figures []figurePart
	Legend  []legendEntry
	// Ratio, Value, Lin, Log are the views that there are; ByValue and ByLog are the ones that are shown first.
	Ratio, Value, Log bool
	ByLog             bool
	Published         []Published
}

// legendEntry is a contender.
type legendEntry struct {
	Index              int
	Name, Class, Shape string
}

// figurePart are the charts of a figure, one of each case.
type figurePart struct {
	study.Figure
	First  bool
	Charts []chartPart
}

// Single reports whether there is one case only: its table has a place beside it.
func (f figurePart) Single() bool { return len(f.Charts) == 1 }

// cell breaks what a table says of a figure into lines.
func cell(text string) template.HTML {
	value, ratio, both := strings.Cut(text, " · ")
	if !both {
		return template.HTML(template.HTMLEscapeString(text))
	}
	return template.HTML(template.HTMLEscapeString(ratio) + "<small>" + template.HTMLEscapeString(value) + "</small>")
}

// chartPart is a block.
type chartPart struct {
	ID, Title, Case string
	Pictures        []picture
	Table           table
}

// HTML writes a page that needs nothing else.
func HTML(w io.Writer, r *study.Result) error {
	functions := template.FuncMap{"sign": Answer.sign, "kind": answerClass, "upper": upper, "cell": cell}
	t, err := template.New("page.html").Funcs(functions).ParseFS(pageFiles, "page/*")
	if err != nil {
		return err
	}
	p, err := newPage(r)
	if err != nil {
		return err
	}
	return t.Execute(w, p)
}

func newPage(r *study.Result) (document, error) {
	s := NewStatistics(r)
	p := document{
		Title: "fairlead bench, " + day(r.Started), Head: s.head(), Advice: s.Advice(), Legend: s.legend(),
		RawName: "fairlead-bench-" + r.Started.UTC().Format("2006-01-02") + ".json",
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return p, err
	}
	p.Raw = template.URL("data:application/json;base64," + base64.StdEncoding.EncodeToString(raw))
	p.Groups, p.Tally = verdictGroups(s.Verdicts())
	for _, c := range s.sections() {
		p.Parts = append(p.Parts, s.part(c))
	}
	return p, nil
}

// verdictGroups puts the verdicts of a conclusion together, and counts the answers.
func verdictGroups(all []Verdict) (groups []verdictGroup, answers string) {
	counts := map[Answer]int{}
	for _, v := range all {
		counts[v.Answer]++
		if n := len(groups); n == 0 || groups[n-1].Conclusion != v.Conclusion {
			groups = append(groups, verdictGroup{Conclusion: v.Conclusion, Published: v.Published})
		}
		g := &groups[len(groups)-1]
		g.Verdicts = append(g.Verdicts, v)
	}
	return groups, tally(counts, "%d × %s", Holds, SoFar, Differs, Fails, Unknown)
}

func answerClass(a Answer) string {
	return map[Answer]string{Holds: "holds", SoFar: "unknown", Fails: "fails", Differs: "differs", Unknown: "unknown"}[a]
}

func (s *Statistics) part(c section) part {
	p := part{
		section: c, ID: c.Name, Kernels: len(s.kernels(c.Name)) > 1 || c.Kernel.Name != study.This, Published: s.beside(c),
	}
	if c.Kernel.Name != study.This {
		p.ID += "-test"
	}
	order := p.legend(c)
	main, _ := mainFigure(c.Description)
	for _, f := range c.Description.Figures {
		if of := c.of(f); len(of) > 0 {
			p.add(s, of, f.Name == main.Name, order)
		}
	}
	slices.SortStableFunc(p.Figures, func(a, b figurePart) int { return one(b.First) - one(a.First) })
	return p
}

// legend lists the contenders, and numbers them.
func (p *part) legend(c section) map[string]int {
	order := map[string]int{}
	for _, b := range c.blocks {
		for _, who := range b.who {
			if _, ok := order[who.Name]; ok {
				continue
			}
			order[who.Name] = len(p.Legend)
			class := planeClass(who) + " " + string(who.Kind)
			p.Legend = append(p.Legend, legendEntry{len(p.Legend), who.Name, class, shape(who)})
		}
	}
	return order
}

// views are how a chart may be drawn.
type view struct{ relative, log bool }

// views are those that a figure may have. Figures of all but the main contender are in tables alone, if they have
// something to relate to.
func views(relative, main bool) []view {
	switch {
	case relative && main:
		return []view{{true, false}, {true, true}, {false, false}, {false, true}}
	case relative:
		return []view{{true, false}, {true, true}}
	}
	return []view{{false, false}, {false, true}}
}

// everywhere has the pictures shown also for the choices of which the figure has none.
func (f figurePart) everywhere() {
	for _, c := range f.Charts {
		classes := map[string]bool{}
		for _, p := range c.Pictures {
			classes[p.Class] = true
		}
		for i, p := range c.Pictures {
			kind, scale, _ := strings.Cut(p.Class, " ")
			if !classes["ratio lin"] {
				c.Pictures[i].Class += " ratio"
			}
			if !classes["value lin"] {
				c.Pictures[i].Class += " value"
			}
			if scale == "lin" && !classes[kind+" log"] {
				c.Pictures[i].Class += " log"
			}
		}
	}
}

// add draws a figure for each case, with the same axes.
func (p *part) add(s *Statistics, of []block, main bool, order map[string]int) {
	f := figurePart{Figure: of[0].figure, First: main}
	relative := slices.ContainsFunc(of, s.relative)
	for _, b := range of {
		f.Charts = append(f.Charts, chartPart{
			ID: fmt.Sprintf("%s-%d-%d", p.ID, len(p.Figures), len(f.Charts)), Title: b.title(), Case: b.of, Table: s.full(b),
		})
	}
	for _, v := range views(relative, main) {
		domain := s.draw(f.Charts, of, v, order)
		if main {
			p.shows(v, domain)
		}
	}
	f.everywhere()
	p.Figures = append(p.Figures, f)
}

// shows notes which views the main figure has, and which is better to begin with.
func (p *part) shows(v view, domain []float64) {
	p.Ratio = p.Ratio || v.relative
	p.Value = p.Value || !v.relative
	p.Log = p.Log || v.log && len(domain) > 0
	if first := v.relative || !p.Ratio; first && !v.log && len(domain) > 0 && slices.Min(domain) > 0 {
		p.ByLog = slices.Max(domain) > 8*slices.Min(domain)
	}
}

// full is the table of a block.
func (s *Statistics) full(b block) table {
	t := s.bySize(b, b.sizes, true)
	if n := len(t.Head) - 1; t.Head[n] == growthHead { // below the name, as wide tables are hard to read
		t.Head = t.Head[:n]
		for i, row := range t.Rows {
			t.Rows[i] = row[:n]
			t.Rows[i][0] = row[n] + " · " + row[0]
		}
	}
	return t
}

// drawable reports whether a logarithmic axis shows all that a linear one does.
func drawable(all []shown) bool {
	for _, one := range all {
		one.log = false
		if v := one.values(); len(v) == 0 || slices.Min(v) <= 0 {
			return false
		}
	}
	return true
}

// draw adds a picture to the chart of each case.
func (s *Statistics) draw(charts []chartPart, of []block, v view, order map[string]int) (domain []float64) {
	var all []shown
	for _, b := range of {
		one := shown{stats: s, block: b, relative: v.relative, log: v.log, order: order}
		all = append(all, one)
		domain = append(domain, one.values()...)
	}
	if v.relative {
		domain = append(domain, 1)
	}
	if v.log && !drawable(all) {
		return nil
	}
	if len(domain) == 0 {
		domain = []float64{1}
	}
	for i, one := range all {
		one.domain = domain
		p := one.rowsPicture()
		if len(one.sizes) > 1 {
			p = one.lines()
		}
		p.ID = fmt.Sprintf("%s-%d", charts[i].ID, len(charts[i].Pictures))
		charts[i].Pictures = append(charts[i].Pictures, p)
	}
	return domain
}
