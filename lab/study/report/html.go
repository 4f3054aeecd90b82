package report

import (
	"embed"
	"html/template"
	"io"
	"strings"

	"fairlead.dev/fairlead/lab/study"
)

//go:embed page
var pageFiles embed.FS

// document is what the template shows.
type document struct {
	Title, Facts string
	Board        board
	Advice       []string
	Tally        string
	Sections     []section
	Head         []string
	Legend       string
}

// HTML writes a page that needs nothing else: no script, no other file.
func HTML(w io.Writer, r *study.Result) error {
	functions := template.FuncMap{
		"sign": Answer.sign, "kind": answerClass, "upper": upper, "groups": verdictGroups,
		// Hyphens are where a phone breaks the heads of the scoreboard.
		"hyphens": strings.NewReplacer("connection", "con\u00adnec\u00adtion", "Bandwidth", "Band\u00adwidth", "Follows",
			"Fol\u00adlows", "Memory", "Mem\u00adory", "rollout", "roll\u00adout").Replace,
	}
	t, err := template.New("page.html").Funcs(functions).ParseFS(pageFiles, "page/*")
	if err != nil {
		return err
	}
	s := NewStatistics(r)
	return t.Execute(w, document{
		Title: "fairlead bench, " + day(r.Started), Facts: s.facts(), Board: s.scoreboard(), Advice: s.Decision(),
		Tally: tallied(s.Verdicts()), Sections: s.sections(), Head: s.head(), Legend: s.legend(),
	})
}

// verdictGroup is a conclusion with its verdicts.
type verdictGroup struct {
	Conclusion, Published string
	Verdicts              []Verdict
}

// verdictGroups puts the verdicts of a conclusion together.
func verdictGroups(all []Verdict) (groups []verdictGroup) {
	for _, v := range all {
		if n := len(groups); n == 0 || groups[n-1].Conclusion != v.Conclusion {
			groups = append(groups, verdictGroup{Conclusion: v.Conclusion, Published: v.Published})
		}
		g := &groups[len(groups)-1]
		g.Verdicts = append(g.Verdicts, v)
	}
	return groups
}

// tallied counts the answers.
func tallied(all []Verdict) string {
	counts := map[Answer]int{}
	for _, v := range all {
		counts[v.Answer]++
	}
	return tally(counts, "%d × %s", Holds, SoFar, Differs, Fails, Unknown)
}

func answerClass(a Answer) string {
	return map[Answer]string{Holds: "holds", SoFar: "unknown", Fails: "fails", Differs: "differs", Unknown: "unknown"}[a]
}
