package deploy

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"

	"fairlead.dev/fairlead/lab/lack"
)

// image is a built image.
type image struct {
	dir string // of the layout; the archive is beside it
}

// tree is a copy of the repository in which images are built.
type tree string

// sharedTree is one for all tests in a run.
var sharedTree = sync.OnceValues(func() (tree, error) {
	dir := filepath.Join(scratch, "tree")
	return tree(dir), copyTree(dir)
})

// The images for this machine's architecture, each built once in a run.
var (
	agentImage = sync.OnceValues(func() (image, error) { return buildShared("agent", "fairlead") })
	labImage   = sync.OnceValues(func() (image, error) { return buildShared("lab", "fairlead-lab") })
)

func buildShared(which, name string) (image, error) {
	dir, err := sharedTree()
	if err != nil {
		return image{}, err
	}
	return dir.build(which, name)
}

// build has ./dev build an image.
func (dir tree) build(which, name string) (image, error) {
	_, err := dir.dev([]string{"image", which, runtime.GOARCH})
	return image{filepath.Join(string(dir), "out", name+"-image")}, err
}

func (dir tree) dev(args []string, env ...string) (output string, err error) {
	cmd := exec.Command("./dev", args...)
	cmd.Dir = string(dir)
	cmd.Env = append(append(os.Environ(), "VERSION=v1.2.3+test", "SOURCE_DATE_EPOCH=1700000000"), env...)
	return outputOf(cmd)
}

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

