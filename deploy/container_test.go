package deploy

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/lab/lack"
)

// container is what a container runtime makes of an image and a container of a pod in the host's network. bubblewrap
// gives it the root file system, volumes and capabilities, and not one more.
type container struct {
	root         string
	readOnly     bool
	privileged   bool
	sysctls      bool              // may be written, although it is not privileged
	capabilities []string          // without CAP_
	filtered     bool              // allows the system calls of the profile RuntimeDefault alone
	mounts       map[string]string // path in the container to path here; one that is read-only ends in ":ro"
	env          map[string]string
}

// command is the command line of bubblewrap that runs a program in the container. Like runtimes it
// makes mount points in the root file system, shows /proc/sys writable to privileged containers only,
// and forbids to gain privileges. /sys is never writable: those of the machine's settings that no
// namespace has are there.
func (c container) command(t *testing.T, args ...string) []string {
	t.Helper()
	if _, err := exec.LookPath("bwrap"); err != nil {
		lack.Skip(t, lack.Bubblewrap, err)
	}
	command := []string{"bwrap", "--bind", c.root, "/"}
	for _, at := range slices.Sorted(maps.Keys(c.mounts)) {
		from, readOnly := strings.CutSuffix(c.mounts[at], ":ro")
		bind := map[bool]string{true: "--ro-bind", false: "--bind"}[readOnly]
		command = append(command, bind, from, c.resolve(at))
	}
	command = append(command, "--proc", "/proc", "--dev", "/dev", "--ro-bind", "/sys", "/sys")
	bind := map[bool]string{true: "--bind", false: "--ro-bind"}[c.privileged || c.sysctls]
	command = append(command, bind, "/proc/sys", "/proc/sys")
	if c.privileged {
		command = append(command, "--cap-add", "ALL")
	} else {
		command = append(command, "--cap-drop", "ALL")
	}
	for _, name := range c.capabilities {
		command = append(command, "--cap-add", "CAP_"+name)
	}
	if c.readOnly {
		command = append(command, "--remount-ro", "/")
	}
	command = append(command, "--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/sbin:/usr/bin")
	for _, name := range slices.Sorted(maps.Keys(c.env)) {
		command = append(command, "--setenv", name, c.env[name])
	}
	command = append(command, "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--unshare-uts", "--die-with-parent")
	if c.filtered {
		const open = `exec "$@" 9<"$0"`
		command = append([]string{"sh", "-c", open, runtimeDefault(t, c.capabilities)}, append(command, "--seccomp", "9")...)
	}
	return append(append(command, "--"), args...)
}

// resolve follows the link of an image with Debian's files in a path of a mount point.
func (c container) resolve(path string) string {
	rest, ok := strings.CutPrefix(path, "/var/run/")
	if target, err := os.Readlink(filepath.Join(c.root, "var/run")); !ok || err != nil || target != "/run" {
		return path
	}
	return "/run/" + rest
}

// run runs a program in an empty network namespace.
func (c container) run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	for _, dir := range []string{"proc", "dev", "sys"} {
		if err := os.MkdirAll(filepath.Join(c.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	command := append([]string{"unshare", "--net", "--"}, c.command(t, args...)...)
	return output(t.Context(), command[0], command[1:]...)
}

// host is what the kubelet of a node has for the containers of a pod.
type host struct {
	root    string                       // the image's
	name    string                       // the node's
	paths   string                       // where host paths are, so that they are not the machine's
	config  map[string]map[string]string // data of ConfigMaps by name
	account string                       // directory with ca.crt and token
	inside  []string                     // the command that starts others in the node's mount namespace; empty: it is the test's
}

// arrange makes the container that the kubelet would have made of a container of a pod, and its
// command line.
func (h host) arrange(t *testing.T, pod corev1.PodSpec, spec corev1.Container) (container, []string) {
	t.Helper()
	c := container{
		root: h.root, env: map[string]string{},
		mounts: map[string]string{"/var/run/secrets/kubernetes.io/serviceaccount": h.account + ":ro"},
	}
	if s := spec.SecurityContext; s != nil {
		c.privileged = s.Privileged != nil && *s.Privileged
		c.readOnly = s.ReadOnlyRootFilesystem != nil && *s.ReadOnlyRootFilesystem
		profile := pod.SecurityContext
		c.filtered = !c.privileged && profile != nil && profile.SeccompProfile.Type == corev1.SeccompProfileTypeRuntimeDefault
		if s.Capabilities != nil {
			for _, name := range s.Capabilities.Add {
				c.capabilities = append(c.capabilities, string(name))
			}
		}
	}
	for _, m := range spec.VolumeMounts {
		source := h.volume(t, pod, m.Name)
		if m.ReadOnly {
			source += ":ro"
		}
		c.mounts[m.MountPath] = source
	}
	for _, e := range spec.Env {
		c.env[e.Name] = e.Value
		if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil && e.ValueFrom.FieldRef.FieldPath == "spec.nodeName" {
			c.env[e.Name] = h.name
		}
	}
	args := spec.Command
	if len(args) == 0 {
		args = []string{"/usr/local/bin/fairlead"} // the image's entry point
	}
	args = append(slices.Clone(args), spec.Args...)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "$(NODE_NAME)", h.name)
	}
	return c, args
}

// volume makes a volume of a pod and returns where it is.
func (h host) volume(t *testing.T, pod corev1.PodSpec, name string) string {
	t.Helper()
	i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 {
		t.Fatalf("there is no volume %q", name)
	}
	v := pod.Volumes[i]
	switch {
	case v.HostPath != nil && v.HostPath.Type != nil && *v.HostPath.Type == corev1.HostPathFileOrCreate:
		return h.file(t, filepath.Join(h.paths, v.HostPath.Path), "")
	case v.HostPath != nil:
		return h.dir(t, v.HostPath.Path)
	case v.ConfigMap != nil:
		return h.configMaps(t, name, v.ConfigMap.Name)
	case v.Projected != nil:
		var names []string
		for _, s := range v.Projected.Sources {
			names = append(names, s.ConfigMap.Name)
		}
		return h.configMaps(t, name, names...)
	}
	t.Fatalf("volume %q is of a kind that this test does not know", name)
	return ""
}

// configMaps writes the data of ConfigMaps into a directory.
func (h host) configMaps(t *testing.T, volume string, names ...string) string {
	t.Helper()
	dir := h.dir(t, "volumes/"+volume)
	for _, name := range names {
		if h.config[name] == nil {
			t.Fatalf("there is no ConfigMap %q", name)
		}
		for key, value := range h.config[name] {
			h.file(t, filepath.Join(dir, key), value)
		}
	}
	return dir
}

func (h host) dir(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(h.paths, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (h host) file(t *testing.T, name, content string) string {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(name), 0o755)
	if err == nil {
		err = os.WriteFile(name, []byte(content), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	return name
}
