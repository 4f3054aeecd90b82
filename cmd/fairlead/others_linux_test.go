package main

import (
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Another user of the node may read the pages for operators, as with kube-proxy. The control socket answers root alone,
// so other users can neither give orders nor read more about Services.
func TestRun_otherUsers(t *testing.T) {
	m := newMachine(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{filepath.Dir(self), filepath.Dir(m.socket)} {
		open(t, dir) // so that nothing but the socket's own mode is in the way
	}
	outside := *m.world
	outside.inside = nil
	m.write("affinity.yaml", strings.NewReplacer("web", "kept", "NodePort", "ClusterIP\n  sessionAffinity: ClientIP", ", nodePort: 30080", "",
		"10.96.0.10", "10.96.0.13").Replace(web))
	p := m.start("--cgroup-root", m.bed.Cgroup(), "--proxy-mode", "ebpf")
	t.Run("control socket", func(t *testing.T) {
		for _, command := range []string{
			"status", "dump", "dump --counters", "explain node 10.96.0.10:80", "audit", "switch nftables",
		} {
			args := append(strings.Fields(command), "--control-socket", m.socket)
			out, err := outside.unprivileged("-all", args...).CombinedOutput()
			if err == nil || !strings.Contains(string(out), "permission denied") {
				t.Errorf("fairlead %s as another user: %v\n%s", command, err, out)
			}
		}
	})
	t.Run("pages", func(t *testing.T) {
		metrics := netip.MustParseAddrPort("127.0.0.1:10249")
		for _, path := range []string{"/metrics", "/healthz", "/proxyMode"} {
			if status := m.get(metrics, path); status != http.StatusOK {
				t.Errorf("%s: %d", path, status)
			}
		}
		for _, path := range []string{"/debug/pprof/heap", "/debug/flags/v"} {
			if status := m.get(metrics, path); status != http.StatusNotFound {
				t.Errorf("%s: %d, though profiling is off", path, status)
			}
		}
	})
	t.Run("files", func(t *testing.T) {
		if pins := privates(t, m.pinned); pins < 10 {
			t.Errorf("only %d files and directories are pinned", pins)
		}
		info, err := os.Stat(m.socket)
		if err != nil || info.Mode() != fs.ModeSocket|0o600 {
			t.Errorf("the control socket: %v, %v", info, err)
		}
	})
	_ = p.Process.Kill()
	_ = p.Wait()
}

// privates counts what is in a directory. Only root may use any of it.
func privates(t *testing.T, dir string) (n int) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		n++
		if d.Type() != fs.ModeSymlink && info.Mode().Perm()&0o077 != 0 { // whose mode means nothing
			t.Errorf("%s has the mode %s", path, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	return n
}
