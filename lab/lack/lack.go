// Package lack skips tests for what a machine lacks: a test names one of the lacks that are known here, and the list of
// skips (skips.txt) names the test. Any other obstacle to a test is a failure.
//
//	test ─► Need, Skip ─► "lacks cgroup: …" ─► go test -json ─► lab/testreport ─► the last lines of a run
//	            │                                                   │
//	            └ CI=true: the machine must explain the lack        └ skips.txt must name test and lack
package lack

import (
	"fmt"
	"os"
	"regexp"
	"testing"
)

// Lack is something that a test needs and a machine may do without; the table facts says what.
type Lack string

// The things that a machine may lack.
const (
	BPFConntrack   Lack = "bpf-conntrack"
	BPFFS          Lack = "bpffs"
	Bubblewrap     Lack = "bubblewrap"
	Cgroup         Lack = "cgroup"
	Chromium       Lack = "chromium"
	Debian         Lack = "debian"
	Emulator       Lack = "emulator"
	Fairlead       Lack = "fairlead"
	Helm           Lack = "helm"
	IPVS           Lack = "ipvs"
	LabImage       Lack = "lab-image"
	Linux514       Lack = "linux-5.14"
	Linux63        Lack = "linux-6.3"
	Linux66        Lack = "linux-6.6"
	MPTCP          Lack = "mptcp"
	NoSCTP         Lack = "no-sctp"
	Parts          Lack = "parts"
	Prometheus     Lack = "prometheus"
	Root           Lack = "root"
	SiteTools      Lack = "site-tools"
	SocketMemory   Lack = "socket-memory"
	TestKernel     Lack = "test-kernel"
	Tun            Lack = "tun"
	UserNamespaces Lack = "user-namespaces"
	VXLAN          Lack = "vxlan"
	Wine           Lack = "wine"
)

const (
	// said is how a skip says its lack.
	said = "lacks %s: %v"
	// AllSkipped begins the line of a program in which no test has run.
	AllSkipped = "ALL TESTS SKIPPED: "
)

// Need skips the test where the machine has not got what it needs.
func Need(t testing.TB, l Lack) {
	t.Helper()
	if l.Explained() {
		Skip(t, l, facts[l].what)
	}
}

// Skip skips the test, which has found that it cannot run here. The test fails if it has: if the machine lacks nothing,
// or, with CI=true, only what could be installed.
func Skip(t testing.TB, l Lack, reason any) {
	t.Helper()
	if !l.Explained() && (ci() || !facts[l].installable) {
		t.Fatalf(said+"; but the machine does not explain that it has not got %s", l, reason, facts[l].what)
	}
	t.Skipf(said, l, reason) //nolint:forbidigo // here the lack has a name
}

// SkipAll says that a whole program of tests cannot run, and returns the exit status of its TestMain.
func SkipAll(l Lack, reason any) (status int) {
	fmt.Fprintf(os.Stderr, AllSkipped+said+"\n", l, reason)
	if ci() || !l.Explained() {
		return 1
	}
	return 0
}

// Inherit skips the test for the lack that another process says, which has run it in its stead.
func Inherit(t testing.TB, output []byte) {
	t.Helper()
	l, reason, ok := Said(string(output))
	if !ok {
		t.Fatalf("the process that runs the test says no lack:\n%s", output)
	}
	Skip(t, l, reason)
}

// Said finds the lack in what a skipped test has written.
func Said(output string) (l Lack, reason string, ok bool) {
	m := regexp.MustCompile(`\blacks ([a-z0-9.-]+): (.*)`).FindStringSubmatch(output)
	if m == nil {
		return "", "", false
	}
	_, known := facts[Lack(m[1])]
	return Lack(m[1]), m[2], known
}

// ci reports whether all that can be installed must be there.
func ci() bool { return os.Getenv("CI") == "true" }
