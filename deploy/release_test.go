package deploy

import (
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// release is what ./dev release has made.
type release struct {
	dir    string
	number string // as "v1.2.3"
}

// TestRelease takes a release as who downloads it does: checks it as docs/install.md says, and uses what is in it.
func TestRelease(t *testing.T) {
	needLab(t) // it has Debian's packages, which not every machine can get
	c := startCluster(t)
	c.must(t, read(t, "testdata/monitoring-crds.yaml"), "apply", "-f", "-")
	c.kubeadm(t, "create")
	dir := tree(t.TempDir())
	if err := copyTree(string(dir)); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(t.TempDir(), "key")
	must(t)(output(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key))
	r := release{filepath.Join(string(dir), "out/release"), "v0.1.0-dev.g0123456789ab"} // as before the first tag
	must(t)(dir.dev([]string{"release", runtime.GOARCH}, "VERSION="+r.number, "FAIRLEAD_SIGNING_KEY="+key))

	t.Run("checks", func(t *testing.T) { r.testChecks(t, key) })
	t.Run("notes", r.testNotes)
	t.Run("programs", r.testPrograms)
	t.Run("plugin", func(t *testing.T) { r.testPlugin(t, c) })
	t.Run("images", r.testImages)
	t.Run("manifests", func(t *testing.T) { r.testManifests(t, c) })
}

func (r release) file(name string) string { return filepath.Join(r.dir, name) }

// unpack unpacks an archive of the release.
func (r release) unpack(t *testing.T, name string) string {
	t.Helper()
	dir := t.TempDir()
	must(t)(output(t.Context(), "tar", "-xf", r.file(name), "-C", dir))
	return dir
}

// testChecks runs the commands of the document, also on a release that another has changed. The sums are of all files.
func (r release) testChecks(t *testing.T, key string) {
	commands := regexp.MustCompile(`(?s)\n(ssh-keygen -Y verify .*?\nsha256sum .*?)\n`).FindStringSubmatch(read(t, "../docs/install.md"))
	if commands == nil {
		t.Fatal("docs/install.md does not say how a release is checked")
	}
	signers := filepath.Join(t.TempDir(), "signers")
	if err := os.WriteFile(signers, []byte("fairlead "+read(t, key+".pub")), 0o644); err != nil {
		t.Fatal(err)
	}
	check := func() error {
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", strings.Replace(commands[1], "-f signers", "-f "+signers, 1))
		cmd.Dir = r.dir
		_, err := outputOf(cmd)
		return err
	}
	if err := check(); err != nil {
		t.Error(err)
	}
	sums := read(t, r.file("SHA256SUMS"))
	for _, name := range []string{"SHA256SUMS", "NOTES.md"} {
		text := read(t, r.file(name))
		if err := os.WriteFile(r.file(name), []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if check() == nil {
			t.Errorf("a changed %s is taken", name)
		}
		if err := os.WriteFile(r.file(name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var summed []string
	for line := range strings.Lines(sums) {
		summed = append(summed, strings.Fields(line)[1])
	}
	files := strings.Fields(must(t)(output(t.Context(), "ls", r.dir)))
	files = slices.DeleteFunc(files, func(name string) bool { return strings.HasPrefix(name, "SHA256SUMS") })
	slices.Sort(files)
	equal(t, strings.Join(summed, "\n"), strings.Join(files, "\n"))
}

// testNotes: a version before the first tag has the notes of the release that it becomes.
func (r release) testNotes(t *testing.T) {
	_, section, _ := strings.Cut(read(t, "../CHANGELOG.md"), "\n## [0.1.0]")
	_, section, _ = strings.Cut(section, "\n")
	section, _, _ = strings.Cut(section, "\n## ")
	equal(t, read(t, r.file("NOTES.md")), section)
	if !strings.Contains(section, "\n- ") {
		t.Error("they say nothing")
	}
}

func (r release) testPrograms(t *testing.T) {
	dir := r.unpack(t, "fairlead_"+r.number+"_linux_"+runtime.GOARCH+".tar.gz")
	for _, name := range []string{"fairlead", "fairlead-lab", "fairlead-cases"} {
		r.says(t, name, must(t)(output(t.Context(), filepath.Join(dir, name), "--version")))
	}
	equal(t, platform(t, filepath.Join(dir, "fairlead-cases")), "fairlead.dev/fairlead/lab/conformance.test linux/"+runtime.GOARCH)
	windows := filepath.Join(r.unpack(t, "fairlead_"+r.number+"_windows_amd64.tar.gz"), "fairlead.exe")
	equal(t, platform(t, windows), "fairlead.dev/fairlead/cmd/fairlead windows/amd64")
}

// says compares the answer of a program that was asked for its version.
func (r release) says(t *testing.T, name, answer string) {
	t.Helper()
	if !strings.HasPrefix(answer, name+" "+r.number+" ") {
		t.Errorf("%s says: %s", name, answer)
	}
}

// platform is what a program is, and for which platform.
func platform(t *testing.T, program string) string {
	t.Helper()
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	return info.Path + " " + settings["GOOS"] + "/" + settings["GOARCH"]
}

// testPlugin does for each platform what the plugin manager does, and has kubectl run the plugin for this one.
func (r release) testPlugin(t *testing.T, c *cluster) {
	var manifest struct {
		Metadata struct{ Name string }
		Spec     struct {
			Version   string
			Platforms []struct {
				Selector         struct{ MatchLabels struct{ OS, Arch string } }
				URI, SHA256, Bin string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, r.file("krew.yaml"))), &manifest); err != nil {
		t.Fatal(err)
	}
	equal(t, manifest.Metadata.Name+" "+manifest.Spec.Version, "fairlead "+r.number)
	var platforms []string
	for _, p := range manifest.Spec.Platforms {
		archive := path.Base(p.URI)
		equal(t, p.SHA256, fmt.Sprintf("%x", sha256.Sum256([]byte(read(t, r.file(archive))))))
		dir := r.unpack(t, archive)
		read(t, filepath.Join(dir, "LICENSE"))
		os, arch := p.Selector.MatchLabels.OS, p.Selector.MatchLabels.Arch
		equal(t, platform(t, filepath.Join(dir, p.Bin)), "fairlead.dev/fairlead/cmd/kubectl-fairlead "+os+"/"+arch)
		platforms = append(platforms, os)
		if os == runtime.GOOS {
			t.Setenv("PATH", dir+":/usr/bin:/bin")
		}
	}
	equal(t, strings.Join(platforms, " "), "linux darwin")
	kubectl := c.parts.Path("kubectl")
	r.says(t, "kubectl-fairlead", must(t)(output(t.Context(), kubectl, "fairlead", "--version")))
	if help := must(t)(output(t.Context(), kubectl, "fairlead", "--help")); !strings.Contains(help, "kubectl fairlead ") {
		t.Errorf("the help is not that of kubectl's plugin:\n%s", help)
	}
}

// testImages: the image's name is that which chart and kustomize name.
func (r release) testImages(t *testing.T) {
	for _, name := range []string{"fairlead", "fairlead-lab"} {
		i := image{r.unpack(t, name+"-image_"+r.number+".tar")}
		named, _, _ := strings.Cut(i.summary(t), " ")
		equal(t, named, "fairlead.dev/"+name+":"+r.number)
		r.says(t, "fairlead", must(t)(container{root: i.unpack(t), readOnly: true}.run(t, "fairlead", "--version")))
	}
}

// testManifests: the API server takes the archives of chart and kustomize, which name the images of this release.
func (r release) testManifests(t *testing.T, c *cluster) {
	archive := r.file("fairlead-" + r.number[1:] + ".tgz")
	testHelm(t, c, archive)
	all := must(t)(helm(t, "template", archive, "--set", "windows.enabled=true"))
	dir := r.unpack(t, "fairlead-kustomize_"+r.number+".tar.gz")
	for _, part := range []string{"base", "clean", "overlays/own-configuration", "overlays/windows"} {
		c.must(t, "", "apply", "--dry-run=server", "--validate=strict", "-k", filepath.Join(dir, part))
		all += c.must(t, "", "kustomize", filepath.Join(dir, part))
	}
	for _, image := range regexp.MustCompile(`image: "?([^"\n]*)`).FindAllStringSubmatch(all, -1) {
		name, tag, _ := strings.Cut(image[1], ":")
		if strings.HasPrefix(name, "fairlead.dev/") && tag != r.number {
			t.Errorf("%s has tag %s", name, tag)
		}
	}
}
