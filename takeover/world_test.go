package takeover_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/service"
	"fairlead.dev/fairlead/takeover"
)

func TestMain(m *testing.M) { os.Exit(testbed.RunTests(m.Run)) }

// world is a virtual cluster with kube-proxy on its node, then Fairlead.
type world struct {
	*testing.T
	bed        *testbed.Bed
	kubeconfig string
	detect     service.DetectLocal
	path       string // where kube-proxy and the tools that look find iptables
}

// newWorld has its iptables of one back end: legacy or nft.
func newWorld(t *testing.T, backend string) *world {
	t.Helper()
	w := &world{T: t, path: toolsOf(t, backend)}
	w.detect = service.DetectLocal{Mode: service.LocalClusterCIDR, ClusterCIDRs: testbed.ClusterCIDRs()}
	w.bed = testbed.Need(t, testbed.Spec{})
	ports := []testbed.PodPort{{Protocol: model.TCP, Port: tcpPort}, {Protocol: model.UDP, Port: udpPort}}
	for name, node := range podNodes {
		if _, err := w.bed.AddPod(t.Context(), testbed.PodSpec{Name: name, Node: node, Ports: ports}); err != nil {
			t.Fatal(err)
		}
	}
	without := late
	without.pods = nil
	w.serveAPI(newObjects(w.bed, web, dns, self, without))
	return w
}

// serveAPI has an API server with objects that never change: all that kube-proxy needs.
func (w *world) serveAPI(objects clusterObjects) {
	w.Helper()
	catalog, err := kubernetes.NewCatalog(objects.all()...)
	if err == nil {
		w.kubeconfig, err = catalog.Serve(w.bed, w.TempDir())
	}
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := catalog.Close(); err != nil {
			w.Error(err)
		}
	})
}

