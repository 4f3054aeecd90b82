package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/study"
	studyreport "fairlead.dev/fairlead/lab/study/report"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/programtest"
)

// fairlead is the agent's program, which runs the laboratory as a user does.
var fairlead string

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(func() int {
		return programtest.With(func(agent string) int {
			fairlead = agent
			return m.Run()
		})
	}))
}

// bench is a run of it in a directory of its own.
type bench struct {
	*testing.T
	output, temp string
	mark         string // in the environment of all its processes
	said         bytes.Buffer
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{T: t, output: filepath.Join(t.TempDir(), "results"), temp: t.TempDir()}
	b.mark = "FAIRLEAD_TEST_BENCH=" + b.output
	t.Cleanup(b.checkNothingLeft)
	return b
}

// command measures two contenders beside direct access with ten Services; args are those of bench.
func (b *bench) command(args ...string) *exec.Cmd {
	c := exec.CommandContext(b.Context(), fairlead, append([]string{"bench", "--output", b.output, "--test-kernel", "none"}, args...)...)
	c.Env = append(os.Environ(), "TMPDIR="+b.temp, b.mark)
	c.Stderr = &b.said
	return c
}

// runs checks the exit status of a run, and that it says so.
func (b *bench) runs(status int, says string, args ...string) {
	b.Helper()
	b.uses(status, says, b.command(args...).Args[1:])
}

// uses is runs for all arguments.
func (b *bench) uses(status int, says string, args []string) {
	b.Helper()
	b.said.Reset()
	c := b.command()
	c.Args = append(c.Args[:1], args...)
	out, err := c.Output()
	var exit *exec.ExitError
	got := 0
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		b.Fatal(err)
	}
	if got != status {
		b.Errorf("%v: status %d instead of %d: %s", args, got, status, &b.said)
	}
	if text := string(out) + b.said.String(); !strings.Contains(text, says) {
		b.Errorf("%v: %q is not in\n%s", args, says, text)
	}
}

// result is what the run has written.
func (b *bench) result() *study.Result {
	b.Helper()
	r, err := study.Read(filepath.Join(b.output, "result.json"))
	if err != nil {
		b.Fatalf("%v: %s", err, &b.said)
	}
	return r
}

// turns are those that were measured, sorted.
func turns(r *study.Result) string {
	var all []string
	for _, row := range r.Rows {
		line := fmt.Sprintf("%s size %d: %s, round %d", row.Experiment, row.Size, row.Contender, row.Round)
		switch {
		case row.Failed != "":
			line += " failed"
		case len(row.Figures) == 0:
			line += " without figures"
		}
		all = append(all, line)
	}
	slices.Sort(all)
	return strings.Join(all, "\n")
}

// checkNothingLeft waits for the end of all processes of the run, which those that were killed leave to the kernel.
func (b *bench) checkNothingLeft() {
	b.Helper()
	eventually.Nil(b, "all processes end", func() error {
		if left := b.processes(); len(left) > 0 {
			return fmt.Errorf("still there: %q", left)
		}
		return nil
	})
}

