package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// lock pins the Debian packages of the laboratory's image. Suite, Packages and Alone are written by hand, the rest
// by refresh.
type lock struct {
	// Suite is the Debian release.
	Suite string `json:"suite"`
	// Packages are those we want; what they depend on comes along.
	Packages []string `json:"packages"`
	// Alone are packages without what they depend on: their files are data.
	Alone []string `json:"alone"`
	// Snapshot is when the packages were resolved, in the form that snapshot.debian.org uses.
	Snapshot string `json:"snapshot"`
	// Files are the packages of each architecture, sorted by name.
	Files map[string][]file `json:"files"`
}

// file is one package: Path is below the root of the archive, "debian" or "debian-security".
type file struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Archive string `json:"archive"`
	Path    string `json:"path"`
	SHA256  string `json:"sha256"`
}

// architectures are those that an image can be built for; Go's and Debian's names of them are the same.
func architectures() []string { return []string{"amd64", "arm64"} }

func readLock(name string) (l lock, err error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return l, err
	}
	if err := json.Unmarshal(text, &l); err != nil {
		return l, fmt.Errorf("%s: %w", name, err)
	}
	return l, nil
}

func (l lock) write(name string) error {
	text, err := json.MarshalIndent(l, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(text, '\n'), 0o644)
}

// refresh has apt resolve the packages anew, in a root of its own: what this machine has installed,
// and which release it is, do not matter. apt verifies the signatures of the archive.
func refresh(ctx context.Context, name string) error {
	l, err := readLock(name)
	if err != nil {
		return err
	}
	root, err := os.MkdirTemp("", "fairlead-apt-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(root) }()
	l.Snapshot = time.Now().UTC().Format("20060102T150405Z")
	l.Files = map[string][]file{}
	mirrors, err := aptMirrors(ctx)
	if err != nil {
		return err
	}
	for _, arch := range architectures() {
		a := apt{filepath.Join(root, arch), arch, mirrors}
		if l.Files[arch], err = a.resolve(ctx, l); err != nil {
			return err
		}
	}
	return l.write(name)
}

// apt is an apt-get that knows nothing of this machine.
type apt struct {
	root    string
	arch    string
	mirrors mirrors
}

func (a apt) resolve(ctx context.Context, l lock) ([]file, error) {
	if err := a.prepare(l.Suite); err != nil {
		return nil, err
	}
	if _, err := a.run(ctx, "update"); err != nil {
		return nil, err
	}
	closure, err := a.run(ctx, slices.Concat([]string{"--print-uris", "install"}, l.Packages)...)
	if err != nil {
		return nil, err
	}
	alone, err := a.run(ctx, slices.Concat([]string{"--print-uris", "download"}, l.Alone)...)
	if err != nil {
		return nil, err
	}
	var files []file
	for line := range strings.Lines(closure + alone) {
		if f, ok := a.file(line); ok {
			files = append(files, f)
		}
	}
	slices.SortFunc(files, func(x, y file) int { return cmp.Compare(x.Name, y.Name) })
	return files, nil
}

// prepare makes the root: nothing is installed in it, and the suite is all that it knows.
func (a apt) prepare(suite string) error {
	for _, dir := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.root, dir), 0o755); err != nil {
			return err
		}
	}
	const source = "Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n" +
		"Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n"
	sources := fmt.Sprintf(source, a.mirrors["debian"][0], suite+" "+suite+"-updates") +
		fmt.Sprintf(source, a.mirrors["debian-security"][0], suite+"-security")
	if err := os.WriteFile(filepath.Join(a.root, "debian.sources"), []byte(sources), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(a.root, "status"), nil, 0o644)
}

func (a apt) run(ctx context.Context, args ...string) (string, error) {
	options := []string{
		"-y", "-qq",
		"-o", "Dir::State::lists=" + a.root + "/lists",
		"-o", "Dir::State::status=" + a.root + "/status",
		"-o", "Dir::State::extended_states=" + a.root + "/extended_states",
		"-o", "Dir::Cache=" + a.root + "/cache",
		"-o", "Dir::Etc::sourcelist=" + a.root + "/debian.sources",
		"-o", "Dir::Etc::sourceparts=/dev/null",
		"-o", "Dir::Etc::preferencesparts=/dev/null",
		"-o", "APT::Architecture=" + a.arch, "-o", "APT::Architectures=" + a.arch,
		"-o", "APT::Install-Recommends=false",
		"-o", "Acquire::ForceHash=SHA256",
		"-o", "APT::Sandbox::User=root", // the directories are ours
	}
	cmd := exec.CommandContext(ctx, "apt-get", append(options, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("apt-get %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

// file reads a line of --print-uris: 'URI' NAME_VERSION_ARCHITECTURE.deb SIZE SHA256:HASH.
func (a apt) file(line string) (file, bool) {
	words := strings.Fields(line)
	if len(words) != 4 || !strings.HasPrefix(words[0], "'") {
		return file{}, false
	}
	uri := strings.Trim(words[0], "'")
	parts := strings.Split(strings.TrimSuffix(path.Base(words[1]), ".deb"), "_")
	f := file{Name: parts[0], SHA256: strings.TrimPrefix(words[3], "SHA256:")}
	if len(parts) > 1 {
		f.Version = strings.ReplaceAll(parts[1], "%3a", ":")
	}
	f.Archive, f.Path = a.mirrors.split(uri)
	return f, true
}
