package lack

import (
	_ "embed"
	"fmt"
	"path"
	"strings"
)

//go:embed skips.txt
var skips string

// Row lets the tests of a package that a pattern selects be skipped on a lack.
type Row struct {
	Package string // below the repository's root
	Test    string // names of test and subtests, each a pattern of path.Match; what is below is selected as well
	Lack    Lack
	Why     string
}

// List is the rows of skips.txt.
func List() ([]Row, error) { return parse(skips) }

func parse(text string) (rows []Row, err error) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) < 4 {
			return nil, fmt.Errorf("list of skips: %q has not got a package, a test, a lack and a reason", line)
		}
		r := Row{f[0], f[1], Lack(f[2]), strings.Join(f[3:], " ")}
		if _, known := facts[r.Lack]; !known {
			return nil, fmt.Errorf("list of skips: %q: there is no lack %s", line, r.Lack)
		}
		if _, err := path.Match(r.Test, ""); err != nil {
			return nil, fmt.Errorf("list of skips: %q: test: %w", line, err)
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// Allows reports whether a test may be skipped on a lack.
func (r Row) Allows(pkg, test string, l Lack) bool {
	patterns, names := strings.Split(r.Test, "/"), strings.Split(test, "/")
	if r.Package != pkg || r.Lack != l || len(names) < len(patterns) {
		return false
	}
	for i, p := range patterns {
		if ok, _ := path.Match(p, names[i]); !ok {
			return false
		}
	}
	return true
}
