package testbed

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/model"
)

// Every way in which a packet can fail has its own outcome, whichever part makes it fail.
func TestProbe_outcomes(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}, {model.UDP, 80}}}}})
	run(t, b, Node, "nft", `table inet t {
		chain in { type filter hook prerouting priority filter
			th dport 1 drop
			th dport 2 reject
			th dport 3 reject with icmpx type admin-prohibited
			th dport 4 reject with icmpx type host-unreachable
		}
		chain out { type filter hook output priority filter
			th dport 1 drop
			th dport 2 reject
			th dport 3 reject with icmpx type admin-prohibited
			th dport 4 reject with icmpx type host-unreachable
		}
	}`)
	want := map[uint16]string{
		80: "answered", 1: "timed out", 2: "refused", 3: "unreachable", 4: "unreachable", 99: "refused",
	}
	var group sync.WaitGroup
	for _, from := range []Place{Node, Outside} {
		for port, want := range want {
			for _, v6 := range []bool{false, true} {
				for _, p := range []model.Protocol{model.TCP, model.UDP} {
					group.Go(func() {
						o, err := b.Probe(t.Context(), Probe{
							From: from, To: netip.AddrPortFrom(b.Addr("a", v6), port), Protocol: p, Timeout: patience(want),
						})
						if err != nil || o.Result.String() != want {
							t.Errorf("%s port %d/%s v6=%v: %v, %v, want %s", from, port, p, v6, o, err, want)
						}
					})
				}
			}
		}
	}
	group.Wait()
}

func TestProbe_SCTPOutcomes(t *testing.T) {
	if !needSCTP(t) {
		return
	}
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.SCTP, 80}}}}})
	run(t, b, Node, "nft", `table inet t {
		chain in { type filter hook prerouting priority filter
			sctp dport 1 drop
			sctp dport 2 reject
			sctp dport 3 reject with icmpx type admin-prohibited
		}
	}`)
	for _, v6 := range []bool{false, true} {
		for port, want := range map[uint16]string{1: "timed out", 2: "refused", 3: "unreachable", 99: "refused"} {
			check(t, b, Outside, b.Addr("a", v6), port, model.SCTP, want)
		}
	}
	c, err := b.Dial(t.Context(), Outside, model.SCTP, netip.AddrPortFrom(b.Addr("a", false), 80))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	talk(t, c, "a "+c.LocalAddr().String())
	if c.RemoteAddr().String() != "10.244.1.2:80" {
		t.Errorf("the remote address is %s", c.RemoteAddr())
	}
}

// A port tells whose connections the node tracks, and which sockets it has.
func TestOfPort(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}}}}})
	const track = "table ip t { chain c { type filter hook prerouting priority 0; ct state new; }; }"
	if out, err := b.Command(t.Context(), Node, "nft", track).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	to := netip.AddrPortFrom(b.Addr("a", false), 80)
	o, err := b.Probe(t.Context(), Probe{From: Outside, To: to})
	if err != nil {
		t.Fatal(err)
	}
	c, err := b.Dial(t.Context(), Node, model.TCP, to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for port, want := range map[uint16]string{
		o.Port: fmt.Sprintf("sport=%d dport=80 ", o.Port), netip.MustParseAddrPort(c.LocalAddr().String()).Port(): "ESTAB",
	} {
		if got := b.OfPort(port); !strings.Contains(got, want) {
			t.Errorf("no %q: %s", want, got)
		}
	}
}

func TestProbe_sourcePort(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}, {model.UDP, 80}}}}})
	h := b.places[Outside]
	for _, p := range []model.Protocol{model.TCP, model.UDP} {
		for range 3 { // the port is free again at once
			probe := Probe{From: Outside, To: netip.AddrPortFrom(b.Addr("a", false), 80), Protocol: p,
				SourcePort: 4321, Timeout: time.Minute}
			line, err := h.ask(t.Context(), &probe, time.Now().Add(time.Minute))
			if want := "a 192.0.2.9:4321\n"; line != want || err != nil {
				t.Errorf("%s: %q, %v; want %q", p, line, err, want)
			}
		}
	}
	seen := map[string]bool{}
	for range 1000 {
		probe := Probe{To: netip.AddrPortFrom(b.Addr("a", false), 80), Protocol: model.UDP}
		line, err := h.ask(t.Context(), &probe, time.Now().Add(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		seen[line] = true
	}
	if len(seen) != 1000 {
		t.Errorf("1000 UDP probes had %d source ports", len(seen))
	}
}

func TestProbe_errors(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a"}}})
	run(t, b, Node, "nft", "table inet t { chain c { type filter hook prerouting priority 0; drop; }; }")
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	_, err := b.Probe(ctx, Probe{From: Outside, To: netip.AddrPortFrom(b.Addr("a", false), 80), Timeout: time.Hour})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled probe returned %v", err)
	}
	_, err = b.Probe(t.Context(), Probe{From: "mars"})
	if want := `testbed: there is no place "mars"`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if !HasProtocol(model.SCTP) {
		_, err = b.Probe(t.Context(), Probe{From: Node, To: netip.MustParseAddrPort("10.244.1.2:80"), Protocol: model.SCTP})
		if want := "this kernel has no sctp"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// A server on several addresses answers a datagram from the one it was sent to.
func TestServe_answersFromDestination(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", HostNetwork: true, Ports: []PodPort{{model.UDP, 80}}}}})
	for _, addr := range []netip.Addr{netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("fd00::cb00:7105")} {
		if err := b.places[Node].addAddr(1, hostPrefix(addr)); err != nil { // 1 is the loopback
			t.Fatal(err)
		}
		check(t, b, Outside, addr, 80, model.UDP, "a source "+b.Addr(Outside, addr.Is6()).String())
		check(t, b, Node, addr, 80, model.UDP, "a source "+addr.String())
	}
}

func TestDial_staysOpen(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}, {model.UDP, 80}}}}})
	to := netip.AddrPortFrom(b.Addr("a", true), 80)
	tcp, err := b.Dial(t.Context(), Outside, model.TCP, to)
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	lines := talk(t, tcp, "a "+tcp.LocalAddr().String())

	udp, err := b.Dial(t.Context(), Outside, model.UDP, to)
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	want := fmt.Sprintf("a %s\n", udp.LocalAddr())
	for range 3 {
		buf := make([]byte, 100)
		_, err1 := udp.Write([]byte("x"))
		n, err2 := udp.Read(buf)
		if got := string(buf[:n]); got != want || err1 != nil || err2 != nil {
			t.Errorf("got %q, %v, %v; want %q", got, err1, err2, want)
		}
	}

	if err := b.RemovePod("a"); err != nil {
		t.Fatal(err)
	}
	if _, err := lines.ReadString('\n'); !errors.Is(err, io.EOF) {
		t.Errorf("the connection to a removed pod ended with %v, want EOF", err)
	}
	if _, err := b.Dial(t.Context(), Outside, model.TCP, netip.AddrPortFrom(b.Addr(Node, true), 9)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dialed a closed port: %v", err)
	}
}