func (b *bench) processes() (left []string) {
	all, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, file := range all {
		env, err := os.ReadFile(file)
		if err == nil && bytes.Contains(env, []byte(b.mark+"\x00")) {
			line, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
			left = append(left, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return left
}

// small are arguments of a short run.
func small(more ...string) []string {
	return append([]string{"connect", "--planes", "nftables,userspace", "--sizes", "10", "--rounds", "2"}, more...)
}

const smallTurns = `connect size 10: direct again, round 1
connect size 10: direct again, round 2
connect size 10: direct, round 1
connect size 10: direct, round 2
connect size 10: nftables, round 1
connect size 10: nftables, round 2
connect size 10: userspace, round 1
connect size 10: userspace, round 2`

func TestBench(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.runs(0, "10 (0 of 8 turns", small()...)
	first := b.result()
	if got := turns(first); got != smallTurns || !first.Complete || first.Services != "generated" || len(first.Missing) > 0 {
		t.Errorf("%+v has the turns\n%s", *first, got)
	}
	for _, file := range []string{"report.md", "report.html", "bench.txt", "journal.jsonl"} {
		if info, err := os.Stat(filepath.Join(b.output, file)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", file, err)
		}
	}
	b.reportsAgain()
	b.comparesWithItself()
	left, err := os.ReadDir(b.temp)
	if err != nil || len(left) > 0 {
		t.Errorf("temporary files: %v %v", left, err)
	}
	b.runs(0, "", small("--rounds", "3", "-o", "json")...) // goes on
	if more := b.result(); len(more.Rows) != 12 || !more.Rows[0].At.Equal(first.Rows[0].At) {
		t.Errorf("with one round more there are\n%s", turns(more))
	}
	b.runs(1, "other contenders: choose another directory (--output)", "connect", "--planes", "nftables")
}

// reportsAgain writes the reports elsewhere.
func (b *bench) reportsAgain() {
	b.Helper()
	self, elsewhere := b.command(), filepath.Join(b.TempDir(), "again")
	c := exec.CommandContext(b.Context(), self.Path, "bench", "report", b.output, "--output", elsewhere)
	c.Env = self.Env
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "\nADVICE\n") || !strings.Contains(string(out), "\n  userspace ") {
		b.Errorf("%v: %s", err, out)
	}
	before, err := os.ReadFile(filepath.Join(b.output, "report.md"))
	after, failed := os.ReadFile(filepath.Join(elsewhere, "report.md"))
	if err := errors.Join(err, failed); err != nil || string(after) != string(before) {
		b.Errorf("the report is another one: %v", err)
	}
}

// comparesWithItself finds no difference.
func (b *bench) comparesWithItself() {
	b.Helper()
	self := b.command()
	c := exec.CommandContext(b.Context(), self.Path, "bench", "compare", b.output, filepath.Join(b.output, "result.json"), "-o", "json")
	c.Env = self.Env
	var changes studyreport.Changes
	out, err := c.Output()
	if err := errors.Join(err, json.Unmarshal(out, &changes)); err != nil || len(changes.Differences) == 0 {
		b.Fatalf("%v: %s", err, out)
	}
	for _, d := range changes.Differences {
		if d.Before != d.After || d.Outcome == "better" || d.Outcome == "worse" {
			b.Errorf("%+v", d)
		}
	}
}

func TestBench_usage(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for says, args := range map[string]string{
		`no experiment "conect"; there are connect,`:      "conect",
		`--planes: "ipfs" is none of nftables, iptables,`: "--planes ipfs",
		`--planes: nftables is there twice`:               "--planes nftables,nftables",
		`--peer: "x" is not NAME=PATH`:                    "--peer x",
		`--peer x: /nonexistent is no program`:            "--peer x=/nonexistent",
		`the name x is there twice`:                       "--peer x=/bin/true --peer x=/bin/false",
		`--quick and --full`:                              "--quick --full",
		`--budget: a time, and not`:                       "--budget 1m --rounds 3",
		`--continue: there is no run to continue`:         "--continue /nonexistent",
		`--sizes: 0 is not between`:                       "--sizes 0",
		`--rounds: -1`:                                    "--rounds -1",
		`-o: "yaml" is neither`:                           "-o yaml",
		`unknown flag: --plane`:                           "--plane ebpf",
		`--test-kernel: /nonexistent`:                     "--test-kernel /nonexistent",
		`--manifests: read manifests: open /nonexistent`:  "--manifests /nonexistent",
		`--kubeconfig: /nonexistent: stat /nonexistent`:   "--kubeconfig /nonexistent",
		`--sizes: the Services are those of --kubeconfig`: "--kubeconfig /nonexistent --sizes 10",
		`--kubeconfig and --manifests exclude each other`: "--kubeconfig /nonexistent --manifests /nonexistent",
	} {
		b.runs(2, says, strings.Fields(args)...)
	}
	if _, err := os.Stat(b.output); err == nil {
		t.Error("a run was begun")
	}
	b.runs(0, "rolling ", "--list")
	for says, args := range map[string]string{
		"accepts 2 arg(s)": "compare", `-o: "yaml" is none of text, json, markdown`: "compare a b -o yaml",
		"open a: no such": "compare a b", "open x: no such": "report x",
	} {
		b.uses(2, says, strings.Fields("bench "+args))
	}
}

// Two do not write to one journal.
func TestBench_twice(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	if err := os.Mkdir(b.output, 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(b.output, "journal.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	b.runs(1, "another fairlead bench writes to "+b.output, small()...)
}

// A killed run leaves nothing but what it has found, and goes on from there.
func TestBench_killed(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	c := b.start(small("--rounds", "1000")...)
	rows := b.awaitRows(5)
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	b.checkNothingLeft()
	b.runs(0, "", small()...)
	if r := b.result(); !r.Complete || len(r.Rows) < rows || !strings.Contains(turns(r)+"\n", "userspace, round 2\n") {
		t.Errorf("there were %d rows, and there are\n%s", rows, turns(r))
	}
}

func TestBench_interrupted(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	c := b.start(small("--rounds", "1000")...)
	rows := b.awaitRows(5)
	if err := c.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	err := c.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != cli.ExitInterrupted || !strings.Contains(b.said.String(), "goes on from there") {
		t.Errorf("%v: %s", err, &b.said)
	}
	if r := b.result(); r.Complete || len(r.Rows) < rows || strings.Contains(turns(r), "failed") {
		t.Errorf("there were %d rows, and there are, complete: %t,\n%s", rows, r.Complete, turns(r))
	}
	b.uses(0, "userspace", []string{"bench", "--continue", b.output, "--rounds", "3"})
	r := b.result()
	if !r.Complete || len(r.Rows) < 3*4 || strings.Count(turns(r)+"\n", ", round 3\n") != 4 {
		t.Errorf("it did not go on: complete: %t,\n%s", r.Complete, turns(r))
	}
}

// There is a first round however short the time is, and with more time there are more. Both end with a scoreboard that
// has a figure of each data plane.
func TestBench_budget(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	board := regexp.MustCompile(`(?s)\n  nftables +\d.*\n  userspace +\d.*\nADVICE\n`)
	run := func(args ...string) int {
		b.Helper()
		c := b.command()
		c.Args = append(c.Args[:1], args...)
		if out, err := c.Output(); err != nil || !board.Match(out) {
			b.Errorf("%v: %v, and there is no scoreboard in\n%s%s", args, err, out, &b.said)
		}
		return len(b.result().Rows)
	}
	before := run("bench", "connect", "--planes", "nftables,userspace", "--sizes", "10", "--quick", "--budget", "1ms",
		"--test-kernel", "none", "--output", b.output)
	if after := run("bench", "--continue", b.output, "--budget", "10s"); before != 4 || after <= before {
		t.Errorf("there were %d rows, and there are %d", before, after)
	}
}

// The budget of --quick leaves twenty seconds of its three minutes to the end of all proxies and the reports. A test of
// lab/study has a run keep to it.
func TestBench_budgets(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]time.Duration{
		"--quick": 3*time.Minute - 20*time.Second, "": time.Hour, "--full": 3 * time.Hour, "--quick --budget 5m": 5 * time.Minute,
		"--quick --rounds 3": 0, "--quick --quick=false --budget 0s --rounds 0": time.Hour, // as --continue has it
	} {
		var b benchmark
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		b.addFlagsTo(f)
		if err := f.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		o, err := b.options(nil)
		if err != nil || o.Budget != want || len(o.Experiments) != len(study.Experiments()) {
			t.Errorf("%q: %v, the budget is %s, and there are %d experiments", args, err, o.Budget, len(o.Experiments))
		}
	}
}

// start begins a run.
func (b *bench) start(args ...string) *exec.Cmd {
	b.Helper()
	c := b.command(args...)
	if err := c.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Process.Kill() }) // if it has not ended
	return c
}

// awaitRows waits until so many turns are over, and returns how many are.
func (b *bench) awaitRows(most int) (n int) {
	b.Helper()
	err := eventually.Poll(b.Context(), func() error {
		text, err := os.ReadFile(filepath.Join(b.output, "journal.jsonl"))
		if n = bytes.Count(text, []byte("\n")) - 1; err == nil && n < most { // the first line is no row
			err = fmt.Errorf("%d of %d results", n, most)
		}
		return err
	})
	if err != nil {
		b.Fatalf("%v: %s", err, &b.said)
	}
	return n
}

// On a full disk what was found is kept, and when there is room it goes on.
func TestBench_diskFull(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	if err := os.Mkdir(b.output, 0o755); err != nil {
		t.Fatal(err)
	}
	const script = `mount -t tmpfs -o size=16k none "$1" && shift || exit 9
"$@" --rounds 100 >&2; echo "status $?"
grep -c '"round"' "$0"/journal.jsonl
mount -o remount,size=1m "$0" && "$@" && grep -c '"round"' "$0"/journal.jsonl`
	c := b.command(small()...)
	sh := exec.CommandContext(t.Context(), "unshare", append([]string{"--mount", "sh", "-c", script, b.output, b.output}, c.Args...)...)
	sh.Env, sh.Stderr = c.Env, &b.said
	out, err := sh.Output()
	if err != nil || !strings.HasPrefix(string(out), "status 1\n") {
		t.Fatalf("%v:\n%s\n%s", err, out, &b.said)
	}
	var first, last int // a row may not have been written to its end
	lines := strings.Fields(string(out))
	if _, err := fmt.Sscan(lines[2]+" "+lines[len(lines)-1], &first, &last); err != nil || first < 5 || last < first-1 {
		t.Errorf("%d rows, and then %d: %v\n%s", first, last, err, out)
	}
	for _, want := range []string{"no space left on device; what was found before is kept", "Medians of rounds"} {
		if !strings.Contains(b.said.String(), want) {
			t.Errorf("%q is not in %s", want, &b.said)
		}
	}
}

// A peer that dies does not stop the others.
func TestBench_deadPeer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	dead := filepath.Join(t.TempDir(), "dead")
	if err := os.WriteFile(dead, []byte("#!/bin/sh\necho My last words. >&2\nexit 3\n"), 0o755); err != nil { //nolint:gosec // it is a program
		t.Fatal(err)
	}
	b.runs(1, "dead iptables, dead nftables, dead ipvs left out: its last words: My last words.", small("--peer", "dead="+dead)...)
	r := b.result()
	if got := turns(r); got != smallTurns || r.Complete || len(r.Missing) != len(study.PeerModes()) {
		t.Errorf("%+v are missing, and there are\n%s", r.Missing, got)
	}
	if text, err := os.ReadFile(filepath.Join(b.output, "report.md")); !strings.Contains(string(text), "My last words.") {
		t.Errorf("the report does not say who is missing: %v", err)
	}
	for _, m := range r.Missing {
		if m.Why != "its last words: My last words." {
			t.Errorf("%+v", m)
		}
	}
}

