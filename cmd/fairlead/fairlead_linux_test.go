package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/programtest"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// asFairlead makes the test binary the program itself.
const asFairlead = "FAIRLEAD_TEST_EXECUTE"

func TestMain(m *testing.M) {
	vm.Guest()
	traffic.Main()
	if os.Getenv(asFairlead) != "" {
		main()
	}
	os.Exit(testbed.RunTests(func() int {
		return programtest.With(func(string) int { return m.Run() })
	}))
}

// world is a virtual cluster with two pods, and a directory of manifests for the node.
type world struct {
	*testing.T
	bed       *testbed.Bed
	manifests string
	socket    string
	inside    []string // the command that starts others, in a mount namespace, for example; empty: none is needed
}

const web = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  ports: [{port: 80, targetPort: 8080, nodePort: 30080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- addresses: [POD-A]
- addresses: [POD-B]
`

var (
	clusterIP = netip.MustParseAddrPort("10.96.0.10:80")
	nodePort  = netip.MustParseAddrPort("192.0.2.1:30080")
)

func newWorld(t *testing.T) *world { return newWorldOf(t, testbed.Spec{}) }

func newWorldOf(t *testing.T, s testbed.Spec) *world {
	t.Parallel()
	bed := testbed.Need(t, s)
	w := &world{T: t, bed: bed, manifests: t.TempDir(), socket: filepath.Join(t.TempDir(), "socket")}
	for name, node := range map[string]testbed.Place{"pod-a": testbed.Node, "pod-b": "node-b"} {
		ports := []testbed.PodPort{
			{Protocol: model.TCP, Port: 8080}, {Protocol: model.TCP, Port: 8081}, {Protocol: model.UDP, Port: 5353},
		}
		if _, err := bed.AddPod(t.Context(), testbed.PodSpec{Name: name, Node: node, Ports: ports}); err != nil {
			t.Fatal(err)
		}
	}
	w.write("web.yaml", web)
	return w
}

// write replaces a manifest as editors do: a new file takes the place of the old one.
func (w *world) write(name, text string) {
	w.Helper()
	text = strings.NewReplacer("POD-A", w.bed.Addr("pod-a", false).String(), "POD-B", w.bed.Addr("pod-b", false).String()).Replace(text)
	path := filepath.Join(w.manifests, name)
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		w.Fatal(err)
	}
}

func (w *world) command(args ...string) *testbed.Cmd { return w.commandOn(testbed.Node, args...) }

func (w *world) commandOn(p testbed.Place, args ...string) *testbed.Cmd {
	self, err := os.Executable()
	if err != nil {
		w.Fatal(err)
	}
	command := slices.Concat(w.inside, []string{self}, args)
	c := w.bed.Command(context.WithoutCancel(w.Context()), p, command[0], command[1:]...)
	c.Env = append(os.Environ(), asFairlead+"=1")
	return c
}

// proxy is a running daemon.
type proxy struct {
	*testbed.Cmd
	w     *world
	lines chan string // of its log, until it ends
	tail  tail
}

// tail is the end of a log, for a test that fails.
type tail struct {
	sync.Mutex
	lines []string
}

func (t *tail) add(line string) {
	t.Lock()
	defer t.Unlock()
	t.lines = append(t.lines[max(0, len(t.lines)-99):], line)
}

// start starts the daemon, with more flags, and returns when it has programmed the kernel.
func (w *world) start(flags ...string) *proxy {
	w.Helper()
	run := []string{"run", "--manifests", w.manifests, "--cluster-cidr", "10.244.0.0/16", "--node-ip", "192.0.2.1",
		"--control-socket", w.socket, "--healthz-bind-address", "127.0.0.1:10256"}
	if own := w.bed.Cgroup(); own != "" { // in that of the machine, mode ebpf would serve the sockets of all other tests
		run = append(run, "--cgroup-root", own)
	}
	p := w.follow(w.command(append(run, flags...)...))
	p.await("msg=programmed")
	return p
}

// follow starts a daemon and follows its log.
func (w *world) follow(c *testbed.Cmd) *proxy {
	w.Helper()
	out, in, err := os.Pipe() // it ends with the process, before Wait is called
	if err != nil {
		w.Fatal(err)
	}
	c.Stderr = in
	if err := errors.Join(c.Start(), in.Close()); err != nil {
		w.Fatal(err)
	}
	p := &proxy{Cmd: c, w: w, lines: make(chan string, 1000)}
	go func() {
		defer close(p.lines)
		defer out.Close()
		for s := bufio.NewScanner(out); s.Scan(); {
			p.tail.add(s.Text())
			p.lines <- s.Text()
		}
	}()
	w.Cleanup(func() {
		p.tail.Lock()
		defer p.tail.Unlock()
		if w.Failed() {
			w.Logf("the end of the program's log:\n%s", strings.Join(p.tail.lines, "\n"))
		}
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	return p
}

// await waits until the daemon logs something.
func (p *proxy) await(text string) {
	p.w.Helper()
	ctx, cancel := eventually.Context(p.w.Context())
	defer cancel()
	var seen []string
	for {
		select {
		case line, ok := <-p.lines:
			seen = append(seen, line)
			if strings.Contains(line, text) {
				return
			}
			if ok {
				continue
			}
		case <-ctx.Done():
		}
		p.w.Fatalf("the proxy did not log %q, but:\n%s", text, strings.Join(seen, "\n"))
	}
}

// probe returns the pod that answers at an address, or the failure. On a busy machine a packet may be lost, and a client
// sends it again after a second, and after two more.
func (w *world) probe(from testbed.Place, to netip.AddrPort) string {
	o, err := w.bed.Probe(w.Context(), testbed.Probe{From: from, To: to, Protocol: model.TCP, Timeout: 15 * time.Second})
	switch {
	case err != nil:
		return err.Error()
	case o.Result == testbed.Answered:
		return o.Backend
	}
	return o.Result.String()
}

// reaches waits until probes of the ClusterIP say want.
func (w *world) reaches(want string) {
	w.Helper()
	eventually.Equal(w, clusterIP.String()+" answers", want, func() string { return w.probe(testbed.Node, clusterIP) })
}

func TestRun_restartUnderLoad(t *testing.T) {
	w := newWorld(t)
	p := w.start()
	ctx, stop := context.WithCancel(t.Context())
	var load sync.WaitGroup
	var answered, failed atomic.Int64
	places := map[testbed.Place]netip.AddrPort{testbed.Node: clusterIP, "pod-a": clusterIP, "outside": nodePort}
	for from, to := range places {
		conn, err := w.bed.Dial(t.Context(), from, model.TCP, to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		load.Go(func() { w.talk(ctx, conn) })
		load.Go(func() {
			for ctx.Err() == nil {
				if got := w.probe(from, to); strings.HasPrefix(got, "pod-") {
					answered.Add(1)
				} else if ctx.Err() == nil {
					failed.Add(1)
					t.Errorf("from %s: %s", from, got)
				}
			}
		})
	}
	for range 3 {
		before := answered.Load()
		_ = p.Process.Kill()
		_ = p.Wait()
		p = w.start()
		for answered.Load() < before+100 && failed.Load() == 0 {
			w.probe(testbed.Node, clusterIP)
		}
	}
	stop()
	load.Wait()
	t.Logf("%d connections, %d failed, during 3 times kill -9 and restart", answered.Load(), failed.Load())
}

// talk goes on talking on a connection, which must stay with its backend.
func (w *world) talk(ctx context.Context, conn net.Conn) {
	lines := bufio.NewReader(conn)
	var first string
	for ctx.Err() == nil {
		_ = conn.SetDeadline(time.Now().Add(eventually.Patience()))
		line, err := lines.ReadString('\n')
		if first == "" {
			first = line
		}
		if _, werr := io.WriteString(conn, "more\n"); err != nil || werr != nil || line != first {
			w.Errorf("an open connection broke: %q after %q: %v", line, first, errors.Join(err, werr))
			return
		}
	}
}

func TestRun_editsAreApplied(t *testing.T) {
	w := newWorld(t)
	p := w.start()
	w.write("web.yaml", strings.Replace(web, "- addresses: [POD-A]\n", "", 1))
	w.reaches("pod-b")
	w.write("web.yaml", strings.Replace(web, "- addresses: [POD-B]\n", "", 1))
	w.reaches("pod-a")
	// A file that does not parse changes nothing, and does not keep others from changing.
	w.write("web.yaml", web[:len(web)/2]+"\n  - {")
	p.await("web.yaml")
	w.reaches("pod-a")
	w.write("other.yaml", strings.NewReplacer("web", "other", "10.96.0.10", "10.96.0.11", "30080", "30081").Replace(web))
	other := netip.MustParseAddrPort("10.96.0.11:80")
	eventually.True(t, "a new Service beside a broken file is served", func() bool {
		return strings.HasPrefix(w.probe(testbed.Node, other), "pod-")
	})
	if err := os.Remove(filepath.Join(w.manifests, "web.yaml")); err != nil {
		t.Fatal(err)
	}
	w.reaches("unreachable")
}

func TestRun_repairsWhatOthersBreak(t *testing.T) {
	w := newWorld(t)
	p := w.start()
	if out, err := w.bed.Command(t.Context(), testbed.Node, "nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p.await("fairlead") // a line that names the table
	for w.probe(testbed.Node, clusterIP) != "pod-b" {
	}
}

func TestRun_stopsAndIsCleaned(t *testing.T) {
	w := newWorld(t)
	p := w.start()
	for _, args := range []string{"clean", "clean --own", "run --cleanup"} {
		out, err := w.command(strings.Fields(args)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "stop it first") {
			t.Errorf("%s beside a running proxy: %v, %s", args, err, out)
		}
	}
	if err := p.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.await("Fairlead ends: its rules stay in the kernel")
	if err := p.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	if _, err := os.Stat(w.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the control socket is still there: %v", err)
	}
	if got := w.probe(testbed.Node, clusterIP); !strings.HasPrefix(got, "pod-") {
		t.Errorf("after the proxy has stopped: %s", got)
	}
	for _, want := range []string{"nftables: removed what there was\n", "nothing was left of Fairlead or kube-proxy\n"} {
		if out, err := w.command("clean").CombinedOutput(); err != nil || string(out) != want {
			t.Errorf("clean: %v, %s", err, out)
		}
	}
	out, err := w.bed.Command(t.Context(), testbed.Node, "nft", "list", "ruleset").CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("after clean: %v\n%s", err, out)
	}
}

// TestExplain_affinity: explain asks the data plane for sessions.
func TestExplain_affinity(t *testing.T) {
	w := newWorld(t)
	w.write("web.yaml", strings.Replace(web, "type: NodePort", "sessionAffinity: ClientIP", 1))
	w.start()
	who := map[string]string{"pod-a": "10.244.1.2:8080", "pod-b": "10.244.2.2:8080"}[w.probe("pod-a", clusterIP)]
	status, out := w.execute("explain", w.bed.Addr("pod-a", false).String(), clusterIP.String(), "--control-socket", w.socket)
	if want := "session affinity: the client keeps " + who; status != 0 || who == "" || !strings.Contains(out, want) {
		t.Errorf("exit status %d, no %q in\n%s", status, want, out)
	}
}

func TestInspection(t *testing.T) {
	w := newWorld(t)
	w.start()
	dump := "backend default/web cluster 10.244.1.2:8080 local\n" +
		"backend default/web cluster 10.244.2.2:8080 local\n" +
		"frontend 10.96.0.10:80/tcp any forward default/web cluster snat offcluster\n" +
		"frontend 192.0.2.1:30080/tcp any forward default/web cluster snat always\n" +
		"guard 10.96.0.10/32 reject\n" +
		"pods 10.244.0.0/16\n" +
		"pool default/web cluster\n"
	offline := []string{"--manifests", w.manifests, "--cluster-cidr", "10.244.0.0/16", "--node-ip", "192.0.2.1"}
	online := []string{"--control-socket", w.socket}
	for _, where := range [][]string{offline, online} {
		for _, c := range []struct {
			args   string
			status int
			want   string
		}{
			{"dump", 0, dump},
			{"dump -o json", 0, `"prefixes"`},
			{"explain node 10.96.0.10:80", 0, "50.0%  10.244.1.2:8080"},
			{"explain 10.244.1.9 10.96.0.10:80 -o json", 0, `"probability": 0.5`},
			{"explain 10.244.1.9 10.96.0.10:81", 1, "reject"},
			{"explain 10.244.1.9 10.96.0.10:80", 0, "10.244.1.9 (as if on eth0) -> "},
			{"explain 10.244.1.9 10.96.0.10:80 --interface eth0", 0, "10.244.1.9 (on eth0) -> "},
			{"explain 10.244.1.9 8.8.8.8:53/udp", 1, "pass"},
			{"explain nobody 10.96.0.10:81", 2, `"nobody" is neither an IP address nor the word node`},
			{"explain node 10.96.0.10", 2, "is not an address and port"},
			{"dump -o yaml", 2, "--output"},
		} {
			status, out := w.execute(append(strings.Fields(c.args), where...)...)
			if status != c.status || !strings.Contains(out, c.want) {
				t.Errorf("%s %s: exit status %d, want %d, and this in the output: %s\n%s", c.args, where[0], status, c.status, c.want, out)
			}
		}
	}
}

func TestStatus(t *testing.T) {
	w := newWorld(t)
	ask := func(status int, args string, has ...string) {
		t.Helper()
		got, out := w.execute(append(strings.Fields("status --control-socket "+w.socket), strings.Fields(args)...)...)
		if got != status {
			t.Errorf("status %s: exit status %d, want %d", args, got, status)
		}
		for _, text := range has {
			if !strings.Contains(out, text) {
				t.Errorf("status %s: no %q in\n%s", args, text, out)
			}
		}
	}
	ask(1, "", "no proxy listens on "+w.socket)
	ask(2, "-o yaml", "--output")
	ask(2, "--manifests DIR", "unknown flag: --manifests")
	w.start()
	ask(0, "", "healthy          yes\n", ", load balancers may use it\n", "data plane       nftables\n", "in force since   20",
		"waiting          nothing\n", "failures         none\n", "drifts repaired  0\n", "2 frontends, 1 pool, 1 guard, 0 health checks\n")
	ask(0, "-o json", `"healthy": true`, `"nodeEligible": true`, `"plane": "nftables"`, `"inForceSince": "20`, `"frontends": 2`)
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	w.write("node.yaml", "apiVersion: v1\nkind: Node\nmetadata: {name: "+strings.ToLower(name)+"}\n"+
		"spec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}\n")
	eventually.True(w, "load balancers should not use the node", func() bool {
		status, _ := w.execute("status", "--control-socket", w.socket)
		return status == 1
	})
	ask(1, "", "healthy          yes\n", strings.ToLower(name)+", load balancers should not use it")
	ask(1, "-o json", `"healthy": true`, `"nodeEligible": false`)
}

// execute runs a command line on the node and returns its exit status and all it printed.
func (w *world) execute(args ...string) (status int, out string) {
	w.Helper()
	text, err := w.command(args...).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.Fatal(err)
	}
	if exit != nil {
		status = exit.ExitCode()
	}
	return status, string(text)
}