// talk reads the greeting of a stream and asks for it three times more.
func talk(t *testing.T, c net.Conn, want string) *bufio.Reader {
	t.Helper()
	lines := bufio.NewReader(c)
	for range 4 {
		line, err := lines.ReadString('\n')
		if err != nil || line != want+"\n" {
			t.Errorf("got %q, %v; want %q", line, err, want)
		}
		if _, err := c.Write([]byte("again\n")); err != nil {
			t.Error(err)
		}
	}
	if _, err := lines.ReadString('\n'); err != nil {
		t.Error(err)
	}
	return lines
}

func TestCommand(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a"}}})
	out, err := b.Command(t.Context(), "a", "ip", "-4", "-o", "addr", "show", "eth0").Output()
	if err != nil || !bytes.Contains(out, []byte("10.244.1.2/32")) {
		t.Errorf("the pod's address is %q, %v", out, err)
	}
	if err := b.Command(t.Context(), "mars", "true").Run(); err == nil {
		t.Error("a command ran in a place that is not there")
	}
	if err := b.Command(t.Context(), "a", "false").Run(); err == nil {
		t.Error("a command's failure was lost")
	}
}

func TestCommand_endsWithItsPlace(t *testing.T) {
	b := Need(t, Spec{Pods: []PodSpec{{Name: "a"}}})
	c := b.Command(t.Context(), "a", "cat")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if err := b.RemovePod("a"); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := c.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("the command ended with %v, want it killed", err)
	}
}

// An ordinary user's program gets a cluster by way of a user namespace, and its exit status comes out.
func TestReexec(t *testing.T) {
	lack.Need(t, lack.Root)
	c := helperCommand(t, "probe")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := c.CombinedOutput()
	if bytes.HasPrefix(out, []byte(lack.AllSkipped)) {
		lack.Inherit(t, out)
	}
	var exit *exec.ExitError
	if want := "uid 0 saw a source fd00::c000:209\n"; string(out) != want || !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("got %q, %v; want %q and status 7", out, err, want)
	}
}

// A killed program leaves nothing that could keep its cluster: its commands die with it.
func TestBed_killedProgram(t *testing.T) {
	c := helperCommand(t, "sleep")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	if err != nil || line != "a command is running\n" {
		t.Fatalf("the helper says %q, %v", line, err)
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// The command has the other end of the pipe as well, which therefore ends with it.
	if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 {
		t.Errorf("read %q, %v", rest, err)
	}
	_ = c.Wait() // it was killed
}

// helperCommand is this test binary as a program of its own.
func helperCommand(t *testing.T, what string) *exec.Cmd {
	t.Helper()
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { self.Close() })
	c := exec.CommandContext(t.Context(), "/proc/self/fd/3") // its path may be closed to other users
	c.Dir = "/"
	c.Env = append(os.Environ(), helper+"="+what)
	c.ExtraFiles = []*os.File{self}
	return c
}

func helperMain() int {
	ctx := context.Background()
	if l, err := net.Listen("tcp", "[::1]:0"); err == nil { // in a new namespace there is no loopback
		l.Close()
	}
	b, err := New(ctx, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}}}}})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer b.Close()
	if os.Getenv(helper) == "sleep" {
		c := b.Command(ctx, Node, "sh", "-c", "echo a command is running; exec sleep 1000")
		c.Stdout = os.Stdout
		fmt.Println(c.Run())
		return 1
	}
	o, err := b.Probe(ctx, Probe{From: Outside, To: netip.AddrPortFrom(b.Addr("a", true), 80)})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Printf("uid %d saw %s\n", os.Getuid(), o)
	return 7
}

func BenchmarkProbe(b *testing.B) {
	bed := Need(b, Spec{Pods: []PodSpec{{Name: "a", Ports: []PodPort{{model.TCP, 80}, {model.UDP, 80}}}}})
	for _, p := range []model.Protocol{model.TCP, model.UDP} {
		b.Run(p.String(), func(b *testing.B) {
			for b.Loop() {
				o, err := bed.Probe(b.Context(), Probe{From: Outside, To: netip.AddrPortFrom(bed.Addr("a", false), 80), Protocol: p})
				if err != nil || o.Result != Answered {
					b.Fatal(o, err)
				}
			}
		})
	}
}
