package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// unpack returns the files of a report by name.
func unpack(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(zipped); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		text, failed := io.ReadAll(r)
		if err = errors.Join(err, failed); err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(h.Name, "fairlead-report/")] = string(text)
	}
}

func TestReport(t *testing.T) {
	const secret = "s3cr3t-of-the-kubeconfig"
	w := newWorld(t)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("users: [{user: {token: "+secret+"}}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.configure("nftables", "clientConnection: {kubeconfig: "+kubeconfig+"}\n")
	p := w.start("--config", w.config())
	w.write("web.yaml", strings.Replace(web, "- addresses: [POD-A]\n", "", 1))
	p.await("a change is in force")
	report := func(flags ...string) map[string]string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "report.tar.gz")
		args := append([]string{"report", "--control-socket", w.socket, "-o", path}, flags...)
		if status, out := w.execute(args...); status != 0 || !strings.Contains(out, path) {
			t.Fatalf("exit status %d: %s", status, out)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
			t.Errorf("%v %v", info.Mode(), err)
		}
		return unpack(t, path)
	}
	files := report()
	for name, has := range map[string]string{
		"about.txt": "fairlead ", "status.json": `"plane":"nftables"`, "rows.txt": "frontend 10.96.0.10:80/tcp any forward",
		"audit.json": `"drifts":[]`, "configuration.json": kubeconfig, "kernel.txt": "Linux version",
		"events.json": `"kind":"left"`,
	} {
		if !strings.Contains(strings.ReplaceAll(files[name], ": ", ":"), strings.ReplaceAll(has, ": ", ":")) {
			t.Errorf("%s lacks %q:\n%.1000s", name, has, files[name])
		}
	}
	hidden := report("--without-addresses")
	if have := slices.Sorted(maps.Keys(hidden)); !slices.Equal(have, slices.Sorted(maps.Keys(files))) {
		t.Errorf("without addresses there are other files: %v", have)
	}
	for name, text := range hidden {
		// Of 10.0.0.0/8 all four numbers: the seconds of a time begin so, too.
		left := regexp.MustCompile(`\b(10(\.[0-9]+){3}|(192\.0|fd00:)[0-9.:]+)`).FindString(text)
		if left != "" && name != "kernel.txt" || strings.Contains(text+files[name], secret) {
			t.Errorf("%s has %q, or the secret:\n%.1000s", name, left, text)
		}
	}
	row := regexp.MustCompile(`frontend (addr-\d+):80/tcp`).FindStringSubmatch(hidden["rows.txt"])
	if len(row) == 0 || !strings.Contains(hidden["rows.txt"], "guard "+row[1]+"/32 reject") {
		t.Errorf("an address has no name, or several:\n%s", hidden["rows.txt"])
	}
}

// TestReport_alone: without an agent the archive has what there is, and says what is missing.
func TestReport_alone(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "report.tar.gz")
	status, out := w.execute("report", "--control-socket", w.socket, "-o", path)
	files := unpack(t, path)
	for _, text := range []string{out, files["about.txt"]} {
		if status != 0 || !strings.Contains(text, "status.json: no proxy listens on") {
			t.Errorf("exit status %d: %s", status, text)
		}
	}
	if len(files["modules.txt"])+len(files["kernel.txt"]) == 0 || files["status.json"] != "" {
		t.Errorf("it has %v", slices.Sorted(maps.Keys(files)))
	}
}
