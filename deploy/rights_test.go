package deploy

import (
	"bufio"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/vm"
	"fairlead.dev/fairlead/model"
)

// modes are those of the configuration.
func modes() []string { return []string{"auto", "ebpf", "iptables", "ipvs", "nftables", "userspace"} }

// agentVariable names an unpacked image of the agent. In the test kernel there is no time to build one.
const agentVariable = "FAIRLEAD_TEST_AGENT"

// TestLeastRights runs the chart's container in each mode with the rights that the chart asks for in that mode, and no
// others. These are capabilities, a read-only root, no new privileges, and the system calls of the profile
// RuntimeDefault.
func TestLeastRights(t *testing.T) {
	root := os.Getenv(agentVariable)
	if root == "" {
		root = needAgent(t).unpack(t)
	}
	for _, mode := range modes() {
		t.Run(mode, func(t *testing.T) {
			if _, err := os.Stat("/proc/net/ip_vs"); err != nil && mode == "ipvs" {
				t.Setenv(agentVariable, root)
				vm.Replay(t, "IPVS")
				return
			}
			testRights(t, root, mode)
		})
	}
}

func testRights(t *testing.T, root, mode string) {
	bed := testbed.Need(t, testbed.Spec{Cgroup: mode == "ebpf"})
	for _, name := range []string{"first", "second"} {
		ports := []testbed.PodPort{{Protocol: model.TCP, Port: 8080}, {Protocol: model.UDP, Port: 8080}}
		if _, err := bed.AddPod(t.Context(), testbed.PodSpec{Name: name, Ports: ports}); err != nil {
			t.Fatal(err)
		}
	}
	s := newStrict(t, bed, root, mode)
	s.write("first")
	proxy := s.start(t, bed, s.spec)
	s.serves("first")
	s.write("second")
	s.serves("second")
	if out := s.runs("audit"); !strings.Contains(out, ": no difference\n") {
		t.Errorf("fairlead audit: %s", out)
	}
	s.testProcess(proxy)
	terminate(t, proxy)
	served := mode
	if mode == "auto" { // this image has nothing to measure with, which is told
		served = "nftables"
	} else {
		equal(t, complaints(proxy.Log()), "")
	}
	if !strings.Contains(proxy.Log(), "plane="+served) {
		t.Errorf("another mode served:\n%s", proxy.Log())
	}
	s.runs("clean", "--own")
}

// testProcess looks at what the kernel says of the daemon's process.
func (s *strict) testProcess(proxy *kubernetes.Proxy) {
	s.t.Helper()
	var want uint64
	for _, name := range s.spec.Containers[0].SecurityContext.Capabilities.Add {
		want |= 1 << capabilityNumbers()[name]
	}
	status := read(s.t, fmt.Sprintf("/proc/%d/status", child(s.t, proxy)))
	for _, line := range []string{
		fmt.Sprintf("CapEff:\t%016x", want), fmt.Sprintf("CapPrm:\t%016x", want), "NoNewPrivs:\t1", "Seccomp:\t2",
	} {
		if !strings.Contains(status, line+"\n") {
			s.t.Errorf("the daemon's status has no line %q:\n%s", line, status)
		}
	}
}

func capabilityNumbers() map[corev1.Capability]int {
	return map[corev1.Capability]int{
		"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "BPF": unix.CAP_BPF,
		"PERFMON": unix.CAP_PERFMON, "SYS_ADMIN": unix.CAP_SYS_ADMIN,
	}
}

// strict is a node on which a pod of the chart has what it asks for.
type strict struct {
	host
	t    *testing.T
	bed  *testbed.Bed
	spec corev1.PodSpec
}

func newStrict(t *testing.T, bed *testbed.Bed, root, mode string) strict {
	t.Helper()
	values := []string{
		"--set", "apiServer=https://192.0.2.254:6443", "--set", "config.mode=" + mode, "--set", "config.clusterCIDR=10.244.0.0/16",
		"--set", "config.conntrack.maxPerCore=0", "--set", "fairleadConfig.manifests={/manifests}",
		// Without those on 127.0.0.1: to clean after them takes the right to write a sysctl.
		"--set", "config.nodePortAddresses={192.0.2.0/24}",
	}
	if bed.Cgroup() != "" {
		values = append(values, "--set", "fairleadConfig.ebpf.cgroupRoot=/host/cgroup")
	}
	rendered := template(t, values...)
	s := strict{t: t, bed: bed, spec: daemonSet(t, rendered).Spec.Template.Spec}
	s.host = host{root: root, name: string(testbed.Node), paths: t.TempDir(),
		config: map[string]map[string]string{"fairlead": configMap(t, rendered)}}
	s.account = s.dir(t, "account")
	// The manifests stand for the API server, whose place no right has to do with.
	s.spec.Volumes = append(s.spec.Volumes, corev1.Volume{Name: "manifests", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: "/manifests"}}})
	container := &s.spec.Containers[0]
	container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{Name: "manifests", MountPath: "/manifests", ReadOnly: true})
	s.mount()
	return s
}

