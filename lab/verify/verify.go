// Package verify says whether a kernel suits a node: whether each data plane makes the node's Services work there, with
// its configuration, shown by real connections. The kernel is this machine's, or another one that runs as a guest.
//
//	Services, configuration ─► directory ─► guest: "fairlead-lab verify --guest" ─► demo and conformance, for each mode
//	                                          │  vm.Machine (User-Mode Linux), vm.Emulated (any other), or none
//	Report ◄── a line of JSON for each mode ◄─┘
package verify

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"

	"fairlead.dev/fairlead/config"
	"fairlead.dev/fairlead/lab/demo"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/cluster"
	"fairlead.dev/fairlead/programs"
	"fairlead.dev/fairlead/said"
)

// Plane is what was found out about one data plane.
type Plane struct {
	Mode     string   `json:"mode"`
	Safe     bool     `json:"safe"`
	Reasons  []string `json:"reasons"` // why it is not
	Services int      `json:"services"`
	Ways     int      `json:"ways"`  // into them, each tried from one place
	Cases    int      `json:"cases"` // of conformance that were played; none if Services fail
	Release  string   `json:"release"`
}

// Report is about a kernel.
type Report struct {
	Kernel  string   `json:"kernel"` // its release
	Safe    bool     `json:"safe"`   // each of Modes is
	Modes   []string `json:"modes"`  // of the node
	Summary string   `json:"summary"`
	Planes  []Plane  `json:"planes"`
}

// judge makes a report of what was found.
func judge(planes []Plane, modes []string) Report {
	r := Report{Kernel: planes[0].Release, Safe: true, Modes: modes, Planes: planes}
	services, reason := 0, ""
	for _, p := range planes {
		services = max(services, p.Services)
		if slices.Contains(modes, p.Mode) && !p.Safe {
			r.Safe = false
			if reason == "" {
				reason = p.Mode + ": " + p.Reasons[0]
			}
		}
	}
	verdict := "safe"
	if !r.Safe {
		verdict = "not safe"
	}
	of := "mode " + modes[0]
	if len(modes) > 1 {
		of = "modes " + strings.Join(modes, ", ")
	}
	if services > 0 {
		of += ", " + said.Count(services, "Service")
	}
	r.Summary = fmt.Sprintf("Linux %s is %s for this node's configuration (%s)", r.Kernel, verdict, of)
	if reason != "" {
		r.Summary += ": " + reason
	}
	return r
}

// String is the report for people: the answer, and a line for each plane and for each thing that is wrong.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s.\n\n", strings.TrimSuffix(r.Summary, "."))
	for _, p := range r.Planes {
		verdict := fmt.Sprintf("safe: all %s into %s are as they should be",
			said.Count(p.Ways, "way"), said.Count(p.Services, "Service"))
		if p.Cases > 0 {
			verdict += ", and " + said.Count(p.Cases, "case") + " of conformance"
		}
		if !p.Safe {
			verdict = "not safe"
		}
		fmt.Fprintf(&b, "%-10s %s\n", p.Mode, verdict)
		for _, reason := range p.Reasons {
			fmt.Fprintf(&b, "           %s\n", reason)
		}
	}
	return b.String()
}

// emulated is the directory that an emulated guest is given.
const emulated = "."

// The files of that directory.
const (
	manifests    = "manifests"
	kubeProxy    = "kube-proxy-%s.yaml" // of a mode
	fairleadFile = "fairlead.yaml"
)

// pack puts into a directory what the guest needs to know, and returns the mode of the node.
func pack(dir string, o Options) (mode string, err error) {
	mode = string(config.ModeNFTables)
	if len(o.Files) > 0 {
		all, err := cluster.Load(o.Files...)
		if err != nil {
			return "", err
		}
		if err := os.Mkdir(filepath.Join(dir, manifests), 0o755); err != nil {
			return "", err
		}
		for i, m := range all {
			file := filepath.Join(dir, manifests, fmt.Sprintf("%05d.yaml", i))
			if err := os.WriteFile(file, m.Data, 0o600); err != nil {
				return "", err
			}
		}
	}
	if o.Config == "" {
		return mode, nil
	}
	flags := config.NewFlags(demo.Modes()...)
	flags.Config = o.Config
	c, err := flags.Load()
	if err != nil {
		return "", err
	}
	if chosen := string(c.KubeProxy.Mode); slices.Contains(demo.Modes(), chosen) {
		mode = chosen // else it is auto
	}
	// These are about the node's place in its cluster. It has another place here.
	c.KubeProxy.ClusterCIDR = testbed.ClusterCIDR()
	c.KubeProxy.HealthzBindAddress = "127.0.0.1:10256"
	c.KubeProxy.NodePortAddresses = nil
	c.KubeProxy.DetectLocalMode, c.KubeProxy.DetectLocal.BridgeInterface = "ClusterCIDR", ""
	c.KubeProxy.DetectLocal.InterfaceNamePrefix = ""
	c.KubeProxy.BindAddress, c.KubeProxy.HostnameOverride, c.KubeProxy.ClientConnection.Kubeconfig = "", "", ""
	own, err := c.Document(config.FairleadKind)
	for _, tried := range demo.Modes() {
		c.KubeProxy.Mode = kubeproxy.ProxyMode(tried)
		err = errors.Join(err, c.WriteKubeProxy(filepath.Join(dir, fmt.Sprintf(kubeProxy, tried))))
	}
	return mode, errors.Join(err, os.WriteFile(filepath.Join(dir, fairleadFile), own, 0o600))
}

