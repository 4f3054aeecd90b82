package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
)

// runs runs a command line under a name and expects an exit status and text in all it printed.
func (w *world) runs(name, args string, status int, want ...string) string {
	w.Helper()
	c := w.command(strings.Fields(strings.ReplaceAll(args, "DIR", w.manifests))...)
	c.Args[0] = name
	out, _ := c.CombinedOutput()
	if c.ProcessState == nil {
		w.Fatalf("%s %s: it did not start", name, args)
	}
	if got := c.ProcessState.ExitCode(); got != status {
		w.Errorf("%s %s: exit status %d, want %d\n%s", name, args, got, status, out)
	}
	for _, text := range want {
		if !strings.Contains(string(out), text) {
			w.Errorf("%s %s: no %q in the output:\n%s", name, args, text, out)
		}
	}
	return string(out)
}

func TestKubeProxy_commandLine(t *testing.T) {
	w := newWorld(t)
	written := filepath.Join(t.TempDir(), "written.conf")
	w.runs("kube-proxy", "--help", 0, "kube-proxy", "--conntrack-max-per-core", "Node port", "--healthz-bind-address")
	w.runs("kube-proxy", "--version", 0, "fairlead ")
	w.runs("kube-proxy", "run", 2, `"run" is not a flag`)
	w.runs("kube-proxy", "--nonsense", 2, "unknown flag: --nonsense")
	w.runs("kube-proxy", "--config /does/not/exist", 2, "/does/not/exist")
	w.runs("/usr/local/bin/kube-proxy", "--proxy-mode ipvs --masquerade-all --write-config-to "+written, 0)
	text, err := os.ReadFile(written)
	if err != nil || !strings.Contains(string(text), "mode: ipvs") || !strings.Contains(string(text), "kind: KubeProxyConfiguration") {
		t.Errorf("written: %v\n%s", err, text)
	}
	w.runs("fairlead", "config --config "+written, 0, "mode: ipvs", "kind: FairleadConfiguration", "\n---\n")
	w.runs("fairlead", "config schema FairleadConfiguration", 0, `"$schema"`)
	w.runs("fairlead", "config schema Nonsense", 2, "Nonsense")
	w.runs("fairlead", "--version", 0, "fairlead ")
	w.runs("fairlead", "", 0, "Available Commands", "--version")
	w.runs("fairlead", "nonsense", 2, "unknown command")
	w.runs("fairlead", "run --help", 0, "fairlead run", "Configuration", "--config", "Examples",
		"--manifests file or directory ")
}

