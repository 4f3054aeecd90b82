package localhost_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/conntrack"
	"fairlead.dev/fairlead/dataplane/localhost"
	"fairlead.dev/fairlead/dataplane/nftables"
	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) {
	os.Exit(testbed.RunTests(m.Run))
}

// stage is a plane on the node of a cluster: pod-a on the node (fd00::af4:102) and pod-b on node-b
// (fd00::af4:202), each with tcp 8080 and udp 5353. Tests do not run in parallel, because each checks
// at its end that the plane has left nothing in the process.
type stage struct {
	*testing.T
	bed   *testbed.Bed
	plane dataplane.Dataplane
	state *model.State
	fault func(string) error

	listening, failed int // what the meter was told
}

// Forgot implements dataplane.Meter.
func (*stage) Forgot(bool, int, time.Duration) {}

// Listening implements dataplane.Meter.
func (s *stage) Listening(v6 bool, more int) {
	if s.listening += more; !v6 || more == 0 || s.listening < 0 {
		s.Errorf("the meter was told of %d more listeners (IPv6: %v), which makes %d", more, v6, s.listening)
	}
}

// NotListening implements dataplane.Meter.
func (s *stage) NotListening(bool) { s.failed++ }

const (
	podA = "[fd00::af4:102]"
	podB = "[fd00::af4:202]"
	web  = "[::1]:30080"
	dns  = "[::1]:30053"
)

func newStage(t *testing.T) *stage {
	t.Helper()
	ports := []testbed.PodPort{{Protocol: model.TCP, Port: 8080}, {Protocol: model.UDP, Port: 5353}}
	t.Cleanup(func() { endAll(t) })
	bed := testbed.Need(t, testbed.Spec{Pods: []testbed.PodSpec{
		{Name: "pod-a", Ports: ports}, {Name: "pod-b", Node: testbed.NodeB, Ports: ports},
	}})
	s := &stage{T: t, bed: bed, state: model.NewState()}
	s.plane = s.newPlane()
	if err := s.plane.Sync(t.Context(), s.state); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.finish)
	return s
}

func (s *stage) newPlane() (p dataplane.Dataplane) {
	s.Helper()
	err := s.bed.Do(testbed.Node, func() (err error) {
		p, err = localhost.Wrap(conntrack.Wrap(nftables.New))(dataplane.Config{Meter: s, Fault: func(operation string) error {
			if s.fault == nil {
				return nil
			}
			return s.fault(operation)
		}})
		return err
	})
	if err != nil {
		s.Fatal(err)
	}
	return p
}

func parse(t *testing.T, text string) *model.State {
	t.Helper()
	state, err := model.ParseState(text)
	if err != nil {
		t.Fatal(err)
	}
	return state
}

// apply brings the plane to a State. It returns what Apply returns.
func (s *stage) apply(text string) error {
	s.Helper()
	to := parse(s.T, text)
	change := model.Diff(s.state, to)
	s.state = to
	return s.plane.Apply(s.Context(), to, change)
}

// must is apply without an error, after which nothing drifts.
func (s *stage) must(text string) {
	s.Helper()
	if err := s.apply(text); err != nil {
		s.Fatal(err)
	}
	if drifts := s.audit(); len(drifts) > 0 {
		s.Fatal(drifts)
	}
}

func (s *stage) audit() []dataplane.Drift {
	s.Helper()
	report, err := s.plane.Audit(s.Context(), s.state, dataplane.Quick)
	if err != nil {
		s.Fatal(err)
	}
	return report.Drifts
}

// auditByAnother is what another process sees: nothing of relays, which are not its own.
func (s *stage) auditByAnother() {
	s.Helper()
	p := s.newPlane()
	report, err := p.Audit(s.Context(), s.state, dataplane.Quick)
	if err = errors.Join(err, p.Close()); err != nil || len(report.Drifts) > 0 {
		s.Error(report.Drifts, err)
	}
}