// line begins a line of a guest that is about a plane.
const line = "fairlead-verify: "

// Guest checks the planes on this kernel, and prints a line for each. The directory is what pack has made.
func Guest(ctx context.Context, dir string, modes []string, out io.Writer) error {
	for _, mode := range modes {
		p, err := check(ctx, dir, mode)
		if err != nil {
			return fmt.Errorf("mode %s: %w", mode, err)
		}
		text, err := json.Marshal(p)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "\n%s%s\n", line, text); err != nil { // the kernel may have begun a line
			return err
		}
	}
	return nil
}

// check has the demo try the Services. An error says why that was impossible.
func check(ctx context.Context, dir, mode string) (p Plane, err error) {
	p = Plane{Mode: mode, Reasons: []string{}}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return p, err
	}
	p.Release = unix.ByteSliceToString(name.Release[:])
	agent, err := programs.Find(programs.Agent)
	if err != nil {
		return p, err
	}
	var out bytes.Buffer
	o := demo.Options{Proxy: []string{agent, "run"}, Mode: mode, Out: &out, JSON: true, Slow: true}
	if files := filepath.Join(dir, manifests); exists(files) {
		o.Files = []string{files}
	}
	if file := filepath.Join(dir, fmt.Sprintf(kubeProxy, mode)); exists(file) {
		o.Proxy = append(o.Proxy, "--config", file, "--fairlead-config", filepath.Join(dir, fairleadFile))
	}
	err = demo.Run(ctx, o)
	if errors.Is(err, demo.ErrProxy) && ctx.Err() == nil {
		what, words, _ := strings.Cut(err.Error(), "; its last words:\n")
		p.Reasons = append(because(words), what)
		return p, nil
	}
	if out.Len() == 0 {
		return p, err
	}
	if err := p.read(out.Bytes()); err != nil || !p.Safe || mode == "ebpf" && dir == emulated {
		return p, err // an emulated kernel takes minutes to load the programs of each case
	}
	return p, p.conform(ctx, dir != emulated)
}

// tests of package conformance that play its cases on a plane; with _vandalism, those that change its rules.
var tests = map[string]string{
	"nftables": "TestNFTables", "iptables": "TestIPTablesNFT", "ipvs": "TestIPVS", "ebpf": "TestEBPF",
	"userspace": "TestUserspace",
}

// changers are programs of others that those need: they are left out without.
var changers = map[string]string{
	"nftables": "nft", "iptables": "iptables-nft", "ipvs": "ipvsadm", "ebpf": "nft", "userspace": "nft",
}

// cases are those that have each feature once, in both families. A third of them, as FAIRLEAD_SEED has it, are played
// with a new process for each change.
const cases = "^(affinity|cluster-ip|external-ips|external-local|hairpin|node-port|sctp|source-ranges|tcp-lives|udp|" +
	"udp-large)$"

var (
	caseEnds = regexp.MustCompile(`(?m)^ *--- (PASS|FAIL): (Test\w+(?:/cases/(\S+/\S+/\S+)|_(vandalism))) `)
	caseLine = regexp.MustCompile(`^ *(?:=== \w+ +|--- \w+: )(\S+)`) // says whose lines follow
)

// Of that many cases that fail, so many last lines are told, and so much of each.
const (
	maxTold      = 3
	lastLines    = 10
	maxLineBytes = 300
)