// sysctl reads a setting of connection tracking on the node.
func (w *world) sysctl(name string) string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), testbed.Node, "cat", "/proc/sys/net/netfilter/nf_conntrack_"+name).CombinedOutput()
	if err != nil {
		w.Fatalf("%s: %v %s", name, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (w *world) ruleset() string {
	w.Helper()
	out, err := w.bed.Command(w.Context(), testbed.Node, "nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		w.Fatalf("nft: %v %s", err, out)
	}
	return string(out)
}

func TestKubeProxy_initOnly(t *testing.T) {
	w := newWorld(t)
	settings := " --proxy-mode nftables --conntrack-max-per-core 0 --conntrack-tcp-timeout-close-wait 7m --conntrack-tcp-be-liberal --conntrack-udp-timeout 11s"
	w.runs("kube-proxy", "--init-only"+settings, 0, "nf_conntrack_tcp_timeout_close_wait")
	for name, want := range map[string]string{"tcp_timeout_close_wait": "420", "tcp_be_liberal": "1", "udp_timeout": "11"} {
		if got := w.sysctl(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	if rules := w.ruleset(); rules != "" {
		t.Errorf("rules, though nothing should be programmed:\n%s", rules)
	}
	// Nothing is left to do, and so nothing is said.
	if out := w.runs("kube-proxy", "--init-only"+settings, 0); strings.Contains(out, "changed a kernel setting") {
		t.Errorf("the second time:\n%s", out)
	}
	// The number of connections is the machine's, which a namespace cannot change.
	w.runs("kube-proxy", "--init-only --conntrack-max-per-core 1 --conntrack-min 912345", 1,
		"cannot set nf_conntrack_max to 912345", "conntrack.maxPerCore: 0")
	const localnet = "/proc/sys/net/ipv4/conf/all/route_localnet"
	w.on(testbed.Node, "sh", "-c", "echo 0 >"+localnet)
	w.runs("kube-proxy", "--init-only --proxy-mode iptables --iptables-localhost-nodeports=false --conntrack-max-per-core 0", 0)
	if got := w.on(testbed.Node, "cat", localnet); strings.TrimSpace(got) != "0" {
		t.Errorf("without NodePorts on 127.0.0.1 route_localnet is %s", got)
	}
}

// openWorld makes a world whose manifests, and the program, other users may read: t.TempDir is root's.
func openWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	lack.Need(t, lack.Root)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	open(t, w.manifests)
	open(t, filepath.Dir(self))
	return w
}

// unprivileged are the arguments that make a command run without root, with or without CAP_NET_ADMIN.
func (w *world) unprivileged(caps string, args ...string) *testbed.Cmd {
	w.Helper()
	self := w.command(args...)
	c := w.bed.Command(context.WithoutCancel(w.Context()), testbed.Node, "setpriv", append([]string{
		"--reuid=65534", "--clear-groups", "--no-new-privs", "--bounding-set=" + caps, "--inh-caps=" + caps, "--ambient-caps=" + caps,
		"--", self.Path}, args...)...)
	c.Env = self.Env
	return c
}

func TestRun_withoutRoot(t *testing.T) {
	w := openWorld(t)
	args := []string{"run", "--manifests", w.manifests, "--once", "--node-ip", "192.0.2.1", "--conntrack-max-per-core=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=9m"}
	out, err := w.unprivileged("-all", args...).CombinedOutput()
	if err == nil || strings.Count(string(out), "root, or CAP_NET_ADMIN, is needed") != 1 {
		t.Errorf("without any capability: %v\n%s", err, out)
	}
	w.runs("fairlead", "run --init-only "+strings.Join(args[6:], " "), 0)
	out, err = w.unprivileged("-all,+net_admin", args...).CombinedOutput()
	if err != nil || strings.Contains(string(out), "level=ERROR") {
		t.Errorf("with CAP_NET_ADMIN: %v\n%s", err, out)
	}
	if got := w.probe(testbed.Node, clusterIP); !strings.HasPrefix(got, "pod-") {
		t.Errorf("%s answers %s", clusterIP, got)
	}
}

// open lets all users into a directory and those above it, as far as they are this test's.
func open(t *testing.T, dir string) {
	t.Helper()
	for ; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, info.Mode()|0o055); err != nil {
			t.Fatal(err)
		}
	}
}

// busy listens on the node where the proxy would.
func (w *world) busy(at string) net.Listener {
	w.Helper()
	var l net.Listener
	err := w.bed.Do(testbed.Node, func() (err error) {
		l, err = net.Listen("tcp", at)
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = l.Close() })
	return l
}

func (w *world) get(at netip.AddrPort, path string) int {
	status, _ := w.page(at, path)
	return status
}

func (w *world) page(at netip.AddrPort, path string) (status int, body string) {
	response, err := w.bed.HTTPClient(testbed.Node).Get("http://" + at.String() + path)
	if err != nil {
		return 0, ""
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	return response.StatusCode, string(text)
}

// The ports of kube-proxy's listeners may be taken: then they are tried again and again, unless the
// administrator has said that this is fatal.
func TestRun_takenPorts(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct{ at, flag string }{
		{"127.0.0.1:10249", "--metrics-bind-address"},
		{"127.0.0.1:10256", "--healthz-bind-address"},
	} {
		l := w.busy(c.at)
		w.runs("fairlead", "run --manifests DIR --bind-address-hard-fail --control-socket "+w.socket+" "+c.flag+" "+c.at, 1,
			c.at, "address already in use")
		if c.flag == "--healthz-bind-address" {
			_ = l.Close()
			continue
		}
		p := w.start() // all the same
		_ = l.Close()
		at := netip.MustParseAddrPort(c.at)
		eventually.True(w, "metrics are served", func() bool { return w.get(at, "/metrics") == http.StatusOK })
		if err := p.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = p.Wait()
	}
}

// Feature gates say which pages there are, and may be edited.
func TestRun_gatesOfPages(t *testing.T) {
	w := newWorld(t)
	file := filepath.Join(t.TempDir(), "config.conf")
	gates := func(said string) {
		t.Helper()
		text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n" +
			"clusterCIDR: 10.244.0.0/16\nfeatureGates: {" + said + "}\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pages := func(flagz, statusz int) {
		t.Helper()
		at := netip.MustParseAddrPort("127.0.0.1:10249")
		eventually.True(w, fmt.Sprintf("/flagz %d, /statusz %d", flagz, statusz), func() bool {
			return w.get(at, "/flagz") == flagz && w.get(at, "/statusz") == statusz
		})
	}
	gates("ComponentFlagz: false")
	w.start("--config", file)
	pages(http.StatusNotFound, http.StatusOK)
	gates("ComponentStatusz: false")
	pages(http.StatusOK, http.StatusNotFound)
	gates("")
	pages(http.StatusOK, http.StatusOK)
}