func TestUsage(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{"", 0, "Available Commands"},
		{"nonsense", 2, `unknown command "nonsense"`},
		{"run", 2, "no API server: clientConnection.kubeconfig (--kubeconfig)"},
		{"run --nonsense", 2, "unknown flag: --nonsense"},
		{"run --manifests /does/not/exist", 2, "/does/not/exist"},
		{"run --manifests DIR --proxy-mode kernelspace", 2, "--proxy-mode"},
		{"run --manifests DIR --node-ip 1.2.3", 2, "--node-ip"},
		{"run --manifests DIR --cluster-cidr 10.0.0.0", 2, "--cluster-cidr"},
		{"run --manifests DIR --detect-local-mode Magic", 2, "--detect-local-mode"},
		{"run --manifests DIR --detect-local-mode BridgeInterface", 2, "--pod-bridge-interface"},
		{"run --manifests DIR --nodeport-addresses everywhere", 2, "everywhere"},
		{"run --manifests DIR --healthz-bind-address nowhere", 2, "--healthz-bind-address"},
		{"dump", 1, "no proxy listens"},
		{"dump --counters", 1, "no proxy listens"},
		{"explain node 10.96.0.10:80", 1, "or name --manifests"},
		{"explain node svc/a/b", 1, "or name --manifests"},
		{"audit", 1, "or name --manifests"},
		{"status", 1, "no proxy listens"},
		{"services", 1, "no proxy listens"},
		{"why a", 1, "no proxy listens"},
		{"probe", 1, "no proxy listens"},
		{"monitor", 1, "no proxy listens"},
		{"switch ipvs", 1, "no proxy listens"},
	} {
		status, out := w.execute(strings.Fields(strings.ReplaceAll(c.args, "DIR", w.manifests))...)
		if status != c.status || !strings.Contains(out, c.want) {
			t.Errorf("fairlead %s: exit status %d, want %d, and this in the output: %s\n%s", c.args, status, c.status, c.want, out)
		}
		if bytes.Contains([]byte(out), []byte("goroutine ")) {
			t.Errorf("fairlead %s: panics:\n%s", c.args, out)
		}
	}
}