// conform plays the cases. A fast kernel gets a hundred changes to the plane's rules, too.
func (p *Plane) conform(ctx context.Context, fast bool) error {
	program, err := programs.Find(programs.Cases)
	if err == nil {
		if _, err = exec.LookPath("nft"); err != nil { // by which cases look at what is left
			err = fmt.Errorf("cases of conformance need nft, of the package nftables: %w", err)
		}
	}
	if err != nil {
		return err
	}
	told, run := 0, "^"+tests[p.Mode]+"$/^cases$/"+cases
	if _, missing := exec.LookPath(changers[p.Mode]); fast && missing == nil {
		run += "|^" + tests[p.Mode] + "_vandalism$"
	}
	out, err := play(ctx, program, run)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	for _, m := range caseEnds.FindAllSubmatch(out, -1) {
		p.Cases++
		if string(m[1]) == "FAIL" {
			p.Reasons = append(p.Reasons, fmt.Sprintf("conformance: %s%s fails", m[3], m[4]))
			if told++; told <= maxTold {
				p.Reasons = append(p.Reasons, lastOf(out, string(m[2]))...)
			}
		}
	}
	if p.Cases == 0 {
		err = cmp.Or(err, errors.New("no case was played"))
	}
	if err != nil && told == 0 {
		return fmt.Errorf("%s: %w: %s", programs.Cases, err, strings.Join(lastOf(out, ""), "\n"))
	}
	p.Safe = told == 0
	return nil
}

// play runs the cases. Nothing of them goes on when that ends, or when this process is killed.
func play(ctx context.Context, program, run string) ([]byte, error) {
	temp, err := os.MkdirTemp("", "fairlead-cases-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	runtime.LockOSThread() // its end would end the cases: see Pdeathsig in prctl(2)
	defer runtime.UnlockOSThread()
	c := exec.CommandContext(ctx, program, "-test.v", "-test.timeout", "0", "-test.run", run)
	// The same cases each time; and not all of them in tests that take everything.
	c.Env = append(os.Environ(), "FAIRLEAD_CASES=", "FAIRLEAD_SEED=1", "TMPDIR="+temp)
	c.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGTERM} // upon which they end their group
	c.Cancel = func() error { return unix.Kill(-c.Process.Pid, unix.SIGKILL) }
	c.WaitDelay = 10 * time.Second // for what has left the group and keeps the output open
	out, err := c.CombinedOutput()
	if ctx.Err() != nil {
		testbed.SweepCgroups()
	}
	return out, err
}

// lastOf are the last lines that a test, or one of its subtests, has printed; empty: all tests.
func lastOf(out []byte, test string) (lines []string) {
	ours := test == ""
	for l := range strings.Lines(string(out)) {
		l = strings.TrimRight(l, "\n")
		if m := caseLine.FindStringSubmatch(l); m != nil && test != "" {
			ours = m[1] == test || strings.HasPrefix(m[1], test+"/")
		} else if ours {
			lines = append(lines, strings.ToValidUTF8(l[:min(len(l), maxLineBytes)], ""))
		}
	}
	return lines[max(0, len(lines)-lastLines):]
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// read takes what the demo says.
func (p *Plane) read(text []byte) error {
	var found struct {
		Ways        []struct{ Service string }
		Faults, Log []string
		Plane       string
	}
	if err := json.Unmarshal(text, &found); err != nil {
		return fmt.Errorf("what the demo says: %w", err)
	}
	services := map[string]bool{}
	for _, w := range found.Ways {
		services[w.Service] = true
	}
	p.Ways, p.Services = len(found.Ways), len(services)
	var logged []string
	for _, l := range found.Log {
		logged = append(logged, because(l)...)
	}
	if found.Plane != p.Mode {
		p.Reasons = append([]string{"data plane " + found.Plane + " serves instead"}, logged...)
	} else if len(found.Faults) > 0 {
		p.Reasons = append(found.Faults, logged...)
	}
	p.Safe = len(p.Reasons) == 0
	return nil
}

var (
	attribute = regexp.MustCompile(`\b(msg|error|err)=("(?:[^"\\]|\\.)*"|\S+)`)
	logLine   = regexp.MustCompile(` level=(WARN|ERROR) `)
)

// because are the reasons in the proxy's log: the warnings, or else all of it. The last warning comes first: it may
// have ended the proxy.
func because(text string) (reasons []string) {
	for l := range strings.Lines(text) {
		if !logLine.MatchString(l) {
			continue
		}
		var parts []string
		for _, m := range attribute.FindAllStringSubmatch(l, -1) {
			if word, err := strconv.Unquote(m[2]); err == nil {
				m[2] = word
			}
			parts = append(parts, strings.TrimSpace(m[2]))
		}
		if reason := strings.Join(parts, ": "); !slices.Contains(reasons, reason) {
			reasons = append([]string{reason}, reasons...)
		}
	}
	if all := strings.Join(strings.Fields(text), " "); reasons == nil && all != "" {
		reasons = []string{all}
	}
	return reasons
}
