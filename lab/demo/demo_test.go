package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/sample"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/programtest"
	"fairlead.dev/fairlead/service"
)

// fairlead is the program whose demo this is.
var fairlead string

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(func() int {
		return programtest.With(func(program string) int {
			fairlead = program
			return m.Run()
		})
	}))
}

// runDemo runs a demo that must leave nothing behind.
func runDemo(ctx context.Context, t *testing.T, proxy []string, files ...string) (string, error) {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	var out bytes.Buffer
	err := Run(ctx, Options{Files: files, Proxy: proxy, Out: &out})
	if left, _ := os.ReadDir(os.TempDir()); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	t.Logf("%v\n%s", err, &out)
	return out.String(), err
}

// Each manifest has a file of the table that it gives, without the figures that differ each time.
// UPDATE_GOLDEN=1 writes these files anew.
func TestRun(t *testing.T) {
	files, err := filepath.Glob("testdata/*.[yj]*")
	if err != nil || len(files) == 0 {
		t.Fatal("no manifests", err)
	}
	for _, file := range append(files, "") {
		name := strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
		args := []string{file}
		if file == "" {
			name, args = "shop", nil
		}
		t.Run(name, func(t *testing.T) {
			out, err := runDemo(t.Context(), t, []string{fairlead, "run"}, args...)
			if err != nil {
				t.Error(err)
			}
			if acts := strings.Count(out, "connections, 0 failed"); file == "" && acts != 2 {
				t.Error("the story does not end well")
			}
			compare(t, filepath.Join("testdata", name+".want"), ways(out))
		})
	}
}

// Mistakes in manifests are said, with their lines, and do not look like success. In strict mode nothing is run.
func TestRun_warnings(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.yaml")
	const text = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, labels: {app: web}}\n" +
		"spec: {containers: [{name: c, ports: [{containerPort: 80}]}]}\n" +
		"---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  selector: {app: wbe}\n  ports: [{port: 80}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := runDemo(t.Context(), t, []string{fairlead, "run"}, file)
	if err != nil {
		t.Error(err)
	}
	for _, want := range []string{
		"Data plane ", "warning: " + file + ":10: Service default/web: spec.selector: app=wbe selects no pod",
		`did you mean "app=web"?`, "refused: no endpoints; see the warning", "all as the manifests say",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the demo does not say %q", want)
		}
	}
	var strict bytes.Buffer
	err = Run(t.Context(), Options{Files: []string{file}, Proxy: []string{"/does/not/exist"}, Out: &strict, Strict: true})
	if err == nil || errors.Is(err, ErrInput) || !strings.Contains(strict.String(), "app=wbe") {
		t.Errorf("strict: %v\n%s", err, &strict)
	}
}

// The data plane that carries connections itself tells another end of the story, and the same before.
func TestRun_userspace(t *testing.T) {
	var out bytes.Buffer
	err := Run(t.Context(), Options{Proxy: []string{fairlead, "run"}, Mode: carries, Out: &out})
	t.Log(&out)
	if err != nil {
		t.Error(err)
	}
	if acts := strings.Count(out.String(), "connections, 0 failed"); acts != 2 {
		t.Error("the story does not end well")
	}
	compare(t, filepath.Join("testdata", "shop.want"), ways(out.String()))
}

// Mode ebpf concerns the cluster only. A machine that cannot serve it says so first, and serves another.
func TestRun_ebpf(t *testing.T) {
	var out bytes.Buffer
	err := Run(t.Context(), Options{Proxy: []string{fairlead, "run"}, Mode: socketwise, Out: &out})
	t.Log(&out)
	if err != nil {
		t.Error(err)
	}
	first, _, _ := strings.Cut(out.String(), "\n")
	if !strings.HasPrefix(first, "Data plane ebpf ") && !strings.HasPrefix(first, "This machine cannot serve mode ebpf") {
		t.Errorf("it begins with %q", first)
	}
	compare(t, filepath.Join("testdata", "shop.want"), ways(out.String()))
}

func TestRun_JSON(t *testing.T) {
	var out bytes.Buffer
	err := Run(t.Context(), Options{
		Files: []string{"testdata/boutique.yaml"}, Proxy: []string{fairlead, "run"}, Out: &out, JSON: true,
	})
	if err != nil {
		t.Error(err)
	}
	var got struct {
		Ways    []way
		Faults  []string
		Skipped map[string]int
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	answered := map[string]int{}
	for _, w := range got.Ways {
		answered[w.Service] += len(w.Answers)
	}
	want := map[string]int{"boutique/catalog": 12, "boutique/mailer": 4, "boutique/storefront": 5, "boutique/storefront-canary": 0}
	if !maps.Equal(answered, want) || len(got.Faults) > 0 || got.Skipped["Ingress"] != 1 {
		t.Errorf("pods that answer: %v, want %v; faults %v, skipped %v", answered, want, got.Faults, got.Skipped)
	}
}

func compare(t *testing.T, file, got string) {
	t.Helper()
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s says:\n%s\nbut it is:\n%s", file, want, got)
	}
}

