package ebpf_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/ebpf"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

func TestMain(m *testing.M) {
	vm.Guest()
	if cgroup := os.Getenv(runPlane); cgroup != "" {
		fmt.Fprintln(os.Stderr, planeProcess(cgroup))
		os.Exit(1)
	}
	if os.Getenv(openPlane) != "" {
		fmt.Println(openError())
		os.Exit(0)
	}
	// For tests that load programs without a plane. Where that is not allowed, they are skipped.
	_ = rlimit.RemoveMemlock()
	os.Exit(m.Run())
}

// cluster is a Bed whose node and pods are in a cgroup, and a place for pins.
type cluster struct {
	*testbed.Bed
	t    *testing.T
	pins string
}

func newCluster(t *testing.T) cluster {
	t.Helper()
	pod := func(name string, node testbed.Place, addr string) testbed.PodSpec {
		v4 := netip.MustParseAddr(addr)
		return testbed.PodSpec{
			Name: name, Node: node, Addrs: []netip.Addr{v4, testbed.EmbedV6(v4)},
			Ports: []testbed.PodPort{
				{Protocol: model.TCP, Port: 8080}, {Protocol: model.TCP, Port: 8081}, {Protocol: model.TCP, Port: 8082},
				{Protocol: model.UDP, Port: 5353},
			},
		}
	}
	bed := testbed.Need(t, testbed.Spec{Cgroup: true, Pods: []testbed.PodSpec{
		pod("client", testbed.Node, "10.244.1.20"), pod("pod-a", testbed.Node, "10.244.1.11"),
		pod("pod-b", testbed.Node, "10.244.1.12"), pod("pod-c", testbed.NodeB, "10.244.2.13"),
	}})
	return cluster{bed, t, filepath.Join(testbed.NeedBPFFS(t), "fairlead")}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// open makes a plane on the node, with nothing behind it.
func (c cluster) open() dataplane.Dataplane {
	c.t.Helper()
	return c.openAs(ebpf.Options{})
}

// probed is what the first plane has found out, for the others.
var probed ebpf.Probed

// openAs makes one with options.
func (c cluster) openAs(o ebpf.Options) dataplane.Dataplane {
	c.t.Helper()
	return c.openWith(dataplane.Config{}, o)
}

func (c cluster) openWith(config dataplane.Config, o ebpf.Options) dataplane.Dataplane {
	c.t.Helper()
	o.Cgroup, o.Pins, o.Probed = c.Cgroup(), c.pins, &probed
	if o.Sizes.Translations == 0 {
		o.Sizes.Translations = 1 << 14 // the machine's memory is for many tests
	}
	var p dataplane.Dataplane
	err := c.Do(testbed.Node, func() (err error) {
		p, err = ebpf.New(o)(config)
		return err
	})
	if errors.Is(err, dataplane.ErrUnsupported) {
		lack.Skip(c.t, lack.Root, err)
	}
	check(c.t, err)
	return p
}

func parse(t *testing.T, text string) *model.State {
	t.Helper()
	s, err := model.ParseState(text)
	check(t, err)
	return s
}

// answerTime is far longer than an answer takes, and longer than a busy machine stands still.
const answerTime = 15 * time.Second

// answers are the outcomes of some probes, sorted, each once.
func (c cluster) answers(from testbed.Place, p model.Protocol, to string) string {
	c.t.Helper()
	return c.answersWithin(answerTime, from, p, to)
}

func (c cluster) answersWithin(timeout time.Duration, from testbed.Place, p model.Protocol, to string) string {
	c.t.Helper()
	seen := map[string]bool{}
	for range 40 {
		o, err := c.Probe(c.t.Context(), testbed.Probe{
			From: from, Protocol: p, To: netip.MustParseAddrPort(to), Timeout: timeout,
		})
		if errors.Is(err, unix.EPERM) {
			seen["not permitted"] = true
			continue
		}
		check(c.t, err)
		seen[o.String()] = true
		if o.Result == testbed.TimedOut { // which takes long
			break
		}
	}
	var lines []string
	for line := range seen {
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, ", ")
}

func (c cluster) expect(want string, from testbed.Place, p model.Protocol, to string) {
	c.t.Helper()
	timeout := answerTime
	if want == "timed out" {
		timeout = 5 * time.Second
	}
	if got := c.answersWithin(timeout, from, p, to); got != want {
		c.t.Errorf("%s to %s/%s: %s; want %s", from, to, p, got, want)
	}
}

// audited is an error if the plane finds a difference.
func (c cluster) audited(p dataplane.Dataplane, s *model.State) {
	c.t.Helper()
	report, err := p.Audit(c.t.Context(), s, dataplane.Quick)
	check(c.t, err)
	for _, d := range report.Drifts {
		c.t.Error(d)
	}
}

const web = `
backend default/web:http cluster 10.244.1.11:8080 local
backend default/web:http cluster 10.244.2.13:8080
backend default/web:http cluster6 [fd00::af4:10b]:8080 local
backend default/web:dns cluster 10.244.1.12:5353 local
frontend 10.96.0.10:80/tcp any forward default/web:http cluster snat offcluster
frontend 10.96.0.10:53/udp any forward default/web:dns cluster snat offcluster
frontend 10.96.0.10:81/tcp any reject default/web:admin
frontend 127.0.0.1:30080/tcp any forward default/web:http cluster snat always
frontend 192.0.2.1:30080/tcp any forward default/web:http cluster snat never
frontend [fd00::a60:a]:80/tcp any forward default/web:http cluster6 snat offcluster
guard 10.96.0.0/16 drop
guard 10.96.0.10/32 reject
pods 10.244.0.0/16
pods fd00::af4:0/112
`

func TestServes(t *testing.T) {
	c := newCluster(t)
	p := c.open()
	s := parse(t, web)
	check(t, p.Sync(t.Context(), s))
	c.audited(p, s)
	kernel, err := features.LinuxVersionCode()
	check(t, err)
	_, known := c.netnsCookie(testbed.Node)
	for _, from := range []testbed.Place{"client", testbed.Node} {
		refused, dropped := "refused", "timed out"
		switch {
		case from != testbed.Node: // its packets are answered
		case !known: // only the machine's first namespace is taken for a node's, so these pass
			refused, dropped = "unreachable", "unreachable"
		case kernel < 5<<16|18<<8: // connect() knows no other error
			refused, dropped = "not permitted", "not permitted"
		}
		v4, v6 := c.Addr(from, false), c.Addr(from, true)
		c.expect(fmt.Sprintf("pod-a source %s, pod-c source %[1]s", v4), from, model.TCP, "10.96.0.10:80")
		c.expect(fmt.Sprintf("pod-a source %s, pod-c source %[1]s", v4), from, model.TCP, "192.0.2.1:30080")
		c.expect(fmt.Sprintf("pod-a source %s", v6), from, model.TCP, "[fd00::a60:a]:80")
		c.expect(fmt.Sprintf("pod-b source %s", v4), from, model.UDP, "10.96.0.10:53")
		c.expect(refused, from, model.TCP, "10.96.0.10:81")
		c.expect(refused, from, model.TCP, "10.96.0.10:82")
		c.expect(dropped, from, model.TCP, "10.96.0.11:80")
	}
	check(t, p.Remove(context.Background()))
	if _, err := os.Stat(c.pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins are left: %v", err)
	}
	check(t, p.Close())
}
