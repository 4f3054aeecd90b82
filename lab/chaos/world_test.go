package chaos

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
)

// Pods that may fail, two on each node, and those that never do.
var (
	pods = [...]string{"a1", "a2", "b1", "b2"}
	calm = [...]string{"calm1", "calm2"}
)

const client testbed.Place = "client"

// offered is a Service. Each has ports of its own at the pods: clients that the node hides, and the node itself, have the
// same address there.
type offered struct {
	name         string
	number       int
	sticky, calm bool
}

var services = []offered{
	{"web", 1, false, false}, {"own", 2, false, false}, {"sticky", 3, true, false},
	{"calm", 4, false, true}, {"calm-own", 5, false, true}, {"calm-sticky", 6, true, true},
}

func (o offered) target() int { return 8080 + o.number }

func (o offered) manifest(addrs []string) string {
	affinity := "None"
	if o.sticky {
		affinity = "ClientIP"
	}
	var endpoints strings.Builder
	for _, a := range addrs {
		fmt.Fprintf(&endpoints, `{"addresses": [%q], "conditions": {"ready": true}},`, a)
	}
	return fmt.Sprintf(`---
{"apiVersion": "v1", "kind": "Service", "metadata": {"name": %[1]q, "namespace": "chaos"}, "spec": {"type": "NodePort",
 "clusterIP": "10.96.0.%[2]d", "sessionAffinity": %[3]q,
 "ports": [{"port": 80, "targetPort": %[4]d, "nodePort": %[5]d}]}}
---
{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
 "metadata": {"name": %[1]q, "namespace": "chaos", "labels": {"kubernetes.io/service-name": %[1]q}},
 "ports": [{"port": %[4]d, "protocol": "TCP"}], "endpoints": [%[6]s]}
`, o.name, 10+o.number, affinity, o.target(), 31000+o.number, strings.TrimSuffix(endpoints.String(), ","))
}

// world is a cluster whose node has the agent.
type world struct {
	*testing.T
	ctx    context.Context // ends with the first broken invariant
	broken context.CancelFunc
	bed    *testbed.Bed
	dir    string
	inside []string // the words with which each command begins
	began  time.Time
	proxy  *kubernetes.Proxy
	served map[string]*served // by pod

	mu sync.Mutex
	model
	stats
	history []string
	wrong   bool
	felt    time.Time // when pulse looked last
	lost    float64   // seconds that this process did not get lately
	still   time.Time // when the machine was too busy last
	spared  int       // findings that were late then
}

func newWorld(t *testing.T, ebpf bool) *world {
	w := &world{T: t, bed: testbed.Need(t, testbed.Spec{Cgroup: ebpf}), dir: t.TempDir(), served: map[string]*served{}}
	w.ctx, w.broken = context.WithCancel(t.Context())
	w.model, w.stats = newModel(), newStats()
	w.require(os.Mkdir(w.manifests(), 0o755))
	for i, name := range append(pods[:], calm[:]...) {
		spec := testbed.PodSpec{Name: name, Node: testbed.Node}
		if i == 2 || i == 3 {
			spec.Node = testbed.NodeB
		}
		_, err := w.bed.AddPod(w.ctx, spec)
		w.require(errors.Join(err, w.serve(name)))
	}
	_, err := w.bed.AddPod(w.ctx, testbed.PodSpec{Name: string(client), Node: testbed.Node})
	w.require(errors.Join(err, w.publish()))
	if ebpf {
		w.holdPins()
	}
	return w
}

func (w *world) require(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// holdPins makes a mount namespace with a file system of type bpf that outlives the agent.
func (w *world) holdPins() {
	const run = "mount -t bpf bpf /sys/fs/bpf && echo mounted && exec sleep infinity"
	holder := w.bed.Command(context.WithoutCancel(w.ctx), testbed.Node, "unshare", "--mount", "sh", "-c", run)
	out, err := holder.StdoutPipe()
	w.require(errors.Join(err, holder.Start()))
	w.Cleanup(func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	})
	_, err = bufio.NewReader(out).ReadString('\n')
	w.require(err)
	w.inside = []string{"nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", holder.Process.Pid), "--"}
}

