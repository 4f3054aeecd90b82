package deploy

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/lab/eventually"
	"fairlead.dev/fairlead/lab/lack"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/lab/testbed/kubernetes"
	"fairlead.dev/fairlead/lab/testbed/traffic"
	"fairlead.dev/fairlead/model"
)

// bareDebian is the archive of a Debian with nothing but its essential packages, and rpm.
var bareDebian = sync.OnceValues(func() (string, error) {
	out, err := outputOf(exec.Command("../dev", "tool", "debian"))
	return strings.TrimSpace(out), err
})

// packaged is a bare Debian, and how a kind of package is installed there, lists its configuration, and is removed.
type packaged struct {
	root                    string
	suffix                  string
	install, config, remove string
}

// TestPackages installs each package on a node with a bare Debian, has it serve manifests, upgrades it and removes it.
func TestPackages(t *testing.T) {
	lack.Need(t, lack.Root)
	archive, err := bareDebian()
	if err != nil {
		lack.Skip(t, lack.Debian, err)
	}
	dir := tree(t.TempDir())
	if err := copyTree(string(dir)); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	must(t)(output(t.Context(), "tar", "-xpf", archive, "-C", root))
	for _, release := range []string{"v1.2.3", "v1.2.4"} {
		must(t)(dir.dev([]string{"package", runtime.GOARCH}, "VERSION="+release))
		into := filepath.Join(root, "media", release)
		must(t)(output(t.Context(), "cp", "-r", filepath.Join(string(dir), "out/packages"), into))
	}
	for _, p := range []packaged{
		{root, "deb", "dpkg --install", `dpkg-query --show --showformat '${Conffiles}' fairlead`, "dpkg --purge fairlead"},
		{root, "rpm", "rpm --upgrade", "rpm --query --configfiles fairlead", "rpm --erase fairlead"},
	} {
		t.Run(p.suffix, p.test)
	}
}

// shell is an RPM package that stands for this Debian's shell, of which rpm does not know. No other need of the package
// may exist: it goes onto any distribution.
const shell = `
Name: shell
Version: 1
Release: 1
License: none
Summary: what this Debian has
Provides: /bin/sh
%description
%files
`

// needShell shows that the RPM package needs a shell and nothing else, which is then there.
func (p packaged) needShell(t *testing.T, bed *testbed.Bed) {
	t.Helper()
	equal(t, p.run(t, bed, "rpm --query --requires --package /media/v1.2.3/*.rpm"), "/bin/sh")
	if err := os.WriteFile(filepath.Join(p.root, "media/shell.spec"), []byte(shell), 0o644); err != nil {
		t.Fatal(err)
	}
	p.run(t, bed, "cd /media && rpmbuild --quiet -bb --define '_topdir /media' shell.spec && rpm --install RPMS/*/*.rpm")
}

// TestUnits: systemd gives up a unit that fails to start five times in ten seconds, as with a file that is corrected
// later, unless the unit says otherwise.
func TestUnits(t *testing.T) {
	units, err := filepath.Glob("package/*.service")
	if err != nil || len(units) != 2 {
		t.Fatal(units, err)
	}
	for _, unit := range units {
		text := read(t, unit)
		if !strings.Contains(text, "\nRestart=always\n") || !strings.Contains(text, "\nStartLimitIntervalSec=0\n") {
			t.Errorf("%s does not restart without end:\n%s", unit, text)
		}
	}
}

