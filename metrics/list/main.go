// Command list writes docs/metrics.md: every metric, as package metrics makes it.
package main

import (
	_ "embed"
	"fmt"
	"os"
	"strings"

	"fairlead.dev/fairlead/metrics"
)

//go:embed head.md
var head string

func main() {
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "list:", err)
		os.Exit(1)
	}
}

func write(file string) error {
	var kubeproxy, own strings.Builder
	for _, d := range metrics.New(metrics.Options{}).List() {
		to := &own
		if strings.HasPrefix(d.Name, "kubeproxy_") {
			to = &kubeproxy
		}
		fmt.Fprintf(to, "| `%s` | %s | %s | %s |\n", d.Name, d.Type, strings.Join(d.Labels, ", "), d.Help)
	}
	const table = "| metric | type | labels | what it says |\n|---|---|---|---|\n"
	text := head + table + kubeproxy.String() + "\n## Fairlead's own\n\n" + table + own.String()
	return os.WriteFile(file, []byte(text), 0o644)
}
