package attack

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/programtest"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/model"
)

var agent string // the program's path

func TestMain(m *testing.M) {
	traffic.Main()
	os.Exit(testbed.RunTests(func() int {
		return programtest.WithAgent(func(path string) int {
			agent = path
			return m.Run()
		})
	}))
}

// plane is a data plane, as --proxy-mode names it.
type plane string

const (
	nftables  plane = "nftables"
	iptables  plane = "iptables"
	ipvs      plane = "ipvs"
	ebpf      plane = "ebpf"
	userspace plane = "userspace"
)

var planes = []plane{nftables, iptables, ipvs, ebpf, userspace}

// maxFiles is how many files the process may open. A container has more, which an attacker only needs more time for.
const maxFiles = "4096"

// Addresses of the process's listeners.
var (
	healthz = netip.MustParseAddrPort("127.0.0.1:10256")
	metrics = netip.MustParseAddrPort("127.0.0.1:10249")
)

// stage is a node with its proxy, a victim, and room for attackers.
type stage struct {
	*testing.T
	on      plane
	bed     *testbed.Bed
	top     string // directory of all files
	objects source
	control string // the socket
	proxy   *kubernetes.Proxy
	holds   bool // connections
}

// source is where the proxy has its objects from.
type source interface {
	// set has objects take the place of those of this name at once.
	set(name string, objects []runtime.Object) error
	flags() []string // that lead the proxy to it
}

// Places. The evil ones are where an attacker has a pod, or a machine on the LAN.
const (
	client, far  testbed.Place = "client", "far"
	evil, lurker testbed.Place = "evil", "lurker"
	stranger     testbed.Place = "stranger"
)

// newStage builds the node and starts its proxy, with manifests or an API server, and with more flags.
func newStage(t *testing.T, on plane, server bool, flags ...string) *stage {
	t.Helper()
	s := &stage{T: t, on: on, bed: testbed.Need(t, testbed.Spec{Cgroup: on == ebpf}), top: t.TempDir()}
	s.control = filepath.Join(s.top, "control")
	s.populate()
	if s.objects = newDirectory(s); server {
		s.objects = newServer(s)
	}
	s.set("cluster", clusterObjects(s)...)
	s.set("victim", victimObjects(s)...)
	s.set("base", baseObjects(s)...)
	s.start(flags...)
	return s
}

// populate starts the pods.
func (s *stage) populate() {
	s.Helper()
	ports := func(numbers ...uint16) (all []testbed.PodPort) {
		for _, n := range numbers {
			all = append(all, testbed.PodPort{Protocol: model.TCP, Port: n}, testbed.PodPort{Protocol: model.UDP, Port: n})
		}
		return all
	}
	web := ports(targetPorts()...)
	for _, p := range []testbed.PodSpec{
		{Name: string(client), Node: testbed.Node},
		{Name: string(far), Node: testbed.NodeB},
		{Name: "web-1", Node: testbed.Node, Ports: web},
		{Name: "web-2", Node: testbed.NodeB, Ports: web},
		{Name: "host", Node: testbed.Node, HostNetwork: true, Ports: ports(hostPort)},
		{Name: string(evil), Node: testbed.NodeB, Ports: ports(evilPort)},
		{Name: string(lurker), Node: testbed.Node, Ports: ports(evilPort)},
		{Name: string(stranger), Node: testbed.LAN, Addrs: both("192.0.2.66")},
	} {
		if _, err := s.bed.AddPod(s.Context(), p); err != nil {
			s.Fatal(err)
		}
	}
}

// start starts the proxy, and returns when it serves.
func (s *stage) start(flags ...string) {
	s.Helper()
	p, err := kubernetes.StartProxy(s.Context(), kubernetes.ProxyOptions{Bed: s.bed, Command: s.command(flags...)})
	if err != nil {
		s.Fatal(err)
	}
	s.proxy = p
	s.Cleanup(func() {
		if err := p.Kill(); err != nil {
			s.Error(err)
		}
	})
	if err := p.Ready(s.Context()); err != nil {
		s.Fatal(err)
	}
}

// command is a proxy on the node. Its pins are in a file system of its own.
func (s *stage) command(flags ...string) []string {
	limited := []string{"sh", "-c", `ulimit -n ` + maxFiles + ` && exec "$0" "$@"`}
	if s.on == ebpf {
		limited = []string{"unshare", "--mount", "sh", "-c",
			`mount -t bpf bpf /sys/fs/bpf && ulimit -n ` + maxFiles + ` && exec "$0" "$@"`}
		flags = append(flags, "--cgroup-root", s.bed.Cgroup())
	}
	return slices.Concat(limited, []string{agent, "run", "--proxy-mode", string(s.on)}, s.objects.flags(), flags,
		[]string{
			"--hostname-override", string(testbed.Node), "--cluster-cidr", testbed.ClusterCIDR(), "--control-socket", s.control,
			"--node-ip", s.bed.Addr(testbed.Node, false).String(), "--node-ip", s.bed.Addr(testbed.Node, true).String(),
			"--healthz-bind-address", "0.0.0.0:10256", "--metrics-bind-address", metrics.String(),
			"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
		})
}

// set has objects take the place of those of this name at once.
func (s *stage) set(name string, objects ...runtime.Object) {
	s.Helper()
	if err := s.objects.set(name, objects); err != nil {
		s.Fatal(err)
	}
}

// withdraw takes away what the attacker has made, but for what was there from the beginning.
func (s *stage) withdraw() {
	s.Helper()
	if d, ok := s.objects.(directory); ok {
		if err := d.clear(tenant); err != nil {
			s.Fatal(err)
		}
		return
	}
	s.set(tenant)
}

// run has a program on the node print something, and reports how it ended.
func (s *stage) run(name string, args ...string) (out string, err error) {
	text, err := s.bed.Command(s.Context(), testbed.Node, name, args...).CombinedOutput()
	return string(text), err
}

// status is what an operator is told.
func (s *stage) status() string {
	out, err := s.run(agent, "status", "--control-socket", s.control)
	if err != nil {
		out += err.Error()
	}
	return out
}
