package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/testbed"
)

// asHost makes the test binary apply settings where it is started.
const asHost = "FAIRLEAD_TEST_HOST"

func TestMain(m *testing.M) {
	switch os.Getenv(asHost) {
	case "":
	case "max":
		r := Host{}.Apply(Settings{MaxPerCore: 1, Min: maxTracked - 1})
		fmt.Println(r.OnlyNamespace(), r.Err())
		return
	default:
		fmt.Print(text(Host{}.Apply(Settings{
			TCPEstablished: 2 * time.Hour, TCPCloseWait: time.Hour, TCPBeLiberal: true, UDP: 20 * time.Second, UDPStream: 90 * time.Second,
		})))
		return
	}
	os.Exit(testbed.RunTests(m.Run))
}

const (
	sysctls  = "proc/sys/net/netfilter/nf_conntrack_"
	hashsize = "sys/module/nf_conntrack/parameters/hashsize"
	online   = "sys/devices/system/cpu/online"
	oomScore = "proc/self/oom_score_adj"
)

// machine is a directory with the files of a kernel.
func machine(t *testing.T, cpus string) Host {
	h := Host{Root: t.TempDir()}
	for path, value := range map[string]string{
		online: cpus + "\n", hashsize: "65536\n", oomScore: "0\n",
		sysctls + "max": "262144\n", sysctls + "tcp_timeout_established": "432000\n",
		sysctls + "tcp_timeout_close_wait": "60\n", sysctls + "tcp_be_liberal": "0\n",
		sysctls + "udp_timeout": "30\n", sysctls + "udp_timeout_stream": "120\n",
	} {
		path = filepath.Join(h.Root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(value), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// text is a Report, one sorted line for each value.
func text(r Report) string {
	var lines []string
	for _, c := range r.Changed {
		lines = append(lines, fmt.Sprintf("%s: %s -> %s\n", c.Name, c.From, c.To))
	}
	for _, f := range r.Failed {
		lines = append(lines, fmt.Sprintf("%s: failed: %v\n", f.Change, f.Err))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// kubeProxyDefaults are what its defaults become.
func kubeProxyDefaults() Settings {
	score := -999
	return Settings{MaxPerCore: 32768, Min: 131072, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour, OOMScoreAdj: &score}
}

func TestApply(t *testing.T) {
	everything := kubeProxyDefaults()
	everything.TCPBeLiberal, everything.UDP, everything.UDPStream = true, 10*time.Second, 100*time.Second
	defaults := "nf_conntrack_tcp_timeout_close_wait: 60 -> 3600\n" +
		"nf_conntrack_tcp_timeout_established: 432000 -> 86400\n" +
		"oom_score_adj: 0 -> -999\n"
	for _, c := range []struct {
		name, cpus string
		settings   Settings
		want       string
	}{
		{"nothing", "0-1", Settings{}, ""},
		{"defaults: 2 cores are below the minimum", "0-1", kubeProxyDefaults(), defaults},
		{"defaults: 8 cores are what the kernel has", "0-7", kubeProxyDefaults(), defaults},
		{"defaults: 10 cores", "0-3,10-15", kubeProxyDefaults(),
			"hashsize of nf_conntrack: 65536 -> 81920\nnf_conntrack_max: 262144 -> 327680\n" + defaults},
		{"defaults: 256 cores meet the limit", "0-255", kubeProxyDefaults(),
			"hashsize of nf_conntrack: 65536 -> 262144\nnf_conntrack_max: 262144 -> 1048576\n" + defaults},
		{"a minimum over the limit", "0-1", Settings{MaxPerCore: 1, Min: 2_000_000},
			"hashsize of nf_conntrack: 65536 -> 500000\nnf_conntrack_max: 262144 -> 2000000\n"},
		{"a minimum alone means nothing", "0-1", Settings{Min: 2_000_000}, ""},
		{"timeouts below a second are left", "0-1", Settings{TCPEstablished: time.Second - 1}, ""},
		{"everything", "0-7", everything, defaults[:strings.Index(defaults, "oom")] +
			"nf_conntrack_udp_timeout: 30 -> 10\nnf_conntrack_udp_timeout_stream: 120 -> 100\noom_score_adj: 0 -> -999\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := machine(t, c.cpus)
			want := c.want
			if c.name == "everything" {
				want = "nf_conntrack_tcp_be_liberal: 0 -> 1\n" + want
			}
			r := h.Apply(c.settings)
			if got := text(r); got != want || r.Err() != nil {
				t.Errorf("%v\n%s\nwant\n%s", r.Err(), got, want)
			}
			for _, change := range r.Changed {
				if found := h.find(t, change.Name); found != change.To {
					t.Errorf("%s is %s", change.Name, found)
				}
			}
			if again := h.Apply(c.settings); text(again) != "" {
				t.Errorf("the second time:\n%s", text(again))
			}
		})
	}
}

// find reads the file of a setting.
func (h Host) find(t *testing.T, name string) string {
	t.Helper()
	path := map[string]string{"hashsize of nf_conntrack": hashsize, "oom_score_adj": oomScore}[name]
	if path == "" {
		path = "proc/sys/net/netfilter/" + name
	}
	value, err := h.read(path)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func TestApply_nothingIsWrittenThatNeedNot(t *testing.T) {
	h := machine(t, "0-7")
	h.Apply(kubeProxyDefaults())
	err := filepath.WalkDir(h.Root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return os.Chtimes(path, time.Unix(0, 0), time.Unix(0, 0))
	})
	if err != nil {
		t.Fatal(err)
	}
	h.Apply(kubeProxyDefaults())
	err = filepath.WalkDir(h.Root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if info, err := d.Info(); err != nil || info.ModTime().Unix() != 0 {
			t.Errorf("%s was written: %v", path, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestApply_oneFailureStopsNothing(t *testing.T) {
	h := machine(t, "0-7")
	for _, name := range []string{"tcp_timeout_established", "udp_timeout"} {
		if err := os.Remove(filepath.Join(h.Root, sysctls+name)); err != nil {
			t.Fatal(err)
		}
	}
	s := kubeProxyDefaults()
	s.UDP = time.Minute
	r := h.Apply(s)
	want := "cannot set nf_conntrack_tcp_timeout_established to 86400, nf_conntrack_udp_timeout to 60: " +
		"this kernel does not track connections yet; modprobe nf_conntrack"
	if err := r.Err(); err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
	if got := h.find(t, "nf_conntrack_tcp_timeout_close_wait"); got != "3600" {
		t.Errorf("what can be set was not: %s", got)
	}
}

func TestReport_saysWhatToDo(t *testing.T) {
	failed := func(name string, err error) Failure {
		return Failure{Change{name, "1", "2"}, &fs.PathError{Op: "write", Path: "/x", Err: err}, false}
	}
	oom := failed("oom_score_adj", unix.EACCES)
	oom.Optional = true
	r := Report{Failed: []Failure{
		failed("a", unix.EROFS), failed("b", unix.EACCES), failed("c", unix.EROFS), failed("d", unix.EPERM), failed("e", unix.EINVAL), oom,
	}}
	var got []string
	for line := range strings.Lines(r.Err().Error()) {
		got = append(got, line[:min(len(line), 60)])
	}
	want := []string{
		"cannot set a to 2 (it is 1), c to 2 (it is 1): /proc/sys is ",
		"cannot set b to 2 (it is 1), d to 2 (it is 1): this needs ro",
		"cannot set e to 2 (it is 1): write /x: invalid argument",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if err := (Report{Failed: []Failure{oom}}).Err(); err != nil {
		t.Error("the kernel's mercy is optional:", err)
	}
}

// In a network namespace of its own the kernel itself takes the values.
func TestApply_kernel(t *testing.T) {
	bed := testbed.Need(t, testbed.Spec{})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	run := func(what string) string {
		c := bed.Command(t.Context(), testbed.Node, self)
		c.Env = append(os.Environ(), asHost+"="+what)
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	// A namespace begins with what the kernel's defaults are, whatever this machine's own values.
	names := map[string]string{"tcp_be_liberal": "1", "tcp_timeout_close_wait": "3600", "tcp_timeout_established": "7200",
		"udp_timeout": "20", "udp_timeout_stream": "90"}
	if got := run("1"); strings.Count(got, " -> ") != len(names) {
		t.Fatalf("applied:\n%s", got)
	}
	for name, want := range names {
		out, err := bed.Command(t.Context(), testbed.Node, "cat", "/"+sysctls+name).CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != want {
			t.Errorf("%s is %s, want %s: %v", name, out, want, err)
		}
	}
	if got := run("1"); got != "" {
		t.Errorf("the second time:\n%s", got)
	}
	got := run("max")
	if !strings.HasPrefix(got, "true cannot set nf_conntrack_max to ") || strings.Contains(got, "root") ||
		!strings.Contains(got, ": only the machine's own network namespace can change it. Run once with --init-only there") {
		t.Errorf("nf_conntrack_max: %s", got)
	}
}
