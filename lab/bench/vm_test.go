package bench

import (
	"flag"
	"os"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/vm"
)

// inTestKernel runs a benchmark in the test kernel if this one has no IPVS, and reports whether it did. All that
// is compared runs there, so that nothing but the ratio of two figures of one such run means anything.
func inTestKernel(b *testing.B) (done bool) {
	b.Helper()
	if _, err := os.Stat("/proc/net/ip_vs"); err == nil {
		return false
	}
	b.Setenv(kubernetes.PartsVariable, kubernetes.NeedParts(b).Dir)
	runInTestKernel(b, "this kernel has no IPVS")
	return true
}

// runInTestKernel runs the calling benchmark there, which the machine cannot for a reason.
func runInTestKernel(b *testing.B, why string) {
	b.Helper()
	kernel := vm.Need(b)
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	names, wanted := strings.Split(b.Name(), "/"), strings.Split(flag.Lookup("test.bench").Value.String(), "/")
	pattern := "^" + strings.Join(names, "$/^") + "$"
	if len(wanted) > len(names) {
		pattern += "/" + strings.Join(wanted[len(names):], "/")
	}
	m := vm.Machine{
		Kernel: kernel, Stdout: os.Stdout, Stderr: os.Stderr, Memory: "6G",
		Args: []string{self, "-test.run=^$", "-test.bench=" + pattern, "-test.timeout=1h",
			"-test.benchtime=" + flag.Lookup("test.benchtime").Value.String()},
	}
	progress(why + "; in the test kernel:")
	status, err := m.Run(b.Context())
	if err != nil || status != 0 {
		b.Fatalf("in the test kernel: status %d, %v", status, err)
	}
}