// served matches the columns of an answered trial: counts, share, source, time.
var served = regexp.MustCompile(`(?m)((?: [0-9]+)+|[0-9]+ to [0-9]+ each) +([0-9]+ %|[0-9]+–[0-9]+ %|one pod) +(kept|node's) +[0-9.]+×$`)

// ways is the table in the output of a demo. A count is replaced by the word some, unless it is 0.
func ways(out string) string {
	_, out, _ = strings.Cut(out, " vs direct\n")
	out, _, _ = strings.Cut(out, "\n\n")
	return served.ReplaceAllStringFunc(out, func(line string) string {
		m := served.FindStringSubmatch(line)
		if m[2] == "one pod" {
			return " one pod, source " + m[3]
		}
		var counts []string
		for _, n := range strings.Fields(m[1]) {
			if n != "0" {
				n = "some"
			}
			counts = append(counts, n)
		}
		return fmt.Sprintf(" %s, source %s", strings.Join(counts, " "), m[3])
	}) + "\n"
}

func write(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "m.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const web = `
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec: {containers: [{name: web, image: web}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80, nodePort: 30080}]}
`

// One broken document is reported; the others live.
func TestRun_brokenDocument(t *testing.T) {
	file := write(t, web+"---\nkind: Service\nmetadata:\n  name: [unclosed\nspec: x\n")
	out, err := runDemo(t.Context(), t, []string{fairlead, "run"}, file)
	if !errors.Is(err, ErrInput) || errors.Is(err, ErrFault) {
		t.Errorf("error %v", err)
	}
	if !strings.Contains(out, "problem: "+file+":15: document 3: does not parse") || strings.Contains(out, "WRONG") {
		t.Error("it does not say what is wrong, or something else is wrong")
	}
	if !strings.Contains(out, "5 ways tried") {
		t.Error("the Service web was not tried")
	}
}

func TestRun_badInput(t *testing.T) {
	for name, file := range map[string]string{
		"missing": filepath.Join(t.TempDir(), "missing.yaml"), "empty": write(t, ""), "no Service": write(t, "kind: Pod"),
		"directory": t.TempDir(),
	} {
		if _, err := runDemo(t.Context(), t, []string{"false"}, file); !errors.Is(err, ErrInput) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The demonstration finds a proxy that does not serve NodePorts, as configured here, and shows its warning.
func TestRun_wrongProxy(t *testing.T) {
	proxy := []string{fairlead, "run", "--nodeport-addresses", "192.0.2.77/32"}
	manifests := web
	for _, name := range []string{"first", "second"} {
		manifests += "---\napiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\n" +
			"spec: {externalIPs: [198.51.100.5], selector: {app: web}, ports: [{port: 80}]}\n"
	}
	out, err := runDemo(t.Context(), t, proxy, write(t, manifests))
	if !errors.Is(err, ErrFault) {
		t.Errorf("error %v", err)
	}
	for _, part := range []string{
		"WRONG: expected: forward", "12 ways tried", "3 NOT as they should be", "taken by default/first, which was first",
		"web NodePort 192.0.2.1:30080/tcp from outside: expected", "Warnings of the proxy", "belongs to Service default/first",
	} {
		if !strings.Contains(out, part) {
			t.Errorf("it does not say %q", part)
		}
	}
}

func TestRun_deadProxy(t *testing.T) {
	_, err := runDemo(t.Context(), t, []string{"sh", "-c", "echo no way; exit 1"}, write(t, web))
	if err == nil || errors.Is(err, ErrInput) || errors.Is(err, ErrFault) || !strings.Contains(err.Error(), "no way") {
		t.Errorf("error %v", err)
	}
}

func TestRun_interrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	t.Setenv("TMPDIR", t.TempDir())
	out, in := io.Pipe()
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if strings.Contains(lines.Text(), "outside") {
				cancel() // in the middle of the table
			}
		}
	}()
	err := Run(ctx, Options{Proxy: []string{fairlead, "run"}, Out: in})
	in.Close()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// start runs the program itself until it says that it stays.
func start(t *testing.T, as *syscall.Credential) (cmd *exec.Cmd, proxy, output string) {
	t.Helper()
	cmd = exec.CommandContext(t.Context(), fairlead, "demo", "--keep", "-f", "-")
	cmd.Dir, cmd.Stdin, cmd.Stderr = "/", strings.NewReader(web), os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		output += lines.Text() + "\n"
		if _, pid, ok := strings.Cut(lines.Text(), "nsenter -t "); ok {
			proxy = strings.Fields(pid)[0]
		}
		if strings.Contains(lines.Text(), "proxy.log") {
			break
		}
	}
	if proxy == "" {
		t.Fatalf("%v\n%s", cmd.Wait(), output)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	return cmd, proxy, output
}

// awaitEnd returns when a process has gone.
func awaitEnd(t *testing.T, pid string) {
	t.Helper()
	eventually.True(t, "the proxy does not outlive the demo", func() bool {
		_, err := os.Stat("/proc/" + pid)
		return errors.Is(err, os.ErrNotExist)
	})
}

func TestCommand_signals(t *testing.T) {
	for signal, want := range map[syscall.Signal]string{
		syscall.SIGINT: "<nil>", syscall.SIGTERM: "<nil>", syscall.SIGKILL: "signal: killed",
	} {
		t.Setenv("TMPDIR", t.TempDir())
		cmd, proxy, _ := start(t, nil)
		if err := cmd.Process.Signal(signal); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); fmt.Sprint(err) != want {
			t.Errorf("%s: %v, want %s", signal, err, want)
		}
		awaitEnd(t, proxy)
		left, err := filepath.Glob(filepath.Join(os.TempDir(), "fairlead-demo-*"))
		if err != nil || len(left) > 0 && signal != syscall.SIGKILL {
			t.Errorf("%s leaves %v, %v", signal, left, err)
		}
	}
}

// The reader ends early, as in "fairlead demo | head".
func TestCommand_brokenPipe(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	cmd := exec.CommandContext(t.Context(), fairlead, "demo")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReaderSize(out, 16).ReadString('\n'); err != nil {
		t.Error(err)
	}
	out.Close()
	if err := cmd.Wait(); err == nil {
		t.Error("exit status 0")
	}
	if left, err := os.ReadDir(os.TempDir()); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestCommand_withoutRoot(t *testing.T) {
	lack.Need(t, lack.Root)
	const nobody = 65534
	cmd, _, output := start(t, &syscall.Credential{Uid: nobody, Gid: nobody})
	if !strings.Contains(output, "all as it should be") {
		t.Error(output)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// newTrial is one that made n connections to some of the pods.
func newTrial(pods, n int, choose func() int) *trial {
	t := &trial{spec: &corev1.Service{}, answers: map[string]int{}, backends: map[string]service.Chance{}}
	for i := range pods {
		t.backends[fmt.Sprint(i)] = service.Chance{Probability: 1 / float64(pods)}
	}
	for range n {
		t.answers[fmt.Sprint(choose())]++
	}
	t.through = make([]time.Duration, n)
	return t
}

func TestTrial_imbalance(t *testing.T) {
	r := rand.New(rand.NewPCG(sample.Seed(t), 1))
	for pods := 1; pods < 40; pods++ {
		n := perBackend * pods
		if fault := newTrial(pods, n, func() int { return r.IntN(pods) }).imbalance(); fault != "" {
			t.Errorf("a fair choice among %d: %s", pods, fault)
		}
		if pods == 1 {
			continue
		}
		if newTrial(pods, n, func() int { return r.IntN(pods - 1) }).imbalance() == "" {
			t.Errorf("one of %d gets nothing, and that is fair", pods)
		}
		favor := func() int { return max(r.IntN(pods+2)-2, 0) } // one gets three times what others get
		if newTrial(pods, n, favor).imbalance() == "" {
			t.Errorf("one of %d is favoured, and that is fair", pods)
		}
	}
}

func TestTrial_closed(t *testing.T) {
	for ranges, want := range map[string]string{
		"":                          "[false false]",
		"192.0.2.9/32":              "[false false]",
		" 192.0.2.0/24 ":            "[false false]",
		"10.0.0.0/8":                "[true false]",
		"fd00:1::/64":               "[false true]",
		"10.0.0.0/8,192.0.2.9/32":   "[false false]",
		"10.0.0.0/8,fd00:1::/64":    "[true true]",
		"10.0.0.0/8,fd00::/64":      "[true false]",
		"not a range,172.16.0.0/12": "[true false]",
	} {
		var got []bool
		for _, source := range []string{"192.0.2.9", "fd00::c000:209"} {
			one := &trial{spec: &corev1.Service{}, source: netip.MustParseAddr(source)}
			one.Kind = "LoadBalancer"
			if ranges != "" {
				one.spec.Spec.LoadBalancerSourceRanges = strings.Split(ranges, ",")
			}
			got = append(got, one.closed())
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%q: %v, want %s", ranges, got, want)
		}
	}
}