// mount gives the node a file system of type bpf, and the cgroups of the testbed, in a mount namespace of its own.
func (s *strict) mount() {
	s.t.Helper()
	cgroup := s.dir(s.t, "/sys/fs/cgroup")
	script := "mount -t bpf bpf " + s.dir(s.t, "/sys/fs/bpf")
	if s.bed.Cgroup() != "" {
		script += " && mount --bind " + s.bed.Cgroup() + " " + cgroup
	}
	holder := s.bed.Command(s.t.Context(), testbed.Node, "unshare", "--mount", "sh", "-c", script+" && echo mounted && exec sleep infinity")
	out, err := holder.StdoutPipe()
	if err == nil {
		err = holder.Start()
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		s.t.Fatalf("mount: %q, %v", line, err)
	}
	process := fmt.Sprintf("/proc/%d/", holder.Process.Pid)
	s.inside = []string{"nsenter", "--mount=" + process + "ns/mnt", "--root=" + process + "root", "--wd=" + process + "root", "--"}
}

// write has Service web lead to a pod.
func (s *strict) write(pod testbed.Place) {
	s.t.Helper()
	text := strings.NewReplacer("10.244.1.77", s.bed.Addr(pod, false).String(),
		"{port: 80, ", "{name: web, port: 80, ", "  ports:\n", "  ports:\n    - {name: dns, port: 53, protocol: UDP, targetPort: 8080}\n",
		"  - {port: 8080}", "  - {name: web, port: 8080}\n  - {name: dns, port: 8080, protocol: UDP}").Replace(read(s.t, "testdata/web.yaml"))
	path := filepath.Join(s.dir(s.t, "/manifests"), "web.yaml")
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		s.t.Fatal(err)
	}
}

// serves waits until a pod answers wherever Service web can be reached.
func (s *strict) serves(pod string) {
	s.t.Helper()
	for _, probe := range []testbed.Probe{
		{From: testbed.Node, To: netip.MustParseAddrPort("10.96.0.77:80")},
		{From: "first", To: netip.MustParseAddrPort("10.96.0.77:80")},
		{From: "first", Protocol: model.UDP, To: netip.MustParseAddrPort("10.96.0.77:53")},
		{From: testbed.Outside, To: netip.MustParseAddrPort("192.0.2.1:30077")},
	} {
		eventually.Equal(s.t, fmt.Sprintf("from %s to %s", probe.From, probe.To), pod, func() string {
			o, err := s.bed.Probe(s.t.Context(), probe)
			if err != nil {
				return err.Error()
			}
			return o.Backend
		})
	}
}

// runs runs a command of the program in a container like the daemon's.
func (s *strict) runs(args ...string) string {
	s.t.Helper()
	c, _ := s.arrange(s.t, s.spec, s.spec.Containers[0])
	command := slices.Concat(s.inside, c.command(s.t, append([]string{"/usr/local/bin/fairlead"}, args...)...))
	out, err := s.bed.Command(s.t.Context(), testbed.Node, command[0], command[1:]...).CombinedOutput()
	if err != nil {
		s.t.Errorf("fairlead %s: %v\n%s", args, err, out)
	}
	return string(out)
}

// daemonSet finds the chart's.
func daemonSet(t *testing.T, manifests string) (set appsv1.DaemonSet) {
	t.Helper()
	for document := range strings.SplitSeq(manifests, "\n---\n") {
		if strings.Contains(document, "kind: DaemonSet\n") {
			if err := yaml.UnmarshalStrict([]byte(document), &set); err != nil {
				t.Fatal(err)
			}
			return set
		}
	}
	t.Fatal("no DaemonSet is rendered")
	return set
}

// The table of rights in docs/install.md is what the chart asks for.
func TestLeastRights_documented(t *testing.T) {
	documented := map[string][]string{}
	row := regexp.MustCompile(`(?m)^\| CAP_(\w+) \| ([a-z, ]+) \| `)
	for _, m := range row.FindAllStringSubmatch(read(t, "../docs/install.md"), -1) {
		for mode := range strings.SplitSeq(m[2], ", ") {
			documented[mode] = append(documented[mode], m[1])
		}
	}
	for _, mode := range modes() {
		c := daemonSet(t, template(t, "--set", "apiServer=https://192.0.2.254:6443", "--set", "config.mode="+mode)).Spec.Template.Spec.Containers[0].SecurityContext
		var have []string
		for _, name := range c.Capabilities.Add {
			have = append(have, string(name))
		}
		equal(t, mode+": "+strings.Join(have, " "), mode+": "+strings.Join(append(documented["all"], documented[mode]...), " "))
		if *c.Privileged || *c.AllowPrivilegeEscalation || !*c.ReadOnlyRootFilesystem || !slices.Equal(c.Capabilities.Drop, []corev1.Capability{"ALL"}) {
			t.Errorf("mode %s: %+v", mode, c)
		}
	}
}
