// Package check holds the dashboard and the alerts against what Fairlead exports. It is a module of its
// own so that what Prometheus' parser imports is none of the product's business.
package check

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	names "github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"

	"fairlead.dev/fairlead/lab/lack"
)

const (
	alertsFile    = "../alerts.yaml"
	dashboardFile = "../dashboard.json"
	manualFile    = "../../../docs/operations.md"
)

var (
	groupVersion = schema.GroupVersion{Version: "v1"}
	codecs       = scheme.Codecs
)

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func alerts(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.Parse([]byte(read(t, alertsFile)), false, names.UTF8Validation, parser.NewParser(parser.Options{}), slog.New(slog.DiscardHandler))
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	var all []rulefmt.Rule
	for _, g := range groups.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

type target struct{ Expr, LegendFormat string }

type source struct{ UID string }

type panel struct {
	Type, Title string
	Datasource  source
	GridPos     struct{ H, W, X, Y int }
	Targets     []struct {
		target
		Datasource source
	}
}

type dashboard struct {
	ID          *int
	Panels      []panel
	Annotations struct {
		List []struct{ Expr string }
	}
	Templating struct {
		List []struct{ Name, Type, Definition string }
	}
}

func loadDashboard(t *testing.T) dashboard {
	t.Helper()
	var d dashboard
	if err := json.Unmarshal([]byte(read(t, dashboardFile)), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// checkExpr reports each series and label of an expression that no scrape has.
func checkExpr(t *testing.T, where, text string, known map[string]map[string]bool) {
	t.Helper()
	text = strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*").Replace(text)
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(text)
	if err != nil {
		t.Errorf("%s: %v: %s", where, err, text)
		return
	}
	used := map[string]bool{} // labels of all series in it
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		s, ok := n.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		have, ok := known[s.Name]
		if !ok {
			t.Errorf("%s: there is no %s", where, s.Name)
		}
		for l := range have {
			used[l] = true
		}
		for _, m := range s.LabelMatchers {
			if m.Name != names.MetricNameLabel && !have[m.Name] {
				t.Errorf("%s: %s has no label %s", where, s.Name, m.Name)
			}
		}
		return nil
	})
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		for _, l := range grouping(n) {
			if !used[l] {
				t.Errorf("%s: no series of %s has a label %s", where, text, l)
			}
		}
		return nil
	})
}

func grouping(n parser.Node) []string {
	switch e := n.(type) {
	case *parser.AggregateExpr:
		return e.Grouping
	case *parser.BinaryExpr:
		if e.VectorMatching != nil {
			return append(e.VectorMatching.MatchingLabels, e.VectorMatching.Include...)
		}
	}
	return nil
}

func TestAlerts(t *testing.T) {
	known, manual := catalogue(t), read(t, manualFile)
	for _, r := range alerts(t) {
		checkExpr(t, r.Alert, r.Expr, known)
		for _, name := range []string{"summary", "description"} {
			if r.Annotations[name] == "" {
				t.Errorf("%s has no %s", r.Alert, name)
			}
		}
		if want := "docs/operations.md#" + strings.ToLower(r.Alert); r.Annotations["runbook"] != want {
			t.Errorf("%s: runbook is %q, want %q", r.Alert, r.Annotations["runbook"], want)
		}
		if !strings.Contains(manual, "\n### "+r.Alert+"\n") {
			t.Errorf("%s does not say what to do about %s", manualFile, r.Alert)
		}
		if s := r.Labels["severity"]; s != "critical" && s != "warning" && s != "info" {
			t.Errorf("%s: severity %q", r.Alert, s)
		}
	}
	for _, found := range regexp.MustCompile(`(?m)^### (Fairlead\w+)$`).FindAllStringSubmatch(manual, -1) {
		if !strings.Contains(read(t, alertsFile), "alert: "+found[1]+"\n") {
			t.Errorf("%s has %s, which is no alert", manualFile, found[1])
		}
	}
}

func TestDashboard(t *testing.T) {
	d, known := loadDashboard(t), catalogue(t)
	if d.ID != nil {
		t.Error("the dashboard has the id of somebody's Grafana")
	}
	legend := regexp.MustCompile(`{{(\w+)}}`)
	queries := 0
	for _, p := range d.Panels {
		for _, q := range p.Targets {
			queries++
			checkExpr(t, p.Title, q.Expr, known)
			for _, l := range legend.FindAllStringSubmatch(q.LegendFormat, -1) {
				if !regexp.MustCompile(`by \([^)]*\b` + l[1] + `\b`).MatchString(q.Expr) {
					t.Errorf("%s: the legend's %s is not in %s", p.Title, l[1], q.Expr)
				}
			}
			if q.Datasource.UID != "${datasource}" || p.Datasource.UID != "${datasource}" {
				t.Errorf("%s: its data source is not that of the dashboard's variable", p.Title)
			}
		}
	}
	if queries < 40 {
		t.Error("only", queries, "queries were found")
	}
	for _, v := range d.Templating.List {
		inner := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`).FindStringSubmatch(v.Definition)
		if v.Type == "query" && (inner == nil || !known[inner[1]][inner[2]]) {
			t.Errorf("variable %s: %s", v.Name, v.Definition)
		}
	}
}

// TestLayout: panels have titles of their own, and none lies on another.
func TestLayout(t *testing.T) {
	taken, titles := map[string]string{}, map[string]bool{}
	for _, p := range loadDashboard(t).Panels {
		if p.Title == "" || titles[p.Title] {
			t.Errorf("title %q is missing or not the only one", p.Title)
		}
		titles[p.Title] = true
		if p.GridPos.X+p.GridPos.W > 24 || p.GridPos.H == 0 || p.GridPos.W == 0 {
			t.Errorf("%s: at %v", p.Title, p.GridPos)
		}
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := fmt.Sprint(p.GridPos.X+x, " ", p.GridPos.Y+y)
				if other := taken[at]; other != "" {
					t.Fatalf("%s lies on %s", p.Title, other)
				}
				taken[at] = p.Title
			}
		}
	}
}

// TestShown: what Fairlead alone exports is on the dashboard.
func TestShown(t *testing.T) {
	text := read(t, dashboardFile)
	for name := range catalogue(t) {
		base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		if strings.HasPrefix(name, "fairlead_") && !strings.Contains(text, base) {
			t.Error(name, "is not on the dashboard")
		}
	}
}

// TestPromtool has Prometheus' own tool check the alerts and run their examples.
func TestPromtool(t *testing.T) {
	tool, err := exec.LookPath("promtool")
	if err != nil {
		lack.Skip(t, lack.Prometheus, err)
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		cmd := exec.CommandContext(t.Context(), tool, args...)
		cmd.Dir = ".."
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", cmd, err, out)
		}
	}
}