// toolsOf is a directory in which iptables is of one back end.
func toolsOf(t *testing.T, backend string) string {
	t.Helper()
	dir := t.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, tool := range []string{"", "-save", "-restore"} {
			if err := os.Symlink("/usr/sbin/xtables-"+backend+"-multi", filepath.Join(dir, family+tool)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// run runs a program on the node and returns its output.
func (w *world) run(input string, program ...string) string {
	w.Helper()
	out, err := w.try(input, program...)
	if err != nil {
		w.Fatalf("%s: %v: %s", strings.Join(program, " "), err, out)
	}
	return out
}

func (w *world) try(input string, program ...string) (string, error) {
	name := program[0]
	if _, err := os.Stat(filepath.Join(w.path, name)); err == nil {
		name = filepath.Join(w.path, name)
	}
	c := w.bed.Command(w.Context(), testbed.Node, name, program[1:]...)
	c.Stdin = strings.NewReader(input)
	out, err := c.CombinedOutput()
	return string(out), err
}

// kubeProxy is the real one.
type kubeProxy struct {
	*testbed.Cmd
	w   *world
	log *bytes.Buffer
}

// startKubeProxy returns when it serves everything.
func (w *world) startKubeProxy(mode string, flags ...string) *kubeProxy {
	w.Helper()
	command := kubernetes.KubeProxyCommand(kubernetes.NeedParts(w.T), w.kubeconfig, mode)
	command = append(command, flags...)
	p := &kubeProxy{Cmd: w.bed.Command(context.WithoutCancel(w.Context()), testbed.Node, command[0], command[1:]...), w: w, log: &bytes.Buffer{}}
	p.Stdout, p.Stderr = p.log, p.log
	p.Env = append(os.Environ(), "PATH="+w.path+":"+os.Getenv("PATH"))
	if err := p.Start(); err != nil {
		w.Fatal(err)
	}
	for _, try := range w.tries() {
		if err := w.reaches(try); err != nil {
			_ = p.Process.Kill()
			_ = p.Wait()
			w.Fatalf("%v\n%s", err, p.log)
		}
	}
	return p
}

// stop is what a DaemonSet does when it is deleted. The rules stay.
func (p *kubeProxy) stop() {
	p.w.Helper()
	if err := p.Process.Signal(unix.SIGTERM); err != nil {
		p.w.Fatal(err)
	}
	_ = p.Wait() // 1 or 2, after its own fashion
}

// try is a way into a Service.
type try struct {
	from     testbed.Place
	to       netip.AddrPort
	protocol model.Protocol
}

func (t try) String() string { return fmt.Sprintf("from %s to %s/%s", t.from, t.to, t.protocol) }

// tries are the ways in: pods and node ask ClusterIPs, others NodePorts, a pod itself by its Service.
func (w *world) tries() []try {
	var tries []try
	for _, v6 := range []bool{false, true} {
		for _, s := range []serviceSpec{web, dns} {
			nodePort := netip.AddrPortFrom(w.bed.Addr(testbed.Node, v6), uint16(s.nodePort))
			tries = append(tries,
				try{"client", s.clusterIP(v6), s.modelProtocol()},
				try{testbed.Node, s.clusterIP(v6), s.modelProtocol()},
				try{testbed.Outside, nodePort, s.modelProtocol()})
		}
		tries = append(tries, try{"pod-a", self.clusterIP(v6), model.TCP})
	}
	return tries
}

func (w *world) probe(t try) (string, error) {
	o, err := w.bed.Probe(w.Context(), testbed.Probe{From: t.from, To: t.to, Protocol: t.protocol, Timeout: 15 * time.Second})
	return o.String(), err
}

// reaches waits until an attempt reaches a pod.
func (w *world) reaches(t try) error {
	return eventually.Poll(w.Context(), func() error {
		got, err := w.probe(t)
		if err == nil && !strings.HasPrefix(got, "pod-") {
			err = fmt.Errorf("%s: %s", t, got)
		}
		return err
	})
}

// load is short connections at a steady rate and connections that never end, of every kind.
type load struct {
	w                *world
	group            sync.WaitGroup
	stop             chan struct{}
	answered, failed atomic.Int64
	streams          []*stream
}

func (w *world) startLoad(every time.Duration) *load {
	w.Helper()
	l := &load{w: w, stop: make(chan struct{})}
	for _, t := range w.tries() {
		l.streams = append(l.streams, w.open(t))
		l.group.Go(func() { l.ask(t, every) })
	}
	l.await(len(l.streams))
	return l
}

func (l *load) ask(t try, every time.Duration) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-ticker.C:
		}
		begin := time.Now()
		got, err := l.w.probe(t)
		if err != nil || !strings.HasPrefix(got, "pod-") {
			l.failed.Add(1)
			l.w.Errorf("%s, at %s, after %s: %s, %v", t, begin.Format(time.StampMicro), time.Since(begin), got, err)
			continue
		}
		l.answered.Add(1)
	}
}

// await returns when n more attempts have been made, and every stream has been used.
func (l *load) await(n int) {
	l.w.Helper()
	for target := l.answered.Load() + int64(n); l.answered.Load() < target && l.failed.Load() == 0; {
		l.talk()
	}
	l.talk()
}

// talk uses every stream once. One that breaks is reported, and forgotten.
func (l *load) talk() {
	l.w.Helper()
	l.streams = slices.DeleteFunc(l.streams, func(s *stream) bool {
		err := s.talk()
		if err != nil {
			l.w.Errorf("an open connection broke, %s: %v", s.try, err)
			s.Close()
		}
		return err != nil
	})
}

// endShort ends the short connections, endLong the others.
func (l *load) endShort() {
	close(l.stop)
	l.group.Wait()
	l.w.Logf("%d short connections answered, %d failed; %d long ones", l.answered.Load(), l.failed.Load(), len(l.streams))
}

func (l *load) endLong() {
	for _, s := range l.streams {
		if c, ok := s.Conn.(*net.TCPConn); ok {
			_ = c.SetLinger(0) // a reset leaves no state that waits
		}
		s.Close()
	}
}

