package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/daemon"
	"fairlead.dev/fairlead/internal/cli"
	"fairlead.dev/fairlead/lab/advise"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

func TestRecommend(t *testing.T) {
	w := newWorld(t)
	offline := "recommend --manifests DIR --node-ip 192.0.2.1 --cluster-cidr 10.244.0.0/16 "
	w.runs("fairlead", offline+"--duration 20s", 0, " for one Service. ", "connection ", "Others have published")
	var r advise.Report
	c := w.command(strings.Fields(strings.ReplaceAll(offline, "DIR", w.manifests) + "--duration 20s -o json")...)
	out, err := c.Output()
	if err := errors.Join(err, json.Unmarshal(out, &r)); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	if r.Plane == "" || r.Why == "" || r.Rows.Services != 1 || r.Current != "" || len(r.Published) == 0 {
		t.Errorf("%s", out)
	}
	for _, name := range daemon.Planes() {
		i := slices.IndexFunc(r.Findings, func(f advise.Finding) bool { return f.Plane == name })
		if i < 0 {
			t.Errorf("nothing is said of %s", name)
			continue
		}
		f := r.Findings[i]
		if told := f.Figures != nil || f.Missing != "" || f.Unmeasured != ""; !told {
			t.Errorf("want something about %s, got %+v", name, f)
		}
	}
	if rules := w.ruleset(); rules != "" {
		t.Errorf("rules on the node:\n%s", rules)
	}
	w.runs("fairlead", "recommend --control-socket "+w.socket, 1, "no proxy listens")
	w.runs("fairlead", offline+"--connections many", 2, "--connections", "many")
	w.runs("fairlead", offline+"--duration 1ms", 2, "--duration")
	w.runs("fairlead", offline+"-o yaml", 2, "--output")
	w.runs("fairlead", offline+"much", 2, "much")

	p := w.start("--proxy-mode", "nftables")
	before := w.ruleset()
	w.runs("fairlead", "recommend --duration 20s --control-socket "+w.socket, 0, " for one Service. ", "now")
	if after := w.ruleset(); after != before {
		t.Errorf("the rules were\n%s\nand are\n%s", before, after)
	}
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
}

// The rows are those of a cluster's API server, which is read with the rights of a node's kube-proxy. The advice says
// the choice, the runner-up, and the condition that changes the choice. A server that shows no objects is not asked for
// ever.
func TestRecommend_cluster(t *testing.T) {
	w := newRealCluster(t)
	w.kubectl("", "create", "clusterrole", "half", "--verb=get,list,watch", "--resource=services")
	w.kubectl("", "create", "clusterrolebinding", "half", "--clusterrole=half", "--user=half")
	var group sync.WaitGroup
	for _, c := range []struct{ user, master, says string }{
		{"half", "", "endpointslices.discovery.k8s.io is forbidden"},
		{"system:kube-proxy", "https://192.0.2.254:1", "192.0.2.254:1: connect: connection refused"},
	} {
		group.Go(func() {
			out := w.recommends(c.user, "--master", c.master)
			if !strings.Contains(out, c.says) || !strings.HasSuffix(out, "EndpointSlices and Nodes within 30s\nexit status 1") {
				t.Errorf("%s, %s: want %q, got %s", c.user, c.master, c.says, out)
			}
		})
	}
	out := w.recommends("system:kube-proxy", "--duration", "20s")
	group.Wait()
	advice, _, _ := strings.Cut(out, "\n")
	m := regexp.MustCompile(`^Use (\w+) for 2 Services.*\. (?:Measured here with|As published,) .* times.*\. ` +
		`Next comes (\w+).*: [\d.]+ times, .*\. It would be .+\.$`).FindStringSubmatch(advice)
	if m == nil || m[1] == m[2] || !slices.Contains(daemon.Planes(), m[1]) || !slices.Contains(daemon.Planes(), m[2]) {
		t.Errorf("%q in\n%s", m, out)
	}
	events, err := w.plane.Client().EventsV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil || slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool { return e.ReportingController == "fairlead" }) {
		t.Errorf("it has written to the API server: %v %v", err, events)
	}
}

// recommends runs the command on the node with a user's kubeconfig. It returns the output, and what is said of a
// failure.
func (w *realCluster) recommends(user string, more ...string) string {
	self, err := os.Executable()
	config, failed := w.relay.Kubeconfig(w.TempDir(), kubernetes.User{Name: user})
	if err := errors.Join(err, failed); err != nil {
		return err.Error()
	}
	c := w.bed.Command(w.Context(), testbed.Node, self, append([]string{"recommend", "--kubeconfig", config,
		"--hostname-override", string(testbed.Node), "--cluster-cidr", "10.244.0.0/16"}, more...)...)
	c.Env = append(os.Environ(), asFairlead+"=1")
	var said bytes.Buffer
	c.Stderr = &said
	out, err := c.Output()
	if err != nil {
		return fmt.Sprintf("%s%s%v", out, &said, err)
	}
	return string(out)
}

// Without root there is advice, too.
func TestRecommend_withoutRoot(t *testing.T) {
	w := openWorld(t)
	out, err := w.unprivileged("-all", "recommend", "--manifests", w.manifests, "--node-ip", "192.0.2.1").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "by published figures, as nothing was measured here") {
		t.Errorf("%v\n%s", err, out)
	}
}

// In containers settings of the kernel are read-only.
func TestRecommend_inAContainer(t *testing.T) {
	w := newWorld(t)
	lack.Need(t, lack.Root)
	self := w.command("recommend", "--manifests", w.manifests, "--node-ip", "192.0.2.1", "--duration", "20s", "-o", "json")
	const script = `mount -o bind,ro /proc/sys /proc/sys && exec "$@"`
	c := w.bed.Command(t.Context(), testbed.Node, "unshare", append([]string{"--mount", "sh", "-c", script, "sh", self.Path},
		self.Args[1:]...)...)
	c.Env = self.Env
	var r advise.Report
	out, err := c.Output()
	if err := errors.Join(err, json.Unmarshal(out, &r)); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	if r.Findings[0].Figures == nil {
		t.Errorf("nothing is measured: %+v", r.Findings[0])
	}
}

// Ctrl-C ends it, at once, wherever it is.
func TestRecommend_interrupted(t *testing.T) {
	w := newWorld(t)
	c := w.command("recommend", "--manifests", w.manifests, "--node-ip", "192.0.2.1", "--duration", "10m")
	var said bytes.Buffer
	c.Stderr = &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer c.Process.Kill() //nolint:errcheck // if it has not ended
	if err := eventually.Poll(t.Context(), func() error { return measures(c.Process.Pid) }); err != nil {
		t.Fatalf("%v: %s", err, &said)
	}
	if err := c.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	err := c.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != cli.ExitInterrupted || !strings.Contains(said.String(), "interrupted") {
		t.Errorf("%v: %s", err, &said)
	}
	if rules := w.ruleset(); rules != "" {
		t.Errorf("rules on the node:\n%s", rules)
	}
}

// measures returns nil if a process has a thread in another network namespace than its first one.
func measures(pid int) error {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/ns/net", pid))
	own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	for _, thread := range threads {
		if at, failed := os.Readlink(thread); err == nil && failed == nil && at != own {
			return nil
		}
	}
	return errors.Join(err, errors.New("nothing is measured"))
}
