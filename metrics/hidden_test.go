package metrics_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	kube "k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"fairlead.dev/fairlead/metrics"
)

// alone is set in the process that shows what is hidden, which holds until its end.
const alone = "FAIRLEAD_TEST_ALONE"

// --show-hidden-metrics-for-version is about metrics that the libraries of Kubernetes have deprecated. 1.37 has
// none in what Fairlead is made of, so that there is one here: deprecated in the version that they believe to be.
func TestShowHidden(t *testing.T) {
	if os.Getenv(alone) == "" {
		t.Parallel()
		c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestShowHidden$", "-test.v")
		c.Env = append(os.Environ(), alone+"=1")
		out, err := c.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestShowHidden") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	const name = "library_deprecated_total"
	legacyregistry.MustRegister(kube.NewCounter(&kube.CounterOpts{Name: name, Help: "Is deprecated.", DeprecatedVersion: "0.0.0"}))
	shows := func(o metrics.Options) bool {
		return strings.Contains(scrape(t, metrics.New(o).Handler()), name)
	}
	if shows(metrics.Options{}) {
		t.Error("what is hidden is shown, though nobody asks for it")
	}
	if !shows(metrics.Options{ShowHiddenFor: "1.36"}) {
		t.Error("it stays hidden")
	}
}
