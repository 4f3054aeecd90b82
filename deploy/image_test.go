package deploy

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// image is a built image: its layout, and what ./dev image said about it.
type image struct {
	dir    string // the tree it was built in
	report string // name@digest of each variant, one per line
}

// builtImage is the image of this machine's architecture, built once in a run from a copy of the tree.
var builtImage = sync.OnceValues(func() (image, error) {
	dir := filepath.Join(scratch, "tree")
	if err := copyTree(dir); err != nil {
		return image{}, err
	}
	return buildImage(dir)
})

// copyTree copies the files that git knows or would take.
func copyTree(to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	const copyFiles = `cd .. && git -c safe.directory='*' ls-files -z --cached --others --exclude-standard --deduplicate |
		while IFS= read -r -d '' f; do [ ! -e "$f" ] || printf '%s\0' "$f"; done |
		xargs -0 cp --parents --no-dereference -t "$0"`
	if out, err := exec.Command("bash", "-c", copyFiles, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy the tree: %w\n%s", err, out)
	}
	return nil
}

func buildImage(dir string) (image, error) {
	cmd := exec.Command("./dev", "image", runtime.GOARCH)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "VERSION=v1.2.3+test", "SOURCE_DATE_EPOCH=1700000000")
	report, err := outputOf(cmd)
	return image{dir, report}, err
}

// needImage returns the image; where Debian's packages cannot be had the test is skipped.
func needImage(t *testing.T) image {
	t.Helper()
	i, err := builtImage()
	if err != nil {
		need(t, "the image: %v", err)
	}
	return i
}

// unpack makes the root file system of a variant ("" or "-static").
func (i image) unpack(t *testing.T, variant string) string {
	t.Helper()
	root := t.TempDir()
	for _, m := range i.index(t).Manifests {
		if m.Annotations["org.opencontainers.image.ref.name"] != "v1.2.3-test"+variant {
			continue
		}
		var index, manifest descriptors
		i.blob(t, m.Digest, &index)
		i.blob(t, index.Manifests[0].Digest, &manifest)
		for _, layer := range manifest.Layers {
			must(t)(output(t.Context(), "tar", "-xzpf", i.blobFile(layer.Digest), "-C", root))
		}
	}
	return root
}

// descriptors are an index or a manifest of OCI's image format.
type descriptors struct {
	Manifests []descriptor
	Layers    []descriptor
	Config    descriptor
}

type descriptor struct {
	Digest      string
	Platform    struct{ OS, Architecture string }
	Annotations map[string]string
}

func (i image) index(t *testing.T) (d descriptors) {
	t.Helper()
	decode(t, filepath.Join(i.dir, "out/fairlead-image/index.json"), &d)
	return d
}

func (i image) blob(t *testing.T, digest string, into any) {
	t.Helper()
	decode(t, i.blobFile(digest), into)
}

func (i image) blobFile(digest string) string {
	return filepath.Join(i.dir, "out/fairlead-image/blobs/sha256", strings.TrimPrefix(digest, "sha256:"))
}

func decode(t *testing.T, file string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(read(t, file)), into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// Two builds in different directories give the same program and the same image, to the byte.
func TestImage_reproducible(t *testing.T) {
	first := needImage(t)
	dir := filepath.Join(t.TempDir(), "somewhere", "else")
	if err := copyTreeFrom(first.dir, dir); err != nil {
		t.Fatal(err)
	}
	second, err := buildImage(dir)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, second.report, first.report)
	for _, file := range []string{"out/fairlead-image.tar", "out/programs/fairlead-" + runtime.GOARCH} {
		if read(t, filepath.Join(first.dir, file)) != read(t, filepath.Join(dir, file)) {
			t.Errorf("%s differs", file)
		}
	}
}

// copyTreeFrom copies a tree without what was built in it.
func copyTreeFrom(from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	out, err := exec.Command("bash", "-c", `cd "$0" && tar --exclude=./out -c . | tar -x -C "$1"`, from, to).CombinedOutput()
	if err != nil {
		return fmt.Errorf("copy the tree: %w\n%s", err, out)
	}
	return nil
}

// How the image is started, and which platform it says it is for.
func TestImage_config(t *testing.T) {
	i := needImage(t)
	var got strings.Builder
	for _, m := range i.index(t).Manifests {
		var index, manifest descriptors
		i.blob(t, m.Digest, &index)
		for _, p := range index.Manifests {
			i.blob(t, p.Digest, &manifest)
			var config struct {
				Architecture, Created string
				Config                struct{ Entrypoint, Cmd []string }
			}
			i.blob(t, manifest.Config.Digest, &config)
			fmt.Fprintf(&got, "%s %s/%s %s %d layers %s %s\n", m.Annotations["io.containerd.image.name"], p.Platform.OS,
				p.Platform.Architecture, config.Created, len(manifest.Layers), config.Config.Entrypoint, config.Config.Cmd)
		}
	}
	equal(t, got.String(), strings.ReplaceAll(`
fairlead.dev/fairlead:v1.2.3-test linux/ARCH 2023-11-14T22:13:20Z 2 layers [/usr/local/bin/fairlead] [run]
fairlead.dev/fairlead:v1.2.3-test-static linux/ARCH 2023-11-14T22:13:20Z 1 layers [/usr/local/bin/fairlead] [run]
`, "ARCH", runtime.GOARCH))
}

// Every program that is in the image for people finds its libraries, and scanners find the packages.
func TestImage_programs(t *testing.T) {
	root := needImage(t).unpack(t, "")
	c := container{root: root, readOnly: true, capabilities: []string{"NET_ADMIN", "NET_RAW"}}
	for command, want := range map[string]string{
		"fairlead --version":        "fairlead v1.2.3+test ",
		"kube-proxy --version":      "fairlead v1.2.3+test ",
		"iptables --version":        "(nf_tables)",
		"iptables-legacy --version": "(legacy)",
		"ip6tables-nft-save":        "",
		"iptables-legacy-save":      "",
		"nft --version":             "nftables v1.",
		"ipset --version":           "ipset v7.",
		"conntrack --version":       "conntrack v1.",
	} {
		out := must(t)(c.run(t, strings.Fields(command)...))
		if !strings.Contains(out, want) {
			t.Errorf("%s: got %q, want %q in it", command, out, want)
		}
	}
	status := read(t, filepath.Join(root, "var/lib/dpkg/status.d/iptables"))
	if !strings.Contains(status, "Package: iptables\n") || !strings.Contains(status, "\nVersion: ") {
		t.Errorf("status.d/iptables is not what scanners read:\n%s", status)
	}
	for _, file := range []string{"usr/share/doc/iptables/copyright", "usr/share/doc/fairlead/copyright", "etc/os-release"} {
		if read(t, filepath.Join(root, file)) == "" {
			t.Errorf("%s is empty", file)
		}
	}
	if out, err := c.run(t, "sh", "-c", "true"); err == nil {
		t.Errorf("there is a shell: %s", out)
	}
}

// The variant without Debian is the program alone, which needs nothing else.
func TestImage_static(t *testing.T) {
	c := container{root: needImage(t).unpack(t, "-static"), readOnly: true}
	for _, name := range []string{"fairlead", "kube-proxy"} {
		out := must(t)(c.run(t, "/usr/local/bin/"+name, "--version"))
		if !strings.HasPrefix(out, "fairlead v1.2.3+test ") {
			t.Errorf("%s says %q", name, out)
		}
	}
}