func (w *world) manifests() string { return filepath.Join(w.dir, "manifests") }

func (w *world) socket() string { return filepath.Join(w.dir, "control") }

// publish writes the Services, with the pods that the API server knows.
func (w *world) publish() error {
	var text strings.Builder
	for _, o := range services {
		var addrs []string
		for _, name := range calm {
			if o.calm {
				addrs = append(addrs, w.address(name))
			}
		}
		for i, name := range pods {
			if !o.calm && w.pods[i].listed {
				addrs = append(addrs, w.address(name))
			}
		}
		text.WriteString(o.manifest(addrs))
	}
	hidden := filepath.Join(w.dir, "next")
	return errors.Join(os.WriteFile(hidden, []byte(text.String()), 0o644),
		os.Rename(hidden, filepath.Join(w.manifests(), "chaos.yaml")))
}

func (w *world) address(pod string) string { return w.bed.Addr(testbed.Place(pod), false).String() }

// startAgent returns when it serves.
func (w *world) startAgent(mode string) error {
	command := append(w.inside[:len(w.inside):len(w.inside)], agent, "run", "--proxy-mode", mode, "--manifests", w.manifests(),
		"--hostname-override", string(testbed.Node), "--cluster-cidr", testbed.ClusterCIDR(), "--control-socket", w.socket(),
		"--node-ip", w.bed.Addr(testbed.Node, false).String(), "--backend-health=eject", "--ejection-time=2s",
		"--ejection-max-time=4s", "--ejection-slow-start=3s", "--conntrack-max-per-core=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	if w.bed.Cgroup() != "" {
		command = append(command, "--cgroup-root", w.bed.Cgroup())
	}
	p, err := kubernetes.StartProxy(context.WithoutCancel(w.ctx), kubernetes.ProxyOptions{Bed: w.bed, Command: command})
	if err != nil {
		return err
	}
	w.proxy = p
	return p.Ready(w.ctx)
}

// tell runs a command of the agent's program.
func (w *world) tell(args ...string) (out string, err error) {
	args = append(args, "--control-socket", w.socket())
	text, err := w.bed.Command(context.WithoutCancel(w.ctx), testbed.Node, agent, args...).CombinedOutput()
	return string(text), err
}

// at runs a command in a place.
func (w *world) at(place testbed.Place, command string) error {
	args := strings.Fields(command)
	out, err := w.bed.Command(context.WithoutCancel(w.ctx), place, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, out)
	}
	return nil
}

// served are a pod's sockets.
type served struct {
	name string

	mu    sync.Mutex
	open  map[interface{ Close() error }]struct{} // nil: it has ended
	delay time.Duration
}

// serve has a pod answer each connection, and each line on it, with its name.
func (w *world) serve(name string) error {
	s := &served{name: name, open: map[interface{ Close() error }]struct{}{}}
	for _, o := range services {
		var l net.Listener
		err := w.bed.Do(testbed.Place(name), func() (err error) {
			l, err = net.Listen("tcp4", fmt.Sprintf(":%d", o.target()))
			return err
		})
		if err != nil {
			return err
		}
		s.open[l] = struct{}{}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go w.answer(s, c)
			}
		}()
	}
	if old := w.served[name]; old == nil {
		w.Cleanup(func() { w.served[name].end() })
	}
	w.served[name] = s
	return nil
}

func (w *world) answer(s *served, c net.Conn) {
	s.mu.Lock()
	ended, delay := s.open == nil, s.delay
	if !ended {
		s.open[c] = struct{}{}
	}
	s.mu.Unlock()
	defer c.Close()
	if ended {
		return
	}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.open, c)
	}()
	w.pause(delay)
	for lines := bufio.NewScanner(c); ; {
		if _, err := fmt.Fprintf(c, "%s 0.0.0.0:0\n", s.name); err != nil || !lines.Scan() {
			return
		}
	}
}

func (s *served) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		_ = c.Close()
	}
	s.open = nil
}

func (s *served) slow(delay time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delay = delay
}