// once is the outcome of one probe of the node, in words.
func (s *stage) once(to string, p model.Protocol) string {
	s.Helper()
	o, err := s.bed.Probe(s.Context(), testbed.Probe{
		From: testbed.Node, To: netip.MustParseAddrPort(to), Protocol: p, Timeout: 15 * time.Second,
	})
	if err != nil {
		s.Fatal(err)
	}
	return o.String()
}

// reaches probes until each of the outcomes was seen, and fails if there is another. Two backends that
// are chosen alike miss one of them in 60 probes once in 10^18 times.
func (s *stage) reaches(to string, p model.Protocol, want ...string) {
	s.Helper()
	seen := map[string]bool{}
	for i := 0; i < 60 && (i < 5 || len(seen) < len(want)); i++ {
		o, _, _ := strings.Cut(s.once(to, p), " source ")
		if seen[o] = true; !slices.Contains(want, o) {
			s.Errorf("%s/%s: %s, want %v", to, p, o, want)
		}
	}
	if len(seen) < len(want) {
		s.Errorf("%s/%s: only %v, want %v", to, p, seen, want)
	}
}

// client is a connection or flow of the node that stays.
func (s *stage) client(p model.Protocol, to string) net.Conn {
	s.Helper()
	c, err := s.bed.Dial(s.Context(), testbed.Node, p, netip.MustParseAddrPort(to))
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { c.Close() })
	return c
}

func (s *stage) ask(c net.Conn) string {
	s.Helper()
	_, err := io.WriteString(c, "?\n")
	if err != nil && !errors.Is(err, unix.EPERM) { // as for a datagram that a rule of the node rejects
		return err.Error()
	}
	return s.answer(c)
}

// answer is the name of the pod that answers.
func (s *stage) answer(c net.Conn) string {
	s.Helper()
	if err := c.SetReadDeadline(time.Now().Add(eventually.Patience())); err != nil {
		s.Fatal(err)
	}
	line := make([]byte, 128)
	n, err := c.Read(line)
	if err != nil {
		return err.Error()
	}
	name, _, _ := strings.Cut(string(line[:n]), " ")
	return name
}

// finish removes the plane, whose sockets must be gone.
func (s *stage) finish() {
	ctx := context.WithoutCancel(s.Context())
	if err := errors.Join(s.plane.Remove(ctx), s.plane.Close()); err != nil {
		s.Error(err)
	}
	if s.listening != 0 {
		s.Errorf("after Remove: the meter knows of %d listeners", s.listening)
	}
	out, err := s.bed.Command(ctx, testbed.Node, "ss", "-Hlntu").CombinedOutput()
	if err != nil || len(out) > 0 {
		s.Errorf("after Remove: %v\n%s", err, out)
	}
}

// endAll waits for the package's goroutines to end, which they do when the pods end, and with these the connections.
func endAll(t *testing.T) {
	t.Helper()
	eventually.Nil(t, "after Remove the goroutines end", func() error {
		if stacks := ours(); len(stacks) > 0 {
			return fmt.Errorf("there are\n%s", bytes.Join(stacks, []byte("\n\n")))
		}
		return nil
	})
}

// ours are the stacks of goroutines that relay.
func ours() [][]byte {
	buf := make([]byte, 1<<22)
	stacks := bytes.Split(buf[:runtime.Stack(buf, true)], []byte("\n\n"))
	return slices.DeleteFunc(stacks, func(stack []byte) bool { return !bytes.Contains(stack, []byte("dataplane/internal/relay.")) })
}

const (
	webRow  = "frontend [::1]:30080/tcp internal forward default/web:http cluster6 snat always\n"
	webPool = `
		pool default/web:http cluster6
		backend default/web:http cluster6 ` + podA + `:8080 local
		backend default/web:http cluster6 ` + podB + `:8080
	`
	dnsRow  = "frontend [::1]:30053/udp internal forward default/dns:dns cluster6 snat always\n"
	dnsPool = `
		pool default/dns:dns cluster6
		backend default/dns:dns cluster6 ` + podA + `:5353 local
		backend default/dns:dns cluster6 ` + podB + `:5353
	`
	both = webRow + webPool + dnsRow + dnsPool
)