// Those of an API server are read once, and nothing is written there.
func TestBench_apiServer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	catalog, err := kubernetes.NewCatalog(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "own"},
		Spec:       corev1.ServiceSpec{ClusterIP: "10.43.0.1", Ports: []corev1.ServicePort{{Name: "web", Port: 80}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var wrote atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			wrote.Store(true)
		}
		catalog.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "a",
 "clusters": [{"name": "a", "cluster": {"server": %q}}], "users": [{"name": "a", "user": {}}],
 "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}]}`, server.URL)
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	b.runs(0, "", "connect", "--planes", "nftables", "--rounds", "1", "--kubeconfig", kubeconfig)
	if r := b.result(); r.Services != "1 from the API server of "+kubeconfig || len(r.Rows) != 3 || wrote.Load() {
		t.Errorf("with %s (written: %t) there are\n%s", r.Services, wrote.Load(), turns(r))
	}
}

// The user's own Services are in place of generated ones.
func TestBench_ownServices(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	var text bytes.Buffer
	for i := range 5 {
		fmt.Fprintf(&text, `---
{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "own-%d", "namespace": "prod"},
 "spec": {"clusterIP": "10.43.0.%d", "ports": [{"name": "web", "port": 8000}]}}
`, i, i+1)
	}
	manifests := filepath.Join(t.TempDir(), "own.yaml")
	if err := os.WriteFile(manifests, append(text.Bytes(), "---\nkind: [\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"connect", "--planes", "nftables", "--rounds", "1", "--manifests", manifests, "-o", "json"}
	out, err := b.command(args...).Output()
	var r study.Result
	if err := errors.Join(err, json.Unmarshal(out, &r)); err != nil {
		t.Fatalf("%v: %s", err, &b.said)
	}
	const want = "connect size 5: direct again, round 1\nconnect size 5: direct, round 1\nconnect size 5: nftables, round 1"
	if got := turns(&r); got != want || r.Services != "5 from "+manifests {
		t.Errorf("with %s there are\n%s", r.Services, got)
	}
	if !strings.Contains(b.said.String(), "problem: "+manifests) {
		t.Errorf("nothing is said of what does not parse: %s", &b.said)
	}
}