// stream is a connection that stays with its backend.
type stream struct {
	net.Conn
	try  try
	line string // that the backend says
}

func (w *world) open(t try) *stream {
	w.Helper()
	conn, err := w.bed.Dial(w.Context(), t.from, t.protocol, t.to)
	if err != nil {
		w.Fatalf("%s: %v", t, err)
	}
	s := &stream{Conn: conn, try: t}
	if t.protocol == model.TCP { // the server speaks first
		s.line, err = s.read()
	}
	if err := errors.Join(err, s.talk()); err != nil {
		w.Fatalf("%s: %v", t, err)
	}
	return s
}

func (s *stream) read() (string, error) {
	_ = s.SetDeadline(time.Now().Add(eventually.Patience()))
	b := make([]byte, 128)
	n, err := s.Read(b)
	return string(b[:n]), err
}

func (s *stream) talk() error {
	_ = s.SetDeadline(time.Now().Add(eventually.Patience()))
	if _, err := s.Write([]byte("more\n")); err != nil {
		return err
	}
	line, err := s.read()
	if s.line == "" {
		s.line = line
	}
	if err == nil && line != s.line {
		err = fmt.Errorf("%q after %q", line, s.line)
	}
	return err
}

// fairlead is a data plane in force, with the late Service's endpoints.
type fairlead struct {
	dataplane.Dataplane
	w     *world
	state *model.State
}

func (w *world) startFairlead() *fairlead {
	w.Helper()
	return w.startPlane(nftables.New)
}

func (w *world) startPlane(plane dataplane.New) *fairlead {
	w.Helper()
	f := &fairlead{w: w, state: newObjects(w.bed, web, dns, self, late).state(w.T, w.bed, w.detect)}
	err := w.bed.Do(testbed.Node, func() (err error) {
		make := localhost.Wrap(conntrack.Wrap(plane))
		f.Dataplane, err = make(dataplane.Config{Mark: dataplane.DefaultMark, Log: w.logger()})
		return err
	})
	if err == nil {
		err = f.Sync(w.Context(), f.state)
	}
	if err != nil {
		w.Fatal(err)
	}
	return f
}

// clean is what fairlead clean does to the plane.
func (f *fairlead) clean() {
	f.w.Helper()
	if err := errors.Join(f.Remove(f.w.Context()), f.Close()); err != nil {
		f.w.Error(err)
	}
}

func (w *world) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(w.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// takeover is one for the node.
func (w *world) takeover(drain time.Duration) *takeover.Takeover {
	w.Helper()
	return w.takeoverWith(takeover.Config{Log: w.logger(), Drain: drain})
}

func (w *world) takeoverWith(c takeover.Config) *takeover.Takeover {
	w.Helper()
	var to *takeover.Takeover
	err := w.bed.Do(testbed.Node, func() (err error) {
		to, err = takeover.New(c)
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = to.Close() })
	return to
}

// find is what there is, a line each.
func (w *world) find(t *takeover.Takeover) string {
	w.Helper()
	found, err := t.Find(w.Context())
	if err != nil {
		w.Error(err)
	}
	var lines []string
	for _, l := range found {
		lines = append(lines, l.String()+"\n")
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

func (w *world) remove(t *takeover.Takeover) {
	w.Helper()
	if err := t.Remove(w.Context()); err != nil {
		w.Error(err)
	}
}

// expectLeft compares with what Find finds.
func (w *world) expectLeft(t *takeover.Takeover, want string) {
	w.Helper()
	if got := w.find(t); got != strings.TrimPrefix(want, "\n") {
		w.Errorf("kube-proxy has left\n%sinstead of\n%s", got, want)
	}
}

// audit is an error if the plane is not as it should be.
func (f *fairlead) audit() {
	f.w.Helper()
	if report, err := f.Audit(f.w.Context(), f.state, dataplane.Quick); err != nil || len(report.Drifts) > 0 {
		f.w.Error(report.Drifts, err)
	}
}