func TestPlane_reachesBackends(t *testing.T) {
	s := newStage(t)
	s.must(both + `
		frontend [fd00::a60:a]:80/tcp any forward default/web:http cluster6 snat offcluster
		frontend [fd00::c000:201]:30080/tcp any forward default/web:http cluster6 snat always`)
	s.reaches(web, model.TCP, "pod-a", "pod-b")
	s.reaches(dns, model.UDP, "pod-a", "pod-b")
	s.reaches("[fd00::a60:a]:80", model.TCP, "pod-a", "pod-b")
	if got := s.once(web, model.TCP); !strings.HasSuffix(got, " source fd00::c000:201") {
		t.Errorf("%s, want the node's address", got)
	}
	s.state = parse(t, dnsRow+dnsPool)
	if err := s.plane.Sync(t.Context(), s.state); err != nil {
		t.Error(err)
	}
	s.reaches(web, model.TCP, "refused")
	s.reaches(dns, model.UDP, "pod-a", "pod-b")
}

func TestPlane_rejects(t *testing.T) {
	s := newStage(t)
	reject := `
		frontend [::1]:30080/tcp internal reject default/web:http
		frontend [::1]:30053/udp internal reject default/dns:dns`
	s.must(reject)
	s.reaches(web, model.TCP, "refused")
	s.reaches(dns, model.UDP, "refused")
	s.must(both)
	s.reaches(web, model.TCP, "pod-a", "pod-b")
	s.reaches(dns, model.UDP, "pod-a", "pod-b")
	flow := s.client(model.UDP, dns)
	s.ask(flow)
	s.must(reject)
	s.reaches(web, model.TCP, "refused")
	s.reaches(dns, model.UDP, "refused")
	if got := s.ask(flow); !strings.Contains(got, "refused") {
		t.Errorf("open flow: %s", got)
	}
}

// The plane follows State.Lookup, also when there are rows of both scopes.
func TestPlane_internalRowFirst(t *testing.T) {
	s := newStage(t)
	anyRow := strings.Replace(webRow, "internal", "any", 1) + webPool
	s.must(anyRow)
	s.reaches(web, model.TCP, "pod-a", "pod-b")
	s.must(anyRow + "frontend [::1]:30080/tcp internal reject default/other")
	s.reaches(web, model.TCP, "refused")
	s.must(anyRow)
	s.reaches(web, model.TCP, "pod-a", "pod-b")
}

func TestPlane_backendLeaves(t *testing.T) {
	s := newStage(t)
	onlyB := func(rows string) string {
		var keep []string
		for line := range strings.SplitSeq(rows, "\n") {
			if !strings.Contains(line, podA) {
				keep = append(keep, line)
			}
		}
		return strings.Join(keep, "\n")
	}
	onlyA := strings.ReplaceAll(onlyB(both), podB, podA)
	draining := strings.NewReplacer(podA+":8080 local", podA+":8080 weight 0", podA+":5353 local", podA+":5353 weight 0").Replace(both)

	s.must(onlyA)
	conn, flow := s.client(model.TCP, web), s.client(model.UDP, dns)
	for _, got := range []string{s.answer(conn), s.ask(flow)} {
		if got != "pod-a" {
			t.Fatal(got)
		}
	}
	for _, step := range []struct{ rows, conn, flow, next string }{
		{both, "pod-a", "pod-a", ""},
		{draining, "pod-a", "pod-a", "pod-b"},
		{onlyB(both), "pod-a", "pod-b", "pod-b"},
		{"", "pod-a", "connection refused", "refused"},
	} {
		s.must(step.rows)
		if got := s.ask(conn); got != step.conn {
			t.Errorf("open connection: %s, want %s; rows:%s", got, step.conn, step.rows)
		}
		if got := s.ask(flow); !strings.HasSuffix(got, step.flow) {
			t.Errorf("open flow: %s, want %s; rows:%s", got, step.flow, step.rows)
		}
		if step.next != "" {
			s.reaches(web, model.TCP, step.next)
			s.reaches(dns, model.UDP, step.next)
		}
	}
	if err := s.plane.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if got := s.ask(conn); got != "pod-a" {
		t.Errorf("after Remove: %s", got)
	}
}

