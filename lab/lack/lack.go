// Package lack skips tests for what a machine lacks: a test names one of the lacks that are known here, and the list of
// skips (skips.txt) names the test. What else stands in a test's way is a failure.
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

// Lack is something that a test needs and a machine may do without.
type Lack string

const (
	// Root is being root of the machine itself, not only of a user namespace: such tests start processes of other users,
	// or load programs into the kernel.
	Root Lack = "root"
	// UserNamespaces are those that the user may make.
	UserNamespaces Lack = "user-namespaces"
	// Cgroup is the right to make control groups of version 2.
	Cgroup Lack = "cgroup"
	// BPFFS is the right to make a file system of type bpf.
	BPFFS Lack = "bpffs"
	// Linux514 and the next ones are what kernels can do from that version on.
	Linux514 Lack = "linux-5.14"
	Linux63  Lack = "linux-6.3"
	Linux66  Lack = "linux-6.6"
	// BPFConntrack is the functions by which programs use connection tracking.
	BPFConntrack Lack = "bpf-conntrack"
	// IPVS is the kernel's, where a test or benchmark cannot run in the test kernel.
	IPVS Lack = "ipvs"
	// MPTCP is the protocol.
	MPTCP Lack = "mptcp"
	// NoSCTP is a kernel without SCTP.
	NoSCTP Lack = "no-sctp"
	// SocketMemory is memory of their own for sockets, which recent kernels take where a processor has cmpxchg16b.
	SocketMemory Lack = "socket-memory"
	// Tun is devices of type tun.
	Tun Lack = "tun"
	// VXLAN is devices of type vxlan.
	VXLAN Lack = "vxlan"
	// TestKernel is the User-Mode Linux of ./dev kernel.
	TestKernel Lack = "test-kernel"
	// Parts are the programs of a cluster, which ./dev parts builds.
	Parts Lack = "parts"
	// Helm is the program that ./dev tool helm compiles.
	Helm Lack = "helm"
	// Chromium is the browser.
	Chromium Lack = "chromium"
	// Prometheus is the server, and its promtool.
	Prometheus Lack = "prometheus"
	// Fairlead is the proxy under test, which FAIRLEAD_TEST_PROXY may replace by one that has less.
	Fairlead Lack = "fairlead"
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
		Skip(t, l, "looked at the machine")
	}
}

// Skip skips the test, which has found that it cannot run here. With CI=true the machine must explain that, else the
// test fails.
func Skip(t testing.TB, l Lack, reason any) {
	t.Helper()
	if CI() && !l.Explained() {
		t.Fatalf("the test "+said+"; but this machine has what is needed, or CI must provide it", l, reason)
	}
	t.Skipf(said, l, reason) //nolint:forbidigo // here the lack has a name
}

// SkipAll says that a whole program of tests cannot run, and returns the exit status of its TestMain.
func SkipAll(l Lack, reason any) (status int) {
	fmt.Fprintf(os.Stderr, AllSkipped+said+"\n", l, reason)
	if CI() {
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
	_, known := machine[Lack(m[1])]
	return Lack(m[1]), m[2], known
}

// CI reports whether all that a machine can have must be there.
func CI() bool { return os.Getenv("CI") == "true" }