func (p packaged) test(t *testing.T) {
	bed := newBed(t)
	if p.suffix == "rpm" {
		p.needShell(t, bed)
	}
	before := p.files(t)
	web := testbed.PodSpec{
		Name: "web", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.77")},
		Ports: []testbed.PodPort{{Protocol: model.TCP, Port: 8080}},
	}
	if _, err := bed.AddPod(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	p.run(t, bed, p.install, "/media/v1.2.3/*."+p.suffix)
	p.testPromises(t, bed)
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	manifest := filepath.Join(p.root, "etc/fairlead/manifests/web.yaml")
	write(manifest, read(t, "testdata/web.yaml"))
	// How many connections the kernel tracks is the machine's business. Packages keep edited files.
	config := filepath.Join(p.root, "etc/fairlead/config.yaml")
	packed := read(t, config)
	edited := packed + "conntrack: {maxPerCore: 0}\n"
	write(config, edited)
	agent := p.start(t, bed)
	service := netip.MustParseAddrPort("10.96.0.77:80")
	watch, err := traffic.StartWatch(t.Context(), bed, traffic.WatchSpec{
		Visits:   []traffic.Path{{From: testbed.Node, To: service}, {From: testbed.Outside, To: netip.MustParseAddrPort("192.0.2.1:30077")}},
		Interval: 20 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	open, err := bed.Dial(t.Context(), testbed.Node, model.TCP, service)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()

	p.run(t, bed, p.install, "/media/v1.2.4/*."+p.suffix) // systemd would restart the unit now
	terminate(t, agent)
	agent = p.start(t, bed)
	equal(t, strings.Fields(p.run(t, bed, "fairlead", "--version"))[1], "v1.2.4")
	if err := watch.Settle(t.Context(), 20); err != nil {
		t.Error(err)
	}
	if r := watch.Stop(); len(r.Faults) > 0 || r.Total().Answered < 40 {
		t.Errorf("during the upgrade: %s", r)
	}
	_ = open.SetDeadline(time.Now().Add(eventually.Patience()))
	if _, err := io.ReadFull(open, make([]byte, 1)); err != nil {
		t.Errorf("a connection from before the upgrade: %v", err)
	}

	equal(t, read(t, config), edited)
	write(config, packed) // rpm would keep the edited one, under another name
	terminate(t, agent)
	equal(t, complaints(agent.Log()), "")
	if err := os.Remove(manifest); err != nil {
		t.Error(err)
	}
	p.run(t, bed, p.remove)
	rules, err := bed.Command(t.Context(), testbed.Node, "nft", "list", "ruleset").CombinedOutput()
	equal(t, fmt.Sprint(string(rules), err), "<nil>")
	added := slices.DeleteFunc(p.files(t), func(name string) bool { return slices.Contains(before, name) })
	equal(t, strings.Join(added, "\n"), "")
}

// testPromises holds the package against docs/compatibility.md: what that names is there, and all configuration is named.
func (p packaged) testPromises(t *testing.T, bed *testbed.Bed) {
	t.Helper()
	row := regexp.MustCompile(`(?m)^\| deb, rpm: (.*?) \|`).FindString(read(t, "../docs/compatibility.md"))
	var kept, config []string
	for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row, -1) {
		file := name[1]
		if !strings.HasPrefix(file, "/") {
			file = "/usr/lib/systemd/system/" + file + ".service"
		}
		info, err := os.Stat(filepath.Join(p.root, file))
		if err != nil {
			t.Error(err)
		} else if info.Mode().IsRegular() && strings.HasPrefix(file, "/etc/") {
			kept = append(kept, file)
		}
	}
	for _, word := range strings.Fields(p.run(t, bed, p.config)) {
		if strings.HasPrefix(word, "/") { // dpkg adds sums
			config = append(config, word)
		}
	}
	slices.Sort(kept)
	slices.Sort(config)
	equal(t, strings.Join(config, "\n"), strings.Join(kept, "\n"))
}

// unit is what the unit of systemd says of a key.
func (p packaged) unit(t *testing.T, key string) string {
	t.Helper()
	for line := range strings.Lines(read(t, filepath.Join(p.root, "usr/lib/systemd/system/fairlead.service"))) {
		if value, ok := strings.CutPrefix(line, key+"="); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("the unit has no %s", key)
	return ""
}

// start runs what the unit runs, with the capabilities that it leaves, as systemd would.
func (p packaged) start(t *testing.T, bed *testbed.Bed) *kubernetes.Proxy {
	t.Helper()
	_, args, _ := strings.Cut(read(t, filepath.Join(p.root, strings.TrimPrefix(p.unit(t, "EnvironmentFile"), "-"))), "FAIRLEAD_ARGS=")
	c := container{root: p.root, sysctls: true}
	for _, name := range strings.Fields(p.unit(t, "CapabilityBoundingSet")) {
		c.capabilities = append(c.capabilities, strings.TrimPrefix(name, "CAP_"))
	}
	command := strings.Replace(p.unit(t, "ExecStart"), "$FAIRLEAD_ARGS", strings.Trim(args, "\"\n"), 1)
	proxy, err := kubernetes.StartProxy(t.Context(), kubernetes.ProxyOptions{Bed: bed, Command: c.command(t, strings.Fields(command)...)})
	if err == nil {
		err = proxy.Ready(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return proxy
}

// run has a shell run a command on the node, in its Debian.
func (p packaged) run(t *testing.T, bed *testbed.Bed, command ...string) string {
	t.Helper()
	c := container{root: p.root, privileged: true}
	args := c.command(t, "sh", "-c", strings.Join(command, " "))
	out, err := bed.Command(t.Context(), testbed.Node, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	t.Logf("%s:\n%s", command, out)
	return string(out)
}

// files are all that there are, but for the records of package managers.
func (p packaged) files(t *testing.T) []string {
	t.Helper()
	all := strings.Fields(must(t)(output(t.Context(), "find", p.root, "-printf", "%P\n")))
	all = slices.DeleteFunc(all, func(name string) bool {
		return slices.ContainsFunc([]string{"dev", "proc", "sys", "var/lib/dpkg/", "var/lib/rpm", "root/.rpmdb", "var/log/"},
			func(prefix string) bool { return strings.HasPrefix(name, prefix) })
	})
	slices.Sort(all)
	return all
}