// Ends of connections pass through, each by itself: the server hears all, and that it was all, and
// only then answers.
func TestPlane_halfClose(t *testing.T) {
	s := newStage(t)
	const size = 1 << 20
	var server net.Listener
	err := s.bed.Do("pod-a", func() (err error) {
		server, err = net.Listen("tcp", ":9000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		for {
			c, err := server.Accept()
			if err != nil {
				return
			}
			n, err := io.Copy(io.Discard, c)
			fmt.Fprintf(c, "%d %v", n, err)
			c.Close()
		}
	}()
	s.must(webRow + "pool default/web:http cluster6\nbackend default/web:http cluster6 " + podA + ":9000")
	c := s.client(model.TCP, web).(*net.TCPConn)
	if err := c.SetDeadline(time.Now().Add(eventually.Patience())); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Error(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != fmt.Sprint(size, " <nil>") {
		t.Errorf("%q, %v", got, err)
	}
}

// Datagrams arrive whole, empty ones too, and so do their answers.
func TestPlane_datagramSizes(t *testing.T) {
	s := newStage(t)
	var echo net.PacketConn
	err := s.bed.Do("pod-a", func() (err error) {
		echo, err = net.ListenPacket("udp", ":9000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := echo.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = echo.WriteTo(buf[:n], from) // if it fails, the client waits in vain
		}
	}()
	s.must(dnsRow + "pool default/dns:dns cluster6\nbackend default/dns:dns cluster6 " + podA + ":9000")
	c := s.client(model.UDP, dns)
	if err := c.SetDeadline(time.Now().Add(eventually.Patience())); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	for _, size := range []int{1, 0, 1400, 60000} {
		if _, err := c.Write(buf[:size]); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(buf); n != size || err != nil {
			t.Errorf("%d bytes come back as %d, %v", size, n, err)
		}
	}
}

// A backend without a listener is passed over. If none is left, the client is refused.
func TestPlane_backendRefuses(t *testing.T) {
	s := newStage(t)
	s.must(webRow + strings.Replace(webPool, podB+":8080", podB+":1", 1))
	s.reaches(web, model.TCP, "pod-a")
	s.must(webRow + strings.ReplaceAll(webPool, ":8080", ":1"))
	s.reaches(web, model.TCP, "refused")
}

func TestPlane_affinity(t *testing.T) {
	s := newStage(t)
	affinity := strings.ReplaceAll(both, "cluster6\n\t\tbackend", "cluster6 affinity 1h\n\t\tbackend")
	affinity = strings.Replace(affinity, "affinity 1h\n", "affinity 1h0m0s\n", 1)
	s.must(affinity)
	for to, p := range map[string]model.Protocol{web: model.TCP, dns: model.UDP} {
		first, _, _ := strings.Cut(s.once(to, p), " ")
		for range 30 {
			s.reaches(to, p, first)
		}
	}
	first, _, _ := strings.Cut(s.once(web, model.TCP), " ")
	gone, other := podA+":8080 local", "pod-b"
	if first == "pod-b" {
		gone, other = podB+":8080", "pod-a"
	}
	s.must(strings.Replace(affinity, "backend default/web:http cluster6 "+gone, "", 1))
	s.reaches(web, model.TCP, other)
	s.must(affinity)
	s.reaches(web, model.TCP, other)
	s.must(both)
	s.reaches(web, model.TCP, "pod-a", "pod-b")
}

func TestPlane_affinityEnds(t *testing.T) {
	s := newStage(t)
	s.must(webRow + strings.Replace(webPool, "cluster6\n", "cluster6 affinity 1ns\n", 1))
	s.reaches(web, model.TCP, "pod-a", "pod-b")
}

func TestPlane_portTaken(t *testing.T) {
	s := newStage(t)
	var taken io.Closer
	take := func() (err error) {
		taken, err = net.Listen("tcp", web)
		return err
	}
	if err := s.bed.Do(testbed.Node, take); err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	rows := both + "frontend [fd00::a60:a]:80/tcp any forward default/web:http cluster6 snat offcluster"
	for i, err := range []error{s.apply(rows), s.plane.Sync(t.Context(), s.state)} {
		want := "some rows are not in force: frontend [::1]:30080/tcp of default/web:http: listen tcp [::1]:30080: bind: address already in use"
		if !errors.Is(err, dataplane.ErrPartial) || err.Error() != want {
			t.Errorf("%d: %v", i, err)
		}
	}
	s.reaches(dns, model.UDP, "pod-a", "pod-b")
	s.reaches("[fd00::a60:a]:80", model.TCP, "pod-a", "pod-b")
	want := "[listener [::1]:30080/tcp: missing: relay to default/web:http cluster6]"
	if got := s.audit(); fmt.Sprint(got) != want {
		t.Errorf("audit: %v", got)
	}
	s.auditByAnother()
	taken.Close()
	if err := s.plane.Sync(t.Context(), s.state); err != nil {
		t.Error(err)
	}
	s.reaches(web, model.TCP, "pod-a", "pod-b")
	if got := s.audit(); len(got) > 0 {
		t.Errorf("audit: %v", got)
	}
	if s.listening != 2 || s.failed == 0 {
		t.Errorf("the meter was told of %d listeners and %d failures, want 2 and some", s.listening, s.failed)
	}
	if err := s.bed.Do(testbed.Node, take); err == nil {
		t.Error("another program can listen on the port of a relay")
	}
}

func TestPlane_fault(t *testing.T) {
	s := newStage(t)
	broken := errors.New("broken")
	s.fault = func(operation string) error {
		if operation == "localhost listen" {
			return broken
		}
		return nil
	}
	if err := s.apply(both); !errors.Is(err, broken) || !errors.Is(err, dataplane.ErrPartial) {
		t.Error(err)
	}
	s.fault = func(string) error { return broken }
	if err := s.plane.Sync(t.Context(), s.state); !errors.Is(err, broken) || errors.Is(err, dataplane.ErrPartial) {
		t.Error("of the wrapped plane and of this one:", err)
	}
	s.fault = nil
	if err := s.plane.Sync(t.Context(), s.state); err != nil {
		t.Error(err)
	}
	s.reaches(web, model.TCP, "pod-a", "pod-b")
}

// A plane can take over from another one.
func TestPlane_twoAtOnce(t *testing.T) {
	s := newStage(t)
	s.must(both)
	first := s.plane
	s.plane = s.newPlane()
	if err := s.plane.Sync(t.Context(), s.state); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	s.reaches(web, model.TCP, "pod-a", "pod-b")
	s.reaches(dns, model.UDP, "pod-a", "pod-b")
}

// Files do not pile up: what a relay opens it closes.
func TestPlane_closesFiles(t *testing.T) {
	s := newStage(t)
	before := files(t)
	for range 3 {
		s.must(both)
		s.reaches(web, model.TCP, "pod-a", "pod-b")
		s.reaches(dns, model.UDP, "pod-a", "pod-b")
		s.must("")
	}
	eventually.Nil(t, "files are closed", func() error {
		if now := files(t); now > before {
			return fmt.Errorf("%d files, %d before", now, before)
		}
		return nil
	})
}

func files(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