// needAgent returns the agent's image. It is made of Go and nothing else, so nothing excuses its lack.
func needAgent(t *testing.T) image {
	t.Helper()
	i, err := agentImage()
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// needLab returns the laboratory's image; where Debian's packages cannot be had the test is skipped.
func needLab(t *testing.T) image {
	t.Helper()
	i, err := labImage()
	if err != nil {
		lack.Skip(t, lack.LabImage, err)
	}
	return i
}

// unpack makes the root file system.
func (i image) unpack(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for _, layer := range i.manifest(t).Layers {
		must(t)(output(t.Context(), "tar", "-xzpf", i.blobFile(layer.Digest), "-C", root))
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

// index is what the layout has: the image for all architectures.
func (i image) index(t *testing.T) (d descriptors) {
	t.Helper()
	decode(t, filepath.Join(i.dir, "index.json"), &d)
	return d
}

// manifest is that of the only image in the layout.
func (i image) manifest(t *testing.T) (d descriptors) {
	t.Helper()
	var index descriptors
	i.blob(t, i.index(t).Manifests[0].Digest, &index)
	i.blob(t, index.Manifests[0].Digest, &d)
	return d
}

func (i image) blob(t *testing.T, digest string, into any) {
	t.Helper()
	decode(t, i.blobFile(digest), into)
}

func (i image) blobFile(digest string) string {
	return filepath.Join(i.dir, "blobs/sha256", strings.TrimPrefix(digest, "sha256:"))
}

func decode(t *testing.T, file string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(read(t, file)), into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// The bill of materials lists every module that the program says it is made of, and Go itself.
func TestSBOM(t *testing.T) {
	i := needAgent(t)
	dir := tree(filepath.Join(i.dir, "../.."))
	if _, err := dir.dev([]string{"sbom", runtime.GOARCH}); err != nil {
		t.Fatal(err)
	}
	var bill struct {
		BOMFormat string
		Metadata  struct {
			Component struct{ Name, Version string }
		}
		Components []struct{ Name, Version, PURL string }
	}
	decode(t, filepath.Join(string(dir), "out/fairlead-"+runtime.GOARCH+".cdx.json"), &bill)
	equal(t, fmt.Sprint(bill.BOMFormat, " ", bill.Metadata.Component), "CycloneDX {fairlead.dev/fairlead v1.2.3+test}")
	listed := map[string]bool{}
	for _, c := range bill.Components {
		purl, _, _ := strings.Cut(c.PURL, "?")
		listed[purl] = true
	}
	info, err := buildinfo.ReadFile(filepath.Join(string(dir), "out/programs", runtime.GOARCH, "fairlead"))
	if err != nil {
		t.Fatal(err)
	}
	std := &debug.Module{Path: "std", Version: info.GoVersion}
	for _, m := range append(info.Deps, std) {
		if purl := "pkg:golang/" + m.Path + "@" + m.Version; !listed[purl] {
			t.Errorf("%s is not listed", purl)
		}
	}
}

// How each image is started, and which platform it says it is for. The laboratory's serves no node unless it is told to.
func TestImage_config(t *testing.T) {
	equal(t, needAgent(t).summary(t), "fairlead.dev/fairlead:v1.2.3-test linux/"+runtime.GOARCH+
		" 2023-11-14T22:13:20Z 1 layers [/usr/local/bin/fairlead] [run]")
	equal(t, needLab(t).summary(t), "fairlead.dev/fairlead-lab:v1.2.3-test linux/"+runtime.GOARCH+
		" 2023-11-14T22:13:20Z 3 layers [/usr/local/bin/fairlead] []")
}

// summary is a line for each image of the layout.
func (i image) summary(t *testing.T) string {
	t.Helper()
	var lines []string
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
			lines = append(lines, fmt.Sprintf("%s %s/%s %s %d layers %s %s", m.Annotations["io.containerd.image.name"],
				p.Platform.OS, p.Platform.Architecture, config.Created, len(manifest.Layers),
				config.Config.Entrypoint, config.Config.Cmd))
		}
	}
	return strings.Join(lines, "\n")
}

// The agent's image is the program alone, under both names, with its licence. It needs nothing else to run, and scanners
// find its modules in it.
func TestImage_agent(t *testing.T) {
	root := needAgent(t).unpack(t)
	files := strings.Fields(must(t)(output(t.Context(), "find", root, "-not", "-type", "d", "-printf", "%P\n")))
	slices.Sort(files)
	equal(t, strings.Join(files, "\n"), `
usr/local/bin/fairlead
usr/local/bin/kube-proxy
usr/share/doc/fairlead/copyright`)
	testPrograms(t, root, map[string]string{
		"/usr/local/bin/fairlead --version":   "fairlead v1.2.3+test ",
		"/usr/local/bin/kube-proxy --version": "fairlead v1.2.3+test ",
	})
	info, err := buildinfo.ReadFile(filepath.Join(root, "usr/local/bin/fairlead"))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(info.Deps, func(m *debug.Module) bool { return m.Path == "k8s.io/api" }) {
		t.Errorf("the program does not name its modules: %s", info)
	}
}

// testPrograms runs programs in the image, each of which says something.
func testPrograms(t *testing.T, root string, wants map[string]string) {
	t.Helper()
	c := container{root: root, readOnly: true, capabilities: []string{"NET_ADMIN", "NET_RAW"}}
	for command, want := range wants {
		out := must(t)(c.run(t, strings.Fields(command)...))
		if !strings.Contains(out, want) {
			t.Errorf("%s: got %q, want %q in it", command, out, want)
		}
	}
}

// Every program in the laboratory's image finds its libraries, and scanners find the packages.
func TestImage_lab(t *testing.T) {
	root := needLab(t).unpack(t)
	testPrograms(t, root, map[string]string{
		"fairlead --version":        "fairlead v1.2.3+test ",
		"fairlead-lab --version":    "fairlead-lab v1.2.3+test ",
		"fairlead bench --list":     "connect",
		"iptables --version":        "(nf_tables)",
		"iptables-legacy --version": "(legacy)",
		"ip6tables-nft-save":        "",
		"iptables-legacy-save":      "",
		"nft --version":             "nftables v1.",
		"ipset --version":           "ipset v7.",
		"conntrack --version":       "conntrack v1.",
	})
	status := read(t, filepath.Join(root, "var/lib/dpkg/status.d/iptables"))
	if !strings.Contains(status, "Package: iptables\n") || !strings.Contains(status, "\nVersion: ") {
		t.Errorf("status.d/iptables is not what scanners read:\n%s", status)
	}
	for _, file := range []string{"usr/share/doc/iptables/copyright", "usr/share/doc/fairlead/copyright", "etc/os-release"} {
		if read(t, filepath.Join(root, file)) == "" {
			t.Errorf("%s is empty", file)
		}
	}
}
