package said_test

import (
	"testing"

	"fairlead.dev/fairlead/said"
)

func TestMeant(t *testing.T) {
	for word, want := range map[string]string{
		"Servcie": `; did you mean "Service"?`, "service": `; did you mean "Service"?`, "Service": "",
		"slector": `; did you mean "selector"?`, "wbe": `; did you mean "web"?`, "": "", "x": "", "deployment": "",
		"tragetPort": `; did you mean "targetPort"?`, "Selectors": `; did you mean "selector"?`,
	} {
		if got := said.Meant(word, []string{"Service", "selector", "web", "targetPort"}); got != want {
			t.Errorf("%q: %q, want %q", word, got, want)
		}
	}
}
